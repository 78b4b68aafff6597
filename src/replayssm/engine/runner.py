"""One packed forward of a model over slots, and the verbs of what it left there.

A `Runner` owns the memory of ``slots`` sequences: the replayed states of the recurrent layers, their convolutions, and
the keys and values of the attention layers. It knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from replayssm import MAMBA2, Conv, Layout, Precision, ReplayCache, ReplayError
from replayssm.integrations.transformers.scan import Scan, Settings

from .attention import KeyValues, Span
from .binding import bind, cache_name, configs_of, packed, takes, unbind
from .packed import PackedCache, Plan, Row, View


@dataclass(frozen=True)
class Snapshot:
    """A slot's sequence as plain tensors on the CPU, to be continued later or elsewhere.

    Attributes:
        start: first token whose keys and values are here.
        length: tokens of the sequence.
        states: what ``ReplayCache.export`` gave, for each pool.
        keys: ``layer_idx`` -> keys and values [heads, length − start, dim].
    """

    start: int
    length: int
    states: list[dict[str, Tensor]]
    keys: dict[int, tuple[Tensor, Tensor]]

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        states = sum(t.nbytes for state in self.states for t in state.values())
        return states + sum(t.nbytes for pair in self.keys.values() for t in pair)


@dataclass
class Shapes(View):
    """A forward of one token that only looks: which layers a model has, and how large their memory is.

    Attributes:
        layouts: layout of each recurrent layer, by ``layer_idx``.
        keys: heads, width of a key, width of a value of each attention layer.
        latent: attention layers that expand what they cache.
    """

    settings: Settings
    layouts: dict[int, Layout] = field(default_factory=dict)
    keys: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    latent: set[int] = field(default_factory=set)
    _conv: Conv | None = None
    _updated: tuple[int, Tensor | None] = (-1, None)

    def convolve(self, layer: int, stock: Any, x: Tensor, weight: Tensor, bias: Any, act: str | None) -> Tensor:
        """Stock's; the scan of the same layer follows."""
        self._conv = Conv(*weight.shape)
        return stock(x, weight, bias, activation=act)

    def scan(self, layer: int, call: Scan) -> Tensor:
        """Stock's."""
        settings = self.settings
        self.layouts[layer] = Layout(
            call.recurrence,
            *call.sizes,
            settings.window,
            settings.max_draft,
            call.tokens[0].dtype,
            settings.precision,
            self._conv,
        )
        return call.chunked(None)[0]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As given."""
        self.keys[layer_idx] = keys.shape[1], keys.shape[3], values.shape[3]
        self._updated = layer_idx, keys
        return keys, values

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """A single token attends to itself."""
        layer, keys = self._updated
        if key is not keys:
            self.latent.add(layer)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)

    def slot_bytes(self, max_length: int, itemsize: int) -> int:
        """Bytes that one sequence takes."""
        keys = sum(heads * (key + value) for heads, key, value in self.keys.values())
        return sum(layout.slot_bytes for layout in self.layouts.values()) + keys * max_length * itemsize


class Runner:
    """A model and the memory of its sequences.

    Attributes:
        model: of transformers; stock again after ``close``.
        slots: sequences that fit.
        max_length: most tokens of a sequence.
        max_draft: most tokens of a row that can be taken back.
        slot_bytes: memory of one sequence.
        lengths: committed tokens of each slot.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: int | None,
        memory: int | None,
        max_length: int,
        settings: Settings,
    ) -> None:
        """Bind the model and allocate ``slots`` sequences, or as many as ``memory`` bytes hold."""
        self.model, self.max_length, self.max_draft = model, max_length, settings.max_draft
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._cache_name = cache_name(model)
        self._configs = configs_of(model)
        self._mixers = bind(model)
        try:
            shapes = Shapes(settings)
            self._forward(shapes, [0], [0], None)
            self.slot_bytes = shapes.slot_bytes(max_length, self.dtype.itemsize)
            self.slots = slots if slots is not None else (memory or 0) // self.slot_bytes
            if self.slots < 1:
                raise ReplayError(f"memory: one sequence takes {self.slot_bytes} bytes, got {memory}")
        except BaseException:
            unbind(self._mixers)
            raise
        self.keys = KeyValues(shapes.keys, frozenset(shapes.latent), self.slots, max_length, self.dtype, self.device)
        self.pools: list[ReplayCache] = []
        self._recurrent = {}
        for layout in dict.fromkeys(shapes.layouts.values()):
            layers = [layer for layer, mine in shapes.layouts.items() if mine == layout]
            pool = ReplayCache.allocate(layout, len(layers), self.slots, self.device)
            self.pools.append(pool)
            self._recurrent.update({layer: pool[index] for index, layer in enumerate(layers)})
        self.lengths = [0] * self.slots
        self._plan: Plan | None = None
        self._order: list[int] = []
        self._hidden: Tensor | None = None
        self._tap: Any = None

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        return self.keys.bytes + sum(pool.bytes for pool in self.pools)

    def close(self) -> None:
        """Make the model stock again."""
        unbind(self._mixers)
        self._mixers = []
        if self._tap is not None:
            self._tap.remove()

    def watch(self) -> None:
        """From now on, keep what the output layer reads, for ``hidden``."""

        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            self._hidden = output.last_hidden_state[0]

        self._tap = self.model.base_model.register_forward_hook(keep)  # type: ignore[union-attr]

    def hidden(self, paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Last hidden states [n, hidden_size] of some tokens of each row of the last forward, until its ``commit``."""
        assert self._plan is not None
        assert self._hidden is not None
        starts = {r: span.start for r, span in zip(self._order, self._plan.spans, strict=True)}
        index = [starts[r] + token for r, path in enumerate(paths) for token in path]
        return list(self._hidden[index].split([len(path) for path in paths]))

    @torch.no_grad()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Run the rows' tokens through the model; ``commit`` says which of them stay.

        Returns:
            Logits [Σ wanted, vocabulary] in the order of the rows, in the model's dtype.
        """
        self._order = sorted(range(len(rows)), key=lambda r: rows[r].count > self.max_draft)
        ordered = [rows[r] for r in self._order]
        plan = Plan.of(ordered, [self.lengths[row.slot] for row in ordered], self.max_draft, self.device)
        for span in plan.spans:
            if span.seen > self.max_length:
                raise ReplayError(f"slot {span.slot}: {span.seen} tokens do not fit into max_length={self.max_length}")
        if plan.chunks:
            # `load` empties the buffers of all layers: what they hold has to be in the checkpoints before.
            for pool in self.pools:
                pool.fold([row.slot for row, _ in plan.chunks])
        spans = dict(zip(self._order, plan.spans, strict=True))
        wanted = [i for r, row in enumerate(rows) for i in range(spans[r].stop - row.wanted, spans[r].stop)]
        tokens = [token for row in ordered for token in row.tokens]
        positions = [span.length + depth for span in plan.spans for depth in span.depths()]
        self._plan = plan
        return self._forward(PackedCache(plan, self._recurrent, self.keys), tokens, positions, wanted)

    @torch.no_grad()
    def commit(self, accepted: Sequence[int], paths: Sequence[Sequence[int]] | None = None) -> None:
        """Make tokens of the last forward part of their sequences.

        Args:
            accepted: for each row, how many; parts of prompts are accepted whole.
            paths: for trees, which ones: row-local, from the first token on.
        """
        plan = self._plan
        assert plan is not None
        taken = [accepted[r] for r in self._order]
        lines = [list(range(n)) if paths is None else list(paths[r]) for n, r in zip(taken, self._order, strict=True)]
        if plan.steps:
            path = None if paths is None else lines[: plan.steps]
            for pool in self.pools:
                pool.commit(plan.table, taken[: plan.steps], path)
        for span, count, line in zip(plan.spans, taken, lines, strict=True):
            if paths is not None:
                self.keys.keep(span, line)
            self.lengths[span.slot] = span.length + count
        self._plan = None

    def reset(self, slot: int) -> None:
        """Empty a slot."""
        for pool in self.pools:
            pool.reset([slot])
        self.lengths[slot] = 0

    def fork(self, source: int, target: int) -> None:
        """Copy a sequence into another slot."""
        for pool in self.pools:
            pool.fork([source], [target])
        self.keys.copy(source, target, self.lengths[source])
        self.lengths[target] = self.lengths[source]

    @torch.no_grad()
    def export(self, slot: int, start: int = 0) -> Snapshot:
        """A slot's sequence; its keys and values from token ``start`` on."""
        length = self.lengths[slot]
        span = Span(slot, 0, length, 0)
        keys = {}
        for layer in self.keys.layers:
            k, v = (part[0, :, start:].clone().cpu() for part in self.keys.of(layer, span))
            keys[layer] = (k, v)
        return Snapshot(start, length, [pool.export([slot]) for pool in self.pools], keys)

    @torch.no_grad()
    def import_(self, slot: int, parts: Sequence[Snapshot]) -> None:
        """Continue a sequence: the state of the last part, and the keys and values of all, in order."""
        for pool, state in zip(self.pools, parts[-1].states, strict=True):
            pool.import_([slot], state)
        for part in parts:
            for layer, pair in part.keys.items():
                for whole, given in zip(self.keys.layers[layer], pair, strict=True):
                    whole[slot, :, part.start : part.length] = given
        self.lengths[slot] = parts[-1].length

    def _forward(self, view: View, tokens: list[int], positions: list[int], wanted: list[int] | None) -> Tensor:
        """Logits of the tokens ``wanted``, or of all."""
        options: dict[str, Any] = {self._cache_name: view}
        if takes(self.model, "position_ids"):
            options["position_ids"] = torch.tensor([positions], device=self.device)
        keep = wanted is not None and takes(self.model, "logits_to_keep")
        if keep:
            options["logits_to_keep"] = torch.tensor(wanted, dtype=torch.int64, device=self.device)
        ids = torch.tensor([tokens], device=self.device)
        with torch.no_grad(), packed(self._configs, view):
            logits = self.model(input_ids=ids, use_cache=True, **options).logits[0]
        return logits if keep or wanted is None else logits[wanted]


def settings_of(window: int, max_draft: int, precision: Precision | None) -> Settings:
    """The settings of the recurrent layers, checked in the caller's words."""
    settings = Settings(window, max_draft, Precision() if precision is None else precision)
    Layout(MAMBA2, 1, 1, 1, 1, window, max_draft, torch.float32, settings.precision)
    return settings
