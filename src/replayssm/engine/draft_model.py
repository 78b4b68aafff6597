"""Who guesses the next tokens: a smaller model with the same vocabulary, for all sequences at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from replayssm import Precision, ReplayError, checks

from .drafters import Ask
from .grow import Growing
from .packed import Row
from .runner import Runner, settings_of, window_of
from .tree import Draft


class DraftModel(Growing):
    """A drafter with slots of its own: recurrent, hybrid or attention only, as the engine's model.

    It keeps what is certain of every sequence and takes drafts back as the engine does.
    """

    def __init__(
        self,
        model: nn.Module,
        branches: Sequence[int] = (1,),
        *,
        window: int | None = None,
        precision: Precision | None = None,
        chunk: int = 128,
        cost: float = 0.4,
        graphs: bool = True,
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
            graphs: as the engine's.
        """
        super().__init__(branches, cost)
        self.model, self.chunk = model, checks.integer("chunk", chunk, 1)
        self._window, self._precision, self._graphs = window, precision, graphs
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
        window = window_of(self.model, max_draft) if self._window is None else self._window
        settings = settings_of(window, max_draft, self._precision)
        self._runner = Runner(self.model, slots, None, max_length, settings, self._graphs)
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

    def _read(self, asks: Sequence[Ask]) -> tuple[list[int], Tensor]:
        """See ``Growing._read``."""
        runner = self.runner
        for ask in asks:
            if ask.key not in self._slots:
                self._slots[ask.key] = self._free.pop()
                runner.reset(self._slots[ask.key])
        ended: list[int] = []
        lines: list[Tensor] = []
        while True:
            rows, whose = [], []
            for i, ask in enumerate(asks):
                slot = self._slots[ask.key]
                part = ask.tokens[runner.lengths[slot] :]
                if part:
                    rows.append(Row(slot, part[: self.chunk], wanted=int(len(part) <= self.chunk)))
                    whose.append(i)
            if not rows:
                return ended, torch.cat(lines) if lines else torch.empty(0)
            lines.append(runner.forward(rows))
            runner.commit([row.count for row in rows])
            ended += [i for i, row in zip(whose, rows, strict=True) if row.wanted]

    def _step(self, asks: Sequence[Ask], drafts: Sequence[Draft], wanted: Sequence[int]) -> Tensor:
        """See ``Growing._step``."""
        rows = [
            Row(self._slots[ask.key], draft.tokens, draft.parents, number)
            for ask, draft, number in zip(asks, drafts, wanted, strict=True)
        ]
        logits = self.runner.forward(rows)
        self.runner.commit([0] * len(rows))
        return logits
