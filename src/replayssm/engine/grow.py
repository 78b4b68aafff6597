"""Drafts of models: they grow level by level, for all sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from replayssm import ReplayError, checks

from .drafters import Ask
from .sampling import Point, branches
from .tree import Draft


class Growing:
    """A drafter that computes logits after what is certain, then after each level of its drafts.

    It draws with the engine's noise, so that it is often right where the text is sampled, too.

    Attributes:
        branches: how many tokens to try after the text, after each of these, and so on; the last number goes on.
        cost: see ``Drafter``.
    """

    def __init__(self, branches: Sequence[int], cost: float) -> None:
        """Check both."""
        if not branches:
            raise ReplayError("branches: expected at least one number")
        if not 0 < cost < 1:
            raise ReplayError(f"cost: expected a number between 0 and 1, got {cost}")
        self.cost = cost
        self.branches = [checks.integer("branches", number, 1) for number in branches]

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See ``Drafter.propose``."""
        drafts, ends = [Draft() for _ in asks], self._read(asks)
        going = {i: 1 for i, end in enumerate(ends) if end is not None}  # ask -> tokens of its last level
        level = 0
        while going:
            if level:
                logits = self._step([asks[i] for i in going], [drafts[i] for i in going], list(going.values()))
                split = dict(zip(going, logits.split(list(going.values())), strict=True))
            else:
                split = {i: end for i, end in enumerate(ends) if end is not None}
            number = self.branches[min(level, len(self.branches) - 1)]
            grown = {i: _grow(asks[i], drafts[i], going[i] if level else 0, split[i], number) for i in going}
            level += 1
            going = {i: n for i, n in grown.items() if n and level < asks[i].depth and drafts[i].size < asks[i].limit}
        return drafts

    def _read(self, asks: Sequence[Ask]) -> list[Tensor | None]:
        """Compute what became certain of each sequence; logits [1, vocabulary] at its end, None if nothing did."""
        raise NotImplementedError

    def _step(self, asks: Sequence[Ask], drafts: Sequence[Draft], wanted: Sequence[int]) -> Tensor:
        """Logits [Σ wanted, vocabulary] after the last ``wanted`` tokens of each draft; nothing of it stays."""
        raise NotImplementedError


def _grow(ask: Ask, draft: Draft, last: int, logits: Tensor, number: int) -> int:
    """Add a level below the ``last`` tokens of the draft (0: below the text); how many tokens it has."""
    size = draft.size
    nodes = list(range(size - last, size)) if last else [-1]
    found = branches(logits, [_below(ask.point, draft.path(node)) for node in nodes], number)
    for rank in range(number):
        for node, tokens in zip(nodes, found, strict=True):
            room = draft.size < ask.limit
            if room and draft.child(node, tokens[rank]) is None:
                draft.add(node, tokens[rank])
    return draft.size - size


def _below(point: Point, path: list[int]) -> Point:
    """The point after ``path``."""
    output = [*point.output, *path] if point.params.penalised else ()
    return replace(point, position=point.position + len(path), output=output)
