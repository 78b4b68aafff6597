"""What a model sees as its cache during one packed forward: rows of many sequences, one after the other.

Tokens lie side by side as ``[1, N]``. Rows of up to ``max_draft`` tokens come first: their recurrent layers go through
``step`` and ``conv_step``. Longer rows, parts of a prompt, follow: each takes the model's own chunked scan and loads
the state that comes out. Attention reads the keys and values of each row's slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replayssm import CacheLayer, ReplayError, Rows, conv_step, step
from replayssm.integrations.transformers.scan import Scan

from .attention import KeyValues, Span, attend


@dataclass(frozen=True)
class Row:
    """What one sequence brings to a forward.

    Attributes:
        slot: where the sequence lives.
        tokens: T token ids, at least one. More than ``max_draft`` are a part of a prompt, which is committed whole.
        parents: for drafts that form a tree, each token's parent in this row, −1 for the first token; None: a chain.
        wanted: for how many of the last tokens logits are returned.
        phase: a number of the request, such as its prompt length; it moves the first fold (``ReplayCache.load``).
    """

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    wanted: int = 1
    phase: int = 0

    @property
    def count(self) -> int:
        """T."""
        return len(self.tokens)


@dataclass(frozen=True)
class Plan:
    """Where everything of one packed forward is.

    Attributes:
        rows: step rows first, then parts of prompts.
        spans: of each row: slot, tokens and earlier tokens.
        table: the step rows, as the recurrent layers' verbs take them.
        device: of the model.
    """

    rows: Sequence[Row]
    spans: Sequence[Span]
    table: Rows
    device: torch.device

    @classmethod
    def of(cls, rows: Sequence[Row], lengths: Sequence[int], max_draft: int, device: torch.device) -> Plan:
        """Plan a forward. ``rows`` are in the order of the forward; ``lengths``: each row's committed tokens."""
        spans, at = [], 0
        for row, length in zip(rows, lengths, strict=True):
            spans.append(Span(row.slot, at, at + row.count, length, None if _is_chain(row) else row.parents))
            at += row.count
        steps = [row for row in rows if row.count <= max_draft]
        parents = None
        if any(span.parents is not None for span in spans):
            parents = [p for row in steps for p in (row.parents or range(-1, row.count - 1))]
        slots, counts = [row.slot for row in steps], [row.count for row in steps]
        table = Rows.draft(torch.tensor(slots, dtype=torch.int32, device=device), counts, parents)
        return cls(rows, spans, table, device)

    @property
    def steps(self) -> int:
        """How many rows are step rows."""
        return len(self.table.slots)

    @property
    def step_tokens(self) -> int:
        """How many tokens the step rows bring."""
        return self.spans[self.steps - 1].stop if self.steps else 0

    @property
    def chunks(self) -> list[tuple[Row, Span]]:
        """The rows that are parts of prompts."""
        return list(zip(self.rows, self.spans, strict=True))[self.steps :]


class View:
    """What every mixer asks of its cache: an earlier state is never there, so it takes its prefill path."""

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """False."""
        return False

    def is_recording_past(self, *args: Any, **kwargs: Any) -> bool:
        """False."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: the convolution finds its earlier inputs itself."""
        if state_idx:
            raise ReplayError("engine: this model keeps further convolution states; it is not supported")

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        """None: the state is in the pool."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """The inputs as they are."""
        self.get_conv_state(layer_idx, state_idx)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing: the scan has told the pool."""
        return recurrent_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """0: positions are given to the model."""
        return 0

    def update_indexer(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse."""
        raise ReplayError("engine: attention that selects its keys with an indexer is not supported")

    @property
    def layers(self) -> list[Any]:
        """Refuse: models that look into a cache's layers keep more there than keys and values."""
        return self.update_indexer()  # type: ignore[return-value]

    def scan(self, layer: int, call: Scan) -> Tensor:
        """Outputs [1, N, H, P] of the recurrence."""
        raise NotImplementedError

    def convolve(
        self, layer: int, stock: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None
    ) -> Tensor:
        """Outputs [1, C, N] of the short convolution."""
        raise NotImplementedError

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep keys and values of the new tokens."""
        raise NotImplementedError

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Outputs [1, N, heads, head_dim] of attention."""
        raise NotImplementedError


@dataclass
class PackedCache(View):
    """The cache argument of one packed forward.

    Attributes:
        plan: of this forward.
        recurrent: the pool's layer for each mixer's ``layer_idx``.
        keys: keys and values of the attention layers.
    """

    plan: Plan
    recurrent: dict[int, CacheLayer]
    keys: KeyValues
    _updated: int = field(default=-1, init=False)

    def scan(self, layer: int, call: Scan) -> Tensor:
        """See ``View.scan``."""
        place, plan = self.recurrent[layer], self.plan
        parts = []
        if plan.steps:
            part = call.part(0, plan.step_tokens)
            parts.append(part.finish(step(place, part.inputs(), plan.table)[None]))
        for row, span in plan.chunks:
            state = place.cache.materialise(place.index, [row.slot]) if span.length else None
            out, state = call.part(span.start, span.stop).chunked(state)
            place.cache.load(place.index, [row.slot], state, phase=row.phase)
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def convolve(
        self, layer: int, stock: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None
    ) -> Tensor:
        """See ``View.convolve``."""
        place, plan = self.recurrent[layer], self.plan
        parts = []
        if plan.steps:
            tokens = x[0, :, : plan.step_tokens].transpose(0, 1)
            parts.append(conv_step(place, tokens, weight, bias, plan.table, act).transpose(0, 1)[None])
        for row, span in plan.chunks:
            tail = place.cache.conv_tail(place.index, [row.slot])
            line = torch.cat([tail, x[:, :, span.start : span.stop]], -1)
            parts.append(stock(line, weight, bias, activation=act)[:, :, tail.shape[2] :])
            place.cache.load_conv(place.index, [row.slot], line[:, :, -tail.shape[2] :].contiguous())
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values into their slots; layers that expand what they cache get all of it back."""
        self._updated = layer_idx
        self.keys.write(layer_idx, keys, values, self.plan.spans)
        if layer_idx in self.keys.latent:
            return self.keys.gather(layer_idx, self.plan.spans)
        return keys, values

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Each row's attention over its own sequence."""
        layer, at, out = self._updated, 0, []
        for span in self.plan.spans:
            if layer in self.keys.latent:
                mine = key[:, :, at : at + span.seen], value[:, :, at : at + span.seen]
                at += span.seen
            else:
                mine = self.keys.of(layer, span)
            out.append(attend(query[:, :, span.start : span.stop], *mine, span, **options))
        return torch.cat(out, 2).transpose(1, 2)


class Running(threading.local):
    """The forward that runs in this thread, for the functions that the model's code calls."""

    view: View | None = None
    layer: int = -1


running = Running()


def _is_chain(row: Row) -> bool:
    return row.parents is None or list(row.parents) == list(range(-1, row.count - 1))
