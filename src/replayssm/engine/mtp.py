"""Who guesses the next tokens: the model's own multi-token-prediction head, for all sequences at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from replayssm import ReplayError

from .drafters import Ask, Seen
from .grow import Growing
from .mtp_head import MtpHead
from .packed import Row
from .runner import Runner, settings_of
from .tree import Draft

# Hidden states of a sequence that wait for their next tokens, or for the next draft; more are read at once.
WAITING = 64


@dataclass
class _Text:
    """What the head knows of a sequence.

    Attributes:
        slot: where its keys are.
        start: position of the first hidden state that was seen. What is before it the head does not know.
        read: pairs of a hidden state and the next token whose keys are in the slot.
        waiting: hidden states [n, hidden_size] that follow.
        said: the head's own [1, hidden_size]: after the text, and after each token of the draft.
    """

    slot: int
    start: int
    read: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    said: list[Tensor] = field(default_factory=list)

    @property
    def ready(self) -> int:
        """Hidden states that wait."""
        return sum(len(part) for part in self.waiting)

    @property
    def seen(self) -> int:
        """Position after the last hidden state."""
        return self.start + self.read + self.ready


class _Base(nn.Module):
    """The head as a runner's model without output layer.

    Attributes:
        inputs: [N or more, hidden_size], the hidden states before the tokens of the next forward.
    """

    def __init__(self, head: MtpHead, inputs: Tensor) -> None:
        super().__init__()
        self.head, self.inputs = head, inputs

    def forward(self, ids: Tensor, positions: Tensor, cache: Any) -> SimpleNamespace:
        """What the head says, [1, N, hidden_size]."""
        hidden = self.inputs[None, : ids.shape[1]]
        return SimpleNamespace(last_hidden_state=self.head(ids, hidden, positions, cache))


class _Stage(nn.Module):
    """The head as a runner's model."""

    def __init__(self, base: _Base) -> None:
        super().__init__()
        self.base_model = base

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        use_cache: bool = True,
        logits_to_keep: Tensor | None = None,
    ) -> SimpleNamespace:
        """Logits [1, N or kept, vocabulary]."""
        hidden = self.base_model(input_ids, position_ids, past_key_values).last_hidden_state
        return SimpleNamespace(
            logits=self.base_model.head.output(hidden if logits_to_keep is None else hidden[:, logits_to_keep])
        )


