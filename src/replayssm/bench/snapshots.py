"""The conventional way in the engine's own clothes: a cache that rewrites the state for every token.

Drafts keep a state each, as serving engines do; committing looks at the last accepted one. The model, its attention,
its convolutions and the CUDA graphs are the same as with replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from replayssm.bench.cases import take
from replayssm.bench.conventional import DEFAULT_TILE, TILES, torch_step
from replayssm.bench.timing import Setup, median
from replayssm.cache import ReplayCache
from replayssm.checks import ReplayError
from replayssm.host import Host
from replayssm.inputs import Inputs
from replayssm.layout import Layout, Precision
from replayssm.rows import Rows


class SnapshotCache(ReplayCache):
    """States of ``slots`` sequences, one for each token of a step.

    Batches are all slots in order; more is not needed to measure.

    Attributes:
        states: float32 [layers, slots, max_draft, H, P, K].
        current: int32 [slots], which of them is the sequence's.
    """

    @classmethod
    def allocate(
        cls, layout: Layout, layers: int, slots: int, device: str | torch.device = "cpu", seed: int = 0
    ) -> SnapshotCache:
        """As ``ReplayCache.allocate``; the window has room for one step only, and the state is float32."""
        layout = replace(layout, window=layout.max_draft, precision=Precision())
        states = torch.zeros((layers, slots, layout.max_draft, *layout.state_shape), device=device)
        views = []
        for layer in range(layers):
            kept = {
                name: torch.zeros((slots, *spec.shape), dtype=spec.dtype, device=device)
                for name, spec in layout.tensors.items()
                if name != "checkpoint"
            }
            views.append({"checkpoint": states[layer, :, 0], **kept})
        cache = cls(layout, views, slots, seed)
        cache.states = states
        cache.current = torch.zeros(slots, dtype=torch.int32, device=cache.device)
        cache.verbs = Snapshots(cache, cache.verbs)  # type: ignore[assignment]
        return cache

    states: Tensor
    current: Tensor

    def load(self, layer: int, slots: Any, state: Tensor, phase: Any = None) -> None:
        """See ``ReplayCache.load``."""
        super().load(layer, slots, state, phase)
        self.current[list(slots)] = 0

    def reset(self, slots: Any) -> None:
        """See ``ReplayCache.reset``."""
        super().reset(slots)
        self.current[list(slots)] = 0

    @property
    def slot_bytes(self) -> int:
        """What a sequence needs in all layers: its states and the convolution's inputs."""
        conv = self.layout.tensors["conv"].nbytes if self.layout.conv is not None else 0
        return self.layers * (self.states[0, 0].nbytes + conv)


class Snapshots:
    """The verbs of a `SnapshotCache`.

    Attributes:
        knobs: rows and warps of a tile of the kernel.
    """

    def __init__(self, cache: SnapshotCache, ordinary: Any) -> None:
        """``ordinary``: the verbs of a replay cache, which convolve."""
        self.cache, self.ordinary = cache, ordinary
        self.knobs = DEFAULT_TILE
        self.tiles: dict[str, Any] = {}

    def step(self, layer: int, inputs: Inputs, rows: Rows) -> Tensor:
        """See ``replayssm.step``."""
        cache, layout = self.cache, self.cache.layout
        if isinstance(self.ordinary, Host):
            return self._on_host(layer, inputs, rows)
        from replayssm.bench.snapshots_triton import snapshot_step, tile_of

        rows = self.ordinary.on_device(rows)
        out = torch.empty((inputs.tokens, *layout.state_shape[:2]), dtype=layout.dtype, device=cache.device)
        return snapshot_step(cache.states[layer], cache.current, rows, inputs, layout, out, tile_of(layout, self.knobs))

    def conv_step(self, layer: int, x: Tensor, *rest: Any) -> Tensor:
        """See ``replayssm.conv_step``."""
        return self.ordinary.conv_step(layer, x, *rest)

    def commit(self, rows: Rows, accepted: Tensor | Sequence[int], path: object) -> None:
        """See ``ReplayCache.commit``: the last accepted token's state is the sequence's."""
        cache = self.cache
        if path is not None or len(rows.slots) != cache.slots:
            raise ReplayError("commit: snapshots are measured with chains, all slots at a time and in order")
        taken = torch.as_tensor(accepted, dtype=torch.int32, device=cache.device)
        torch.sub(taken, 1, out=cache.current)
        if cache.layout.conv is not None:
            cache._position.add_(taken).remainder_(cache.layout.tensors["conv"].shape[1])
        cache._drafts.zero_()

    def fold(self, slots: object) -> None:
        """Nothing: the states are up to date."""

    def materialise(self, layer: int, slots: Tensor) -> Tensor:
        """See ``ReplayCache.materialise``."""
        return self.cache.states[layer][slots, self.cache.current[slots].long()]

    def check(self) -> None:
        """See ``ReplayCache.check``."""
        self.ordinary.check()

    def tune(self, inputs: Inputs, setup: Setup) -> tuple[int, int]:
        """Take the fastest of the conventional kernel's tiles for a batch of all slots; on the CPU there is none."""
        cache = self.cache
        if isinstance(self.ordinary, Host):
            return self.knobs
        draft = cache.layout.max_draft
        slots = torch.arange(cache.slots, dtype=torch.int32, device=cache.device)
        rows = Rows.draft(slots, torch.full_like(slots, draft))
        layers = range(min(cache.layers, setup.layers(cache.states[0, :, 0].nbytes)))

        def time(knobs: tuple[int, int]) -> float:
            self.knobs = knobs
            return median(setup, lambda: [self.step(layer, inputs, rows) for layer in layers])

        # With drafts a program holds the inputs of all tokens: large tiles of few warps would spill.
        tiles = TILES if draft == 1 else ((8, 1), (16, 1), (16, 2), (32, 4))
        self.knobs = min(tiles, key=time)
        return self.knobs

    def _on_host(self, layer: int, inputs: Inputs, rows: Rows) -> Tensor:
        cache, layout = self.cache, self.cache.layout
        step = torch_step(replace(layout, max_draft=1))
        state = self.materialise(layer, torch.arange(cache.slots))
        first = rows.offsets[:-1].long()
        out = torch.zeros((inputs.tokens, *layout.state_shape[:2]), dtype=layout.dtype)
        for t in range(layout.max_draft):
            out[first + t] = step(state, take(inputs, first + t)).to(layout.dtype)
            cache.states[layer][:, t] = state
        return out
