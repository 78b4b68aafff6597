"""One packed forward of a model over slots, and the verbs of what it left there.

A `Runner` owns the memory of ``slots`` sequences: the replayed states of the recurrent layers, their convolutions, and
the keys and values of the attention layers. It knows nothing of requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from replayssm import MAMBA2, Conv, Layout, Precision, ReplayCache, ReplayError
from replayssm.integrations.transformers.registry import find_mixers
from replayssm.integrations.transformers.scan import Scan, Settings
from replayssm.plan import choose_window

from .attention import KeyValues, Span
from .binding import bind, cache_name, configs_of, packed, takes, unbind
from .device import Stepper, best_of
from .fuse import fuse
from .memory import expect_memory
from .packed import PackedCache, Plan, Row, View

Allocate = Callable[[Layout, int, int, torch.device], ReplayCache]


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


@dataclass(frozen=True)
class Scores:
    """What a forward says about the tokens that were asked for, n of them.

    Attributes:
        whole: logits [M, vocabulary] in the model's dtype.
        places: which of these M are the n; None: all, in order.
        best: int64 [n], the likeliest token; −1 where the logits are no numbers.
    """

    whole: Tensor
    places: list[int] | None
    best: Tensor

    @property
    def logits(self) -> Tensor:
        """[n, vocabulary]."""
        return self.whole if self.places is None else self.whole[self.places]

    def of(self, chosen: Sequence[int]) -> Tensor:
        """Logits [len(chosen), vocabulary] of some of the n."""
        return self.whole[list(chosen) if self.places is None else [self.places[i] for i in chosen]]


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
        graphs: bool = True,
        allocate: Allocate = ReplayCache.allocate,
        fused: bool = True,
    ) -> None:
        """Bind the model and allocate ``slots`` sequences, or as many as ``memory`` bytes hold.

        ``graphs``: on a GPU, capture decode and verify in CUDA graphs. ``allocate``: memory of recurrent layers.
        ``fused``: on a GPU, norms and gated MLPs as kernels.
        """
        self.model, self.max_length, self.max_draft = model, max_length, settings.max_draft
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._cache_name = cache_name(model)
        self._configs = configs_of(model)
        self._mixers = bind(model)
        try:
            if fused and _has_kernels(self.device):
                self._mixers += fuse(model)
            shapes = Shapes(settings)
            self._forward(shapes, *self._ids([0], [0]), None)
            self.slot_bytes = shapes.slot_bytes(max_length, self.dtype.itemsize)
            self.slots = slots if slots is not None else (memory or 0) // self.slot_bytes
            if self.slots < 1:
                raise ReplayError(f"memory: one sequence takes {self.slot_bytes} bytes, got {memory}")
            expect_memory(self.slots, self.slot_bytes, self.device)
            if shapes.latent and graphs and self.device.type == "cuda":
                raise ReplayError(
                    f"graphs: layer {min(shapes.latent)} caches latents and expands them, which takes another shape at "
                    "every step; pass graphs=False"
                )
            self._allocate(shapes, allocate)
        except BaseException:
            unbind(self._mixers)
            raise
        self.lengths = [0] * self.slots
        # On a GPU step rows take a way of their own; latents of attention are expanded row by row on either.
        self.stepper: Stepper | None = None
        if _has_kernels(self.device) and not shapes.latent:
            self.stepper = Stepper(
                self._whole, self.pools, self._recurrent, self.keys, self.slots, settings.max_draft, graphs
            )
        self._plan: Plan | None = None
        self._order: list[int] = []
        self._stepped: list[Span] = []
        self._hidden: Tensor | None = None
        self._tap: Any = None

    def _allocate(self, shapes: Shapes, allocate: Allocate) -> None:
        latent = frozenset(shapes.latent)
        self.keys = KeyValues(shapes.keys, latent, self.slots, self.max_length, self.dtype, self.device)
        self.pools: list[ReplayCache] = []
        self._recurrent = {}
        for layout in dict.fromkeys(shapes.layouts.values()):
            layers = [layer for layer, mine in shapes.layouts.items() if mine == layout]
            pool = allocate(layout, len(layers), self.slots, self.device)
            self.pools.append(pool)
            self._recurrent.update({layer: pool[index] for index, layer in enumerate(layers)})

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
        spans, parts = list(self._stepped), []
        if self.stepper is not None and spans:
            parts.append(self.stepper.hidden)
        shift = len(parts[0]) if parts else 0
        if self._plan is not None:
            spans += [replace(span, start=span.start + shift) for span in self._plan.spans]
            parts.append(self._hidden)
        starts = dict(zip(self._order, (span.start for span in spans), strict=True))
        index = [starts[r] + token for r, path in enumerate(paths) for token in path]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return list(whole[index].split([len(path) for path in paths]))

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Run the rows' tokens through the model; ``commit`` says which of them stay.

        Returns:
            Logits [Σ wanted, vocabulary] in the order of the rows, in the model's dtype.
        """
        return self.score(rows).logits

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> Scores:
        """As ``forward``, with the likeliest tokens, and without copying logits. The next forward overwrites them."""
        for row in rows:
            seen = self.lengths[row.slot] + row.count
            if seen > self.max_length:
                raise ReplayError(f"slot {row.slot}: {seen} tokens do not fit into max_length={self.max_length}")
        self._plan = None
        self._order = sorted(range(len(rows)), key=lambda r: rows[r].count > self.max_draft)
        steps = sum(row.count <= self.max_draft for row in rows) if self.stepper is not None else 0
        ordered = [rows[r] for r in self._order]
        self._stepped = self._spans(ordered[:steps])
        parts = []
        if self.stepper is not None and steps:
            whole, best = self.stepper.forward(ordered[:steps], [span.length for span in self._stepped])
            places = [i for row, span in zip(ordered, self._stepped, strict=False) for i in _wanted(row, span)]
            simple = places == list(range(len(places)))
            parts.append(Scores(whole, places, best[: len(places)] if simple else best[places]))
        if steps < len(rows):
            parts.append(self._packed(ordered[steps:]))
        if len(parts) == 1 and self._order == sorted(self._order):
            return parts[0]
        # Back to the order of the rows.
        whole = parts[0].whole if len(parts) == 1 else torch.cat([part.whole for part in parts])
        shift, places = 0, []
        for part in parts:
            places += [shift + i for i in (range(len(part.whole)) if part.places is None else part.places)]
            shift += len(part.whole)
        at, starts = 0, {}
        for r, row in zip(self._order, ordered, strict=True):
            starts[r], at = at, at + row.wanted
        back = [starts[r] + i for r, row in enumerate(rows) for i in range(row.wanted)]
        best = torch.cat([part.best for part in parts])[back]
        return Scores(whole, [places[i] for i in back], best)

    @torch.no_grad()
    def commit(self, accepted: Sequence[int], paths: Sequence[Sequence[int]] | None = None) -> None:
        """Make tokens of the last forward part of their sequences.

        Args:
            accepted: for each row, how many; parts of prompts are accepted whole.
            paths: for trees, which ones: row-local, from the first token on.
        """
        taken = [accepted[r] for r in self._order]
        lines = [list(range(n)) if paths is None else list(paths[r]) for n, r in zip(taken, self._order, strict=True)]
        steps = len(self._stepped)
        if self.stepper is not None and steps:
            self.stepper.commit(taken[:steps], lines[:steps])
        if self._plan is not None:
            self._commit_packed(self._plan, taken[steps:], None if paths is None else lines[steps:])
        spans = [*self._stepped, *(self._plan.spans if self._plan is not None else ())]
        for span, count in zip(spans, taken, strict=True):
            self.lengths[span.slot] = span.length + count
        self.drop()

    def drop(self) -> None:
        """Forget the last forward; without a commit nothing of it stays."""
        self._plan, self._stepped, self._order, self._hidden = None, [], [], None

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
    def import_(self, slot: int, parts: Sequence[Snapshot], phase: int | None = None) -> None:
        """Continue a sequence: the state of the last part, and the keys and values of all, in order.

        ``phase``: of the request, where the parts are another one's.
        """
        for pool, state in zip(self.pools, parts[-1].states, strict=True):
            pool.import_([slot], state, phase)
        for part in parts:
            for layer, pair in part.keys.items():
                for whole, given in zip(self.keys.layers[layer], pair, strict=True):
                    whole[slot, :, part.start : part.length] = given
        self.lengths[slot] = parts[-1].length

    def _spans(self, rows: Sequence[Row]) -> list[Span]:
        """Where the tokens of these rows are, one after the other."""
        spans, at = [], 0
        for row in rows:
            spans.append(Span(row.slot, at, at + row.count, self.lengths[row.slot], row.parents))
            at += row.count
        return spans

    def _packed(self, rows: Sequence[Row]) -> Scores:
        """One forward of rows of any length, row by row where tokens meet their past."""
        plan = Plan.of(rows, [self.lengths[row.slot] for row in rows], self.max_draft, self.device)
        if plan.chunks:
            # `load` empties the buffers of all layers: what they hold has to be in the checkpoints before.
            for pool in self.pools:
                pool.fold([row.slot for row, _ in plan.chunks])
        wanted = [i for row, span in zip(rows, plan.spans, strict=True) for i in _wanted(row, span)]
        tokens = [token for row in rows for token in row.tokens]
        positions = [span.length + depth for span in plan.spans for depth in span.depths()]
        self._plan = plan
        view = PackedCache(plan, self._recurrent, self.keys)
        logits = self._forward(view, *self._ids(tokens, positions), wanted)
        return Scores(logits, None, best_of(logits))

    def _commit_packed(self, plan: Plan, taken: list[int], lines: list[list[int]] | None) -> None:
        if plan.steps:
            path = None if lines is None else lines[: plan.steps]
            for pool in self.pools:
                pool.commit(plan.table, taken[: plan.steps], path)
        if lines is not None:
            for span, line in zip(plan.spans, lines, strict=True):
                self.keys.keep(span, line)

    def _ids(self, tokens: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
        """Token ids and positions [1, N]."""
        return torch.tensor([tokens], device=self.device), torch.tensor([positions], device=self.device)

    def _whole(self, view: View, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of all tokens, and hidden states where they are wanted."""
        return self._forward(view, ids, positions, None), self._hidden

    def _forward(self, view: View, ids: Tensor, positions: Tensor, wanted: list[int] | None) -> Tensor:
        """Logits of the tokens ``wanted``, or of all."""
        options: dict[str, Any] = {self._cache_name: view}
        if takes(self.model, "position_ids"):
            options["position_ids"] = positions
        keep = wanted is not None and takes(self.model, "logits_to_keep")
        if keep:
            options["logits_to_keep"] = torch.tensor(wanted, dtype=torch.int64, device=self.device)
        with torch.no_grad(), packed(self._configs, view):
            logits = self.model(input_ids=ids, use_cache=True, **options).logits[0]
        return logits if keep or wanted is None else logits[wanted]


def _wanted(row: Row, span: Span) -> range:
    """Places of the row's last ``wanted`` tokens."""
    return range(span.stop - row.wanted, span.stop)


def _has_kernels(device: torch.device) -> bool:
    """Whether the verbs run as kernels: on a GPU, or interpreted for tests."""
    return device.type == "cuda" or bool(os.environ.get("REPLAYSSM_INTERPRET"))


def window_of(model: nn.Module, max_draft: int) -> int:
    """The window that decodes fastest (``plan.choose_window``): of the first recurrent layers, if there are any."""
    kinds = [family.recurrence for _, family in find_mixers(model, required=False)]
    return choose_window(kinds[0] if kinds else MAMBA2, max_draft, next(model.parameters()).device.type)


def settings_of(window: int, max_draft: int, precision: Precision | None) -> Settings:
    """The settings of the recurrent layers, checked in the caller's words."""
    settings = Settings(window, max_draft, Precision() if precision is None else precision)
    Layout(MAMBA2, 1, 1, 1, 1, window, max_draft, torch.float32, settings.precision)
    return settings
