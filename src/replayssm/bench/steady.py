"""A model in the middle of its work: every slot holds a sequence, and each step decodes or verifies all of them.

Nothing is prefilled: keys, values and states are random numbers, and lengths are set. What a step costs does not
depend on them, but on where the folds fall, so those are spread over the cycle as an engine's phases spread them.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from replayssm.bench.cases import random_inputs
from replayssm.bench.snapshots import SnapshotCache
from replayssm.bench.timing import Setup
from replayssm.cache import ReplayCache
from replayssm.checks import ReplayError
from replayssm.engine.packed import Row
from replayssm.engine.runner import Runner, settings_of
from replayssm.layout import Precision

Way = Literal["conventional", "replay"]
# Tokens of a slot beyond the context.
ROOM = 32


@dataclass(frozen=True)
class Work:
    """What every step does.

    Attributes:
        batch: sequences.
        context: tokens before them.
        draft: tokens a sequence brings a step; 1 is plain decode.
        schedule: tokens that are accepted, step by step, over and over; sequence r begins with number r.
        window: entries of the replay buffer, drafts included.
        precision: a preset's name, for replay; conventional states are float32.
    """

    batch: int
    context: int
    draft: int = 1
    schedule: tuple[int, ...] = (1,)
    window: int = 32
    precision: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("batch", "context", "draft"):
            if getattr(self, name) < 1:
                raise ReplayError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not self.schedule or not all(1 <= count <= self.draft for count in self.schedule):
            raise ReplayError(f"accepted: expected numbers 1…{self.draft} (the tokens of a step), got {self.schedule}")

    @property
    def accepted(self) -> float:
        """Tokens a sequence gets a step, on average."""
        return statistics.mean(self.schedule)

    @property
    def cycle(self) -> int:
        """Steps in which every sequence is folded about once, and the schedule goes round."""
        steps = int((self.window - self.draft) / self.accepted) + 1
        return -(-steps // len(self.schedule)) * len(self.schedule)


class Steady:
    """A runner whose slots are full.

    Attributes:
        runner: the engine's.
        tiles: of the conventional kernel.
    """

    def __init__(self, model: nn.Module, way: Way, work: Work) -> None:
        """Allocate and fill. Raises ReplayError or torch.OutOfMemoryError where that does not fit."""
        self.work, self.model = work, model
        allocate = SnapshotCache.allocate if way == "conventional" else ReplayCache.allocate
        # What the runner expects of the memory: conventional layers have no window.
        window = work.draft if way == "conventional" else work.window
        settings = settings_of(window, work.draft, Precision.preset(work.precision))
        self.runner = Runner(model, work.batch, None, work.context + ROOM, settings, allocate=allocate)
        self.tiles: list[Any] = []
        try:
            self._fill()
            self._plan()
        except BaseException:
            self.close()
            raise

    @property
    def recurrent_bytes(self) -> int:
        """Of a sequence's recurrent layers."""
        return sum(
            pool.slot_bytes if isinstance(pool, SnapshotCache) else pool.layers * pool.layout.slot_bytes
            for pool in self.runner.pools
        )

    @property
    def key_bytes(self) -> int:
        """Of the keys and values of a sequence's context."""
        places = self.work.context + ROOM
        return self.runner.keys.bytes // self.runner.slots * self.work.context // places

    def close(self) -> None:
        """Give the memory back."""
        self.runner.close()
        # Captured graphs hold on to their memory, and refer to themselves.
        vars(self).pop("runner")
        vars(self).pop("_block", None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def tune(self, setup: Setup) -> None:
        """Choose tiles of the conventional kernel."""
        for pool in self.runner.pools:
            if isinstance(pool, SnapshotCache):
                inputs = random_inputs(pool.layout, self.work.batch * self.work.draft, setup.device)
                self.tiles.append(list(pool.verbs.tune(inputs, setup)))  # type: ignore[union-attr]

    def step(self, number: int) -> None:
        """Forward and commit; ``number`` counts the steps."""
        runner, accepted = self.runner, number % len(self.work.schedule)
        if runner.stepper is None:
            runner.lengths = [self.work.context] * self.work.batch
            runner.score(self._rows)
            runner.commit(self._accepted[accepted])
            return
        _, best = runner.stepper.run(self._block)
        if self.work.draft == 1:
            # The next token is the one that was chosen, without the host; −1 would be no token.
            self._block.tokens.on["ids"].copy_(best.clamp(min=0))
        if len(self.work.schedule) > 1:
            self._block.taken.on["accepted"].copy_(self._on_device[accepted])
        runner.stepper.keep(self._block)

    def times(self, cycles: int, warm: int = 3) -> list[float]:
        """Milliseconds of each step of whole cycles, without any waiting for the host."""
        for number in range(warm):
            self.step(number)
        total = cycles * self.work.cycle
        if self.runner.device.type == "cpu":
            marks = [time.perf_counter()]
            for number in range(total):
                self.step(warm + number)
                marks.append(time.perf_counter())
            return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(total + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for number, event in enumerate(events[1:]):
            self.step(warm + number)
            event.record()
        torch.cuda.synchronize()
        for pool in self.runner.pools:
            pool.check()
        _, best = self.runner.stepper.run(self._block)  # type: ignore[union-attr]
        if bool((best < 0).any()):
            raise ReplayError("bench: the model's logits are not finite, so its times mean nothing")
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def _fill(self) -> None:
        runner, work = self.runner, self.work
        for pair in runner.keys.layers.values():
            for tensor in pair:
                tensor.normal_()
        source = torch.Generator().manual_seed(0)
        order = torch.randperm(work.batch, generator=source)
        for pool in runner.pools:
            layout = pool.layout
            phase = (order * (layout.room + 1) // work.batch).tolist()
            state = torch.randn((work.batch, *layout.state_shape), device=runner.device)
            for layer in range(pool.layers):
                pool.load(layer, range(work.batch), state, phase)
                if layout.conv is not None:
                    shape = (work.batch, layout.conv.channels, layout.conv.width - 1)
                    tail = torch.randn(shape, device=runner.device).to(layout.dtype)
                    pool.load_conv(layer, range(work.batch), tail)
        runner.lengths = [work.context] * work.batch

    def _plan(self) -> None:
        work, runner = self.work, self.runner
        source = torch.Generator().manual_seed(1)
        vocabulary = runner.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        ids = torch.randint(vocabulary, (work.batch, work.draft), generator=source).tolist()
        self._rows = [Row(slot, line, wanted=work.draft) for slot, line in enumerate(ids)]
        count = len(work.schedule)
        self._accepted: Sequence[list[int]] = [
            [work.schedule[(step + row) % count] for row in range(work.batch)] for step in range(count)
        ]
        if runner.stepper is not None:
            self._block = runner.stepper.block(work.batch, work.draft)
            self._block.fill(self._rows, runner.lengths)
            self._block.accept(self._accepted[0], [list(range(n)) for n in self._accepted[0]])
            self._on_device = torch.tensor(self._accepted, dtype=torch.int32, device=runner.device)


def by_cycle(times: Sequence[float], cycle: int) -> list[float]:
    """Mean milliseconds of each whole cycle's steps."""
    return [statistics.mean(times[at : at + cycle]) for at in range(0, len(times) - cycle + 1, cycle)]
