"""The replay side of every figure: a cache in its steady state, and the model step on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from replayssm.bench.cases import Case, random_inputs
from replayssm.bench.timing import Setup
from replayssm.cache import ReplayCache
from replayssm.ops import step
from replayssm.plan.traffic import Cycle, Traffic, entry_bytes, fold, inputs_bytes, replay_read, state_bytes
from replayssm.rows import Rows

if TYPE_CHECKING:
    from replayssm.backends.triton.launch import Tile


class Replay:
    """Every layer's cache with staggered folds, and its model step.

    Attributes:
        cache: of ``layers`` layers, whose states together are larger than the last cache of the device.
        period: model steps from fold to fold of a row.
    """

    def __init__(self, case: Case, setup: Setup, tiles: Mapping[str, Tile] | None = None) -> None:
        layout = case.layout
        self.case, self.period = case, case.period
        self.layers = setup.layers(state_bytes(layout) * case.batch)
        self.cache = ReplayCache.allocate(layout, self.layers, case.batch, setup.device)
        if tiles:
            self.cache.verbs.tiles.update(tiles)  # type: ignore[union-attr]
        slots = torch.arange(case.batch, dtype=torch.int32, device=setup.device)
        self.rows = Rows.draft(slots, torch.full_like(slots, case.draft))
        self.accepted = torch.full_like(slots, case.accepted)
        self._fill()
        self.stagger()
        self.inputs = [
            random_inputs(layout, case.batch * case.draft, setup.device, i) for i in range(min(self.layers, 8))
        ]

    def _fill(self) -> None:
        """States of normal numbers: what a GPU draws, and so its clock, depends on the bits."""
        cache, layout = self.cache, self.case.layout
        state = torch.randn((cache.slots, *layout.state_shape), device=cache.device)
        for layer in range(self.layers):
            cache.load(layer, range(cache.slots), state)

    def stagger(self) -> None:
        """Spread the first folds evenly over the cycle, in an order that is no order of the slots."""
        batch = self.case.batch
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(0))
        phase = (order * self.period // batch * self.case.accepted).to(self.cache._limit)
        self.cache._limit.sub_(phase).clamp_(min=0)

    def drop(self) -> None:
        """Commit nothing, so that another step may follow."""
        self.cache.commit(self.rows, torch.zeros_like(self.accepted))

    def align(self) -> None:
        """Fold all rows now, so that they fold together from here on."""
        self.cache.fold(self.rows.slots)
        self.cache._limit.fill_(self.case.layout.room)

    def steps(self) -> None:
        """Every layer's step."""
        for layer in range(self.layers):
            step(self.cache[layer], self.inputs[layer % len(self.inputs)], self.rows)

    def model_step(self) -> None:
        """Every layer's step, and the commit with its fold."""
        self.steps()
        self.cache.commit(self.rows, self.accepted)

    def cycle(self) -> None:
        """A full cycle: as many folds as rows."""
        for _ in range(self.period):
            self.model_step()


def moved(case: Case) -> Traffic:
    """Bytes that one layer's model step has to move for the whole batch, a fold's share included (docs: planning)."""
    layout, period = case.layout, case.period
    cycle = Cycle(case.accepted, period, case.accepted * (period - 1) / 2, case.accepted * period)
    each = replay_read(layout, cycle.length) + inputs_bytes(layout) * case.draft
    each += Traffic(write=sum(entry_bytes(layout).values()) * case.draft)
    return (each + fold(layout, cycle.folded) * (1 / period)) * case.batch
