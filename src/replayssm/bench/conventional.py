"""The conventional side of every figure: a step that reads and rewrites the whole state for each token.

On a GPU a Triton kernel with the best of several tiles, on the CPU a compiled torch function. Both have the library's
own gates, so that they differ from replay in one thing only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm.bench.cases import Case, power_of_2, random_inputs
from replayssm.bench.timing import Setup, median
from replayssm.inputs import Inputs
from replayssm.layout import Layout, Precision

if TYPE_CHECKING:
    from replayssm.backends.triton.launch import Tile

# (rows of a tile, warps): a tile has all columns of the state.
TILES = ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8))
DEFAULT_TILE = (16, 2)


def plain(layout: Layout) -> Layout:
    """The layout of the conventional step: one token, a float32 state."""
    return replace(layout, max_draft=1, precision=Precision())


def torch_step(layout: Layout) -> Callable[[Tensor, Inputs], Tensor]:
    """A function of one token a row: rewrites ``state`` [R, H, P, K] (float32 or float64), returns [R, H, P]."""

    def run(state: Tensor, inputs: Inputs) -> Tensor:
        low = inputs.lower(layout)
        repeat, wide = layout.heads // layout.groups, state.dtype
        q = low.q.to(wide).repeat_interleave(repeat, 1)[:, :, None]
        key = low.k.to(wide)
        if low.key_scale is not None:
            key = key * low.key_scale.to(wide)[..., None]
        key = key.repeat_interleave(repeat, 1)[:, :, None]
        assert low.g is not None
        decay = low.g.to(wide).exp()
        state.mul_(decay[:, :, None] if decay.ndim == 3 else decay[..., None, None])
        value = low.v.to(wide)
        if layout.recurrence.update == "delta":
            value = value - (state * key).sum(-1)
        state.add_((low.beta.to(wide)[..., None] * value)[..., None] * key)
        return (state * q).sum(-1)

    return run


def tile_of(layout: Layout, knobs: tuple[int, int]) -> Tile:
    """A tile of the Triton kernel."""
    from replayssm.backends.triton.launch import Tile

    return Tile(knobs[0], power_of_2(layout.state_dim), knobs[1])


def make_step(
    layout: Layout,
    rows: int,
    device: str,
    wide: torch.dtype = torch.float32,
    knobs: tuple[int, int] = DEFAULT_TILE,
) -> Callable[[Tensor, Inputs], Tensor]:
    """The step of one device: takes states [rows, H, P, K] in ``wide``, rewrites them, returns [rows, H, P].

    Outputs are in the activation dtype, those of float64 states in float64.
    """
    layout = plain(layout)
    kind = torch.float64 if wide == torch.float64 else layout.dtype
    if device == "cpu":
        run = torch_step(layout)
        return lambda state, inputs: run(state, inputs).to(kind)
    from replayssm.bench.conventional_triton import conventional_step

    slots = torch.arange(rows, dtype=torch.int32, device=device)
    out = torch.empty((rows, *layout.state_shape[:2]), dtype=kind, device=device)
    tile = tile_of(layout, knobs)
    return lambda state, inputs: conventional_step(state, slots, inputs, layout, out, tile, wide)


class Conventional:
    """The states of all layers, and the model step that rewrites them."""

    def __init__(self, case: Case, setup: Setup, knobs: tuple[int, int] = DEFAULT_TILE) -> None:
        layout = plain(case.layout)
        self.layers = setup.layers(layout.tensors["checkpoint"].nbytes * case.batch)
        self.states = torch.randn((self.layers, case.batch, *layout.state_shape), device=setup.device)
        self.inputs = random_inputs(layout, case.batch, setup.device)
        step = make_step(layout, case.batch, setup.device, knobs=knobs)
        self.step = torch.compile(step) if setup.device == "cpu" else step

    def model_step(self) -> None:
        """One token a row in every layer."""
        for state in self.states:
            self.step(state, self.inputs)


def best_tile(case: Case, setup: Setup) -> tuple[int, int]:
    """The fastest of ``TILES`` for a case's shape and batch; on the CPU there is nothing to choose."""
    if setup.device == "cpu":
        return DEFAULT_TILE
    short = replace(setup, budget_ms=setup.budget_ms / 5)
    return min(TILES, key=lambda knobs: median(short, Conventional(case, setup, knobs).model_step))
