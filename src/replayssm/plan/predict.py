"""From bytes to answers: step times and speed-ups, the best window, how many sequences fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import fsum

from replayssm.checks import ReplayError
from replayssm.layout import Layout, Precision

from .gpus import Gpu
from .shape import ModelShape
from .traffic import Cycle, Traffic, conventional_step, replay_step, state_bytes

KV_BYTES = 2
"""Bytes per element of keys, values and MLA latents (bfloat16)."""


@dataclass(frozen=True)
class Setting:
    """How the model is to be decoded.

    Attributes:
        window: entries of the buffer.
        max_draft: tokens per step; 1 is plain decode, more are one certain token and drafts.
        acceptance: chance that a draft is accepted, given that the one before was.
        precision: of checkpoint and read copy. The conventional state has the checkpoint's dtype.
        context: tokens that attention looks back on.
        weight_bits: bits per weight.
    """

    window: int = 16
    max_draft: int = 1
    acceptance: float = 0.7
    precision: Precision = field(default_factory=Precision)
    context: int = 4096
    weight_bits: float = 16.0

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise ReplayError(f"acceptance: expected 0…1, got {self.acceptance}")
        if self.context < 0 or self.weight_bits <= 0:
            raise ReplayError(f"expected context >= 0 and weight_bits > 0, got {self.context} and {self.weight_bits}")

    def layout(self, layout: Layout) -> Layout:
        """A block's sizes with this window, draft and precision."""
        return replace(layout, window=self.window, max_draft=self.max_draft, precision=self.precision)

    @property
    def cycle(self) -> Cycle:
        """The average step between two folds."""
        return Cycle.of(self.window, self.max_draft, self.acceptance)


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step of a batch.

    Attributes:
        batch: sequences.
        tokens: committed per sequence and step.
        recurrent_conventional: the recurrent layers alone, state rewritten at every token.
        recurrent_replay: the recurrent layers alone, with this library.
        rest: everything else: weights, attention, launches.
        plain: a whole conventional step of one token, to compare speculation with.
    """

    batch: int
    tokens: float
    recurrent_conventional: float
    recurrent_replay: float
    rest: float
    plain: float

    @property
    def step_conventional(self) -> float:
        """Seconds of the whole step, conventional."""
        return self.recurrent_conventional + self.rest

    @property
    def step_replay(self) -> float:
        """Seconds of the whole step, with this library."""
        return self.recurrent_replay + self.rest

    @property
    def recurrent_speedup(self) -> float:
        """Conventional over replay, recurrent layers alone, the same drafts on both sides."""
        return self.recurrent_conventional / self.recurrent_replay

    @property
    def step_speedup(self) -> float:
        """Conventional over replay, whole step, the same drafts on both sides."""
        return self.step_conventional / self.step_replay

    @property
    def speedup_over_plain(self) -> float:
        """Tokens per second over those of conventional decode without drafts. The drafter's own time is not in it."""
        return self.plain * self.tokens / self.step_replay


@dataclass(frozen=True)
class Capacity:
    """Bytes per sequence, and how many sequences a memory holds.

    Attributes:
        replay: checkpoint, read copy, buffer, convolution tails, attention cache.
        conventional: state, convolution tails, attention cache.
        snapshots: the same with a copy of state and tails per token of a step, as drafts need it conventionally.
        memory: bytes for sequences.
    """

    replay: int
    conventional: int
    snapshots: int
    memory: float

    def sequences(self, per_sequence: int) -> int:
        """How many sequences of this many bytes fit."""
        return int(self.memory // per_sequence)


def recurrent_traffic(shape: ModelShape, setting: Setting) -> tuple[Traffic, Traffic]:
    """Bytes of all recurrent layers per sequence and step: conventional and replay."""
    layouts = [setting.layout(layout) for layout in shape.layouts]
    conventional = sum((conventional_step(layout) for layout in layouts), Traffic())
    return conventional, sum((replay_step(layout, setting.acceptance) for layout in layouts), Traffic())


def predict(shape: ModelShape, gpu: Gpu, batch: int, setting: Setting) -> Prediction:
    """Times of one step of `batch` sequences on one GPU (or on a share of the model that fits one)."""
    if batch < 1:
        raise ReplayError(f"batch: expected at least 1, got {batch}")
    conventional, replayed = recurrent_traffic(shape, setting)
    layers, tokens = len(shape.recurrent), batch * setting.max_draft
    plain, _ = recurrent_traffic(shape, replace(setting, max_draft=1))
    one_commit = gpu.replay if layers else 0.0  # one launch folds all the layers
    return Prediction(
        batch=batch,
        tokens=setting.cycle.tokens,
        recurrent_conventional=layers * gpu.step + gpu.seconds(conventional * batch),
        recurrent_replay=layers * gpu.replay + one_commit + gpu.seconds(replayed * batch),
        rest=_rest(shape, gpu, batch, tokens, setting),
        plain=layers * gpu.step + gpu.seconds(plain * batch) + _rest(shape, gpu, batch, batch, setting),
    )


def _rest(shape: ModelShape, gpu: Gpu, batch: int, tokens: int, setting: Setting) -> float:
    """Seconds of a step outside the recurrences: weights are read or multiplied, whichever takes longer."""
    weights = gpu.seconds(Traffic(shape.params_read(tokens) * setting.weight_bits / 8))
    multiplied = 2 * shape.params_active * tokens / gpu.compute
    read = fsum(block.kv_read(setting.context) for block in shape.blocks) * batch
    written = fsum(block.kv_elements for block in shape.blocks) * tokens
    attention = gpu.seconds(Traffic(read * KV_BYTES, written * KV_BYTES))
    return len(shape.blocks) * gpu.block + max(weights, multiplied) + attention


def best_window(shape: ModelShape, setting: Setting, low: int = 4, high: int = 64) -> tuple[int, float]:
    """The window with the fewest state bytes per committed token, and those bytes (all recurrent layers)."""
    windows = range(max(low, setting.max_draft), high + 1)
    if not windows:
        raise ReplayError(f"max_draft: {setting.max_draft} drafts do not fit into a window of at most {high}")
    asked = [replace(setting, window=window) for window in windows]
    costs = [recurrent_traffic(shape, one)[1].total / one.cycle.tokens for one in asked]
    best = min(range(len(costs)), key=costs.__getitem__)
    return windows[best], costs[best]


def capacity(shape: ModelShape, setting: Setting, memory: float) -> Capacity:
    """Bytes per sequence the three ways, for `memory` bytes beside the weights."""
    layouts = [setting.layout(layout) for layout in shape.layouts]
    cache = sum(block.kv_kept(setting.context) for block in shape.blocks) * KV_BYTES
    one = sum(state_bytes(layout) + _tail_bytes(layout) for layout in layouts)
    return Capacity(
        replay=cache + sum(layout.slot_bytes for layout in layouts),
        conventional=cache + one,
        snapshots=cache + one * setting.max_draft,
        memory=memory,
    )


def _tail_bytes(layout: Layout) -> int:
    """Bytes of one convolution tail: the last `width - 1` inputs."""
    conv = layout.conv
    return conv.channels * (conv.width - 1) * layout.dtype.itemsize if conv else 0
