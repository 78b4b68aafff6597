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
        drafts = [Draft() for _ in asks]
        going, logits = self._read(asks)
        # The nodes of each draft whose logits these are; −1 is the text.
        ends = {i: [-1] for i in going}
        level = 0
        while ends:
            number = self.branches[min(level, len(self.branches) - 1)]
            points = [_below(asks[i].point, drafts[i].path(node)) for i, nodes in ends.items() for node in nodes]
            found = iter(branches(logits, points, number))
            grown = {
                i: _grow(drafts[i], nodes, [next(found) for _ in nodes], asks[i].limit) for i, nodes in ends.items()
            }
            level += 1
            ends = {i: n for i, n in grown.items() if n and level < asks[i].depth and drafts[i].size < asks[i].limit}
            if ends:
                logits = self._step([asks[i] for i in ends], [drafts[i] for i in ends], [len(n) for n in ends.values()])
        return drafts

    def _read(self, asks: Sequence[Ask]) -> tuple[list[int], Tensor]:
        """Compute what became certain of each sequence.

        Returns:
            Numbers of the asks for which something did, and logits [n, vocabulary] at their ends.
        """
        raise NotImplementedError

    def _step(self, asks: Sequence[Ask], drafts: Sequence[Draft], wanted: Sequence[int]) -> Tensor:
        """Logits [Σ wanted, vocabulary] after the last ``wanted`` tokens of each draft; nothing of it stays."""
        raise NotImplementedError


def _grow(draft: Draft, nodes: list[int], choices: list[list[int]], limit: int) -> list[int]:
    """Add a level below these nodes, the likeliest choice of each first; the new nodes."""
    size = draft.size
    for rank in range(len(choices[0])):
        for node, tokens in zip(nodes, choices, strict=True):
            if draft.size < limit and draft.child(node, tokens[rank]) is None:
                draft.add(node, tokens[rank])
    return list(range(size, draft.size))


def _below(point: Point, path: list[int]) -> Point:
    """The point after ``path``."""
    output = [*point.output, *path] if point.params.penalised else ()
    return replace(point, position=point.position + len(path), output=output)