class MtpDrafter(Growing):
    """A drafter that reads the hidden states of the engine's model and adds one layer of its own.

    It has slots with the keys and values of that layer. Where a sequence goes on from states that were kept (a prompt
    that is reused, a return from preemption), the head knows what it has seen since.
    """

    def __init__(
        self, head: MtpHead, branches: Sequence[int] = (1,), *, cost: float = 0.3, graphs: bool = True
    ) -> None:
        """Draft with a head; the engine of its model binds it.

        Args:
            head: of the engine's model, see ``MtpHead.load``.
            branches: how many tokens to try after the text, after each of these, and so on; the last number goes on.
            cost: see ``Drafter``.
            graphs: as the engine's.
        """
        super().__init__(branches, cost)
        self.head, self._graphs = head, graphs
        self._runner: Runner | None = None
        self._texts: dict[Hashable, _Text] = {}
        self._free: list[int] = []

    @property
    def bytes(self) -> int:
        """Of the keys and values of all slots."""
        return 0 if self._runner is None else self._runner.bytes

    def bind(self, model: nn.Module, slots: int, max_length: int, max_draft: int) -> None:
        """See ``Drafter.bind``."""
        if self._runner is not None:
            raise ReplayError("drafter: another engine has this head; close that first")
        if model is not self.head.model:
            raise ReplayError("drafter: the head belongs to another model than the engine's")
        weight = self.head.fc.weight
        # At one address: a graph that is captured reads it there.
        self._inputs = weight.new_zeros((slots * max_draft, weight.shape[0]))
        self._base = _Base(self.head, self._inputs)
        settings = settings_of(max_draft, max_draft, None)
        self._runner = Runner(_Stage(self._base).eval(), slots, None, max_length, settings, self._graphs)
        self._runner.watch()
        self._free, self._texts = list(range(slots))[::-1], {}

    def close(self) -> None:
        """See ``Drafter.close``."""
        if self._runner is not None:
            self._runner.close()
            self._inputs = self._base.inputs = self._inputs.new_empty(0)
        self._runner = None
        self._texts.clear()

    def forget(self, key: Hashable) -> None:
        """See ``Drafter.forget``."""
        text = self._texts.pop(key, None)
        if text is not None:
            self._free.append(text.slot)

    def observe(self, seen: Sequence[Seen]) -> None:
        """See ``Observer.observe``."""
        for each in seen:
            text = self._texts.get(each.key)
            if text is None or text.seen != each.start:
                self.forget(each.key)
                text = self._texts[each.key] = _Text(self._free.pop(), each.start)
            text.waiting.append(each.hidden)
        self._take({each.key: each.tokens for each in seen if self._texts[each.key].ready > WAITING})
        for each in seen:
            for heir in each.heirs:
                self._copy(self._texts[each.key], heir)

    def _copy(self, text: _Text, heir: Hashable) -> None:
        assert self._runner is not None
        self.forget(heir)
        slot = self._free.pop()
        self._runner.lengths[text.slot] = text.read
        self._runner.fork(text.slot, slot)
        self._texts[heir] = replace(text, slot=slot, waiting=list(text.waiting), said=[])

    def _read(self, asks: Sequence[Ask]) -> tuple[list[int], Tensor]:
        """See ``Growing._read``."""
        # Without the hidden state before the last token there is nothing to go on from.
        known = [i for i, ask in enumerate(asks) if self._has_all(ask)]
        logits = self._take({asks[i].key: asks[i].tokens for i in known})
        return known, torch.cat([logits[asks[i].key] for i in known]) if known else torch.empty(0)

    def _has_all(self, ask: Ask) -> bool:
        text = self._texts.get(ask.key)
        return text is not None and text.ready > 0 and text.seen == len(ask.tokens) - 1

    def _take(self, texts: dict[Hashable, Sequence[int]]) -> dict[Hashable, Tensor]:
        """Put the waiting pairs of sequences with these tokens into their slots; logits [1, vocabulary] after each."""
        assert self._runner is not None
        found: dict[Hashable, Tensor] = {}
        rows: dict[Hashable, Row] = {}
        hidden: dict[Hashable, Tensor] = {}
        for key, tokens in texts.items():
            text = self._texts[key]
            whole = text.waiting[0] if len(text.waiting) == 1 else torch.cat(text.waiting)
            first = text.start + text.read + 1
            after = tokens[first : first + len(whole)]
            rows[key], hidden[key] = Row(text.slot, after), whole[: len(after)]
            text.waiting = [whole[len(after) :]] if len(after) < len(whole) else []
            self._runner.lengths[text.slot] = text.read
        most = self._runner.max_draft
        for keys in ([k for k in rows if rows[k].count <= most], [k for k in rows if rows[k].count > most]):
            if keys:
                logits, said = self._run([rows[key] for key in keys], [hidden[key] for key in keys])
                for key, line, last in zip(keys, logits.split(1), said, strict=True):
                    text = self._texts[key]
                    text.read, text.said, found[key] = text.read + rows[key].count, [last], line
        return found

    def _step(self, asks: Sequence[Ask], drafts: Sequence[Draft], wanted: Sequence[int]) -> Tensor:
        """See ``Growing._step``."""
        assert self._runner is not None
        rows, hidden, texts = [], [], [self._texts[ask.key] for ask in asks]
        for text, draft, number in zip(texts, drafts, wanted, strict=True):
            # Of a chain, the slot still has the keys of the tokens before the last one.
            chain = draft.row_parents is None
            done = draft.size - 1 if chain else 0
            self._runner.lengths[text.slot] = text.read + done
            rows.append(Row(text.slot, draft.tokens[done:], None if chain else draft.parents, number))
            hidden += [text.said[parent + 1] for parent in draft.parents[done:]]
        logits, said = self._run(rows, hidden)
        for text, row, new in zip(texts, rows, said, strict=True):
            text.said += new.split(1) if row.wanted > 1 else [new]
        return logits

    @torch.no_grad()
    def _run(self, rows: Sequence[Row], hidden: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run rows that are all of up to ``max_draft`` tokens, or all longer.

        Returns:
            Logits [Σ wanted, vocabulary], and what the head says at each row's last ``wanted`` tokens [n, hidden_size].
        """
        assert self._runner is not None
        inputs = torch.cat(list(hidden))
        if rows[0].count <= self._runner.max_draft:
            self._inputs[: len(inputs)] = inputs
            self._base.inputs = self._inputs
        else:
            self._base.inputs = inputs
        logits = self._runner.forward(rows)
        said = self._runner.hidden([range(row.count - row.wanted, row.count) for row in rows])
        self._base.inputs = self._inputs
        self._runner.drop()
        return logits, said
