"""Who guesses the next tokens: a smaller model with the same vocabulary, for all sequences at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from replayssm import Precision, ReplayError, checks

from .drafters import Ask
from .packed import Row
from .runner import Runner, settings_of
from .sampling import Point, branches
from .tree import Draft


class DraftModel:
    """A drafter with slots of its own: recurrent, hybrid or attention only, as the engine's model.

    It keeps what is certain of every sequence and takes drafts back as the engine does. It draws with the engine's
    noise, so that it is often right where the text is sampled, too.
    """

    def __init__(
        self,
        model: nn.Module,
        branches: Sequence[int] = (1,),
        *,
        window: int = 16,
        precision: Precision | None = None,
        chunk: int = 128,
        cost: float = 0.4,
    ) -> None:
        """Wrap a model; the engine binds it.

        Args:
            model: of transformers, with the vocabulary of the engine's model.
            branches: how many tokens to try after the text, after each of these, and so on; the last number goes on.
                (1,) is a chain, (3, 1) three chains.
            window: as the engine's.
            precision: as the engine's.
            chunk: prompt tokens of a sequence in one forward.
            cost: see ``Drafter``; for a model of a fifth of the size.
        """
        if not branches:
            raise ReplayError("branches: expected at least one number")
        if not 0 < cost < 1:
            raise ReplayError(f"cost: expected a number between 0 and 1, got {cost}")
        self.cost = cost
        self.branches = [checks.integer("branches", number, 1) for number in branches]
        self.model, self.chunk = model, checks.integer("chunk", chunk, 1)
        self._window, self._precision = window, precision
        self._slots: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._runner: Runner | None = None

    @property
    def runner(self) -> Runner:
        """The model with its memory."""
        if self._runner is None:
            raise ReplayError("drafter: no engine has this draft model")
        return self._runner

    def bind(self, model: nn.Module, slots: int, max_length: int, max_draft: int) -> None:
        """See ``Drafter.bind``."""
        if self._runner is not None:
            raise ReplayError("drafter: another engine has this draft model; close that first")
        ours, theirs = (m.get_output_embeddings().weight.shape[0] for m in (self.model, model))  # type: ignore
        if ours != theirs:
            raise ReplayError(f"drafter: the draft model has {ours} tokens, the engine's model {theirs}")
        settings = settings_of(self._window, max_draft, self._precision)
        self._runner = Runner(self.model, slots, None, max_length, settings)
        self._free, self._slots = list(range(slots))[::-1], {}

    def close(self) -> None:
        """See ``Drafter.close``."""
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def forget(self, key: Hashable) -> None:
        """See ``Drafter.forget``."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)

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
            grown = {i: self._grow(asks[i], drafts[i], going[i] if level else 0, split[i], number) for i in going}
            level += 1
            going = {i: n for i, n in grown.items() if n and level < asks[i].depth and drafts[i].size < asks[i].limit}
        return drafts

    def _grow(self, ask: Ask, draft: Draft, last: int, logits: Tensor, number: int) -> int:
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

    def _read(self, asks: Sequence[Ask]) -> list[Tensor | None]:
        """Compute what became certain of each sequence; logits [1, vocabulary] at its end, None if nothing did."""
        runner = self.runner
        for ask in asks:
            if ask.key not in self._slots:
                self._slots[ask.key] = self._free.pop()
                runner.reset(self._slots[ask.key])
        ends: list[Tensor | None] = [None] * len(asks)
        while True:
            rows, whose = [], []
            for i, ask in enumerate(asks):
                slot = self._slots[ask.key]
                part = ask.tokens[runner.lengths[slot] :]
                if part:
                    rows.append(Row(slot, part[: self.chunk], wanted=int(len(part) <= self.chunk)))
                    whose.append(i)
            if not rows:
                return ends
            logits = runner.forward(rows)
            runner.commit([row.count for row in rows])
            done = [i for i, row in zip(whose, rows, strict=True) if row.wanted]
            for i, line in zip(done, logits, strict=True):
                ends[i] = line[None]

    def _step(self, asks: Sequence[Ask], drafts: Sequence[Draft], wanted: Sequence[int]) -> Tensor:
        """Logits after the last ``wanted`` tokens of each draft; nothing of it stays."""
        rows = [
            Row(self._slots[ask.key], draft.tokens, draft.parents, number)
            for ask, draft, number in zip(asks, drafts, wanted, strict=True)
        ]
        logits = self.runner.forward(rows)
        self.runner.commit([0] * len(rows))
        return logits


def _below(point: Point, path: list[int]) -> Point:
    """The point after ``path``."""
    output = [*point.output, *path] if point.params.penalised else ()
    return replace(point, position=point.position + len(path), output=output)
