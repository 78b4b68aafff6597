"""What a cache holds: the recurrence, its sizes, and the precision it is kept in. Frozen and hashable."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, get_args

import torch

from replayssm import checks
from replayssm.checks import ReplayError

Decay = Literal["head", "channel", "none"]
Update = Literal["add", "delta"]
Rounding = Literal["nearest", "stochastic"]

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NAMED = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHECKPOINTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_READ_COPIES = (None, torch.bfloat16, torch.float16)
_BUFFERS = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Recurrence:
    """One corner of ``S ← S·Diag(exp g) + u kᵀ`` (docs: mathematics).

    Attributes:
        name: what errors and tables call it.
        decay: ``g`` is one number per head, a vector over ``state_dim`` ("channel"), or absent ("none").
        update: ``u = β v`` ("add") or ``u = β (v − S k)`` ("delta").
    """

    name: str
    decay: Decay
    update: Update

    def __post_init__(self) -> None:
        checks.one_of("decay", self.decay, get_args(Decay))
        checks.one_of("update", self.update, get_args(Update))

    @property
    def title(self) -> str:
        """The name as messages print it."""
        return {"mamba2": "Mamba-2", "gdn": "GDN", "kda": "KDA"}.get(self.name, self.name)


MAMBA2 = Recurrence("mamba2", "head", "add")
GDN = Recurrence("gdn", "head", "delta")
KDA = Recurrence("kda", "channel", "delta")


@dataclass(frozen=True)
class Precision:
    """How the state is stored.

    Attributes:
        checkpoint: dtype of the checkpoint: float32, bfloat16, float16 (or "fp32", "bf16", "fp16"); float64 with a
            float64 layout.
        read_copy: a low-precision copy that steps read instead of the checkpoint: bfloat16, float16 or None. It never
            feeds the recurrence.
        buffer: dtype of the written values ``u`` that the delta rule keeps inside a window; None: float32.
        rounding: of a checkpoint narrower than float32. "stochastic" is reproducible from the cache's seed.
    """

    checkpoint: torch.dtype | str = torch.float32
    read_copy: torch.dtype | str | None = None
    buffer: torch.dtype | str | None = None
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        for name, allowed in (("checkpoint", _CHECKPOINTS), ("read_copy", _READ_COPIES), ("buffer", _BUFFERS)):
            value = getattr(self, name)
            value = _NAMED.get(value, value) if isinstance(value, str) else value
            checks.one_of(name, value, allowed)
            object.__setattr__(self, name, value)
        checks.one_of("rounding", self.rounding, get_args(Rounding))
        if self.rounding == "stochastic" and self.checkpoint not in (torch.bfloat16, torch.float16):
            raise ReplayError(f"rounding: 'stochastic' needs a bfloat16 or float16 checkpoint, got {self.checkpoint}")


@dataclass(frozen=True)
class Conv:
    """The short causal convolution in front of a recurrence.

    Attributes:
        channels: C, convolved channels (depthwise).
        width: taps, 2…8; a slot keeps the last ``width - 1`` inputs.
    """

    channels: int
    width: int = 4

    def __post_init__(self) -> None:
        checks.integer("channels", self.channels, 1)
        checks.integer("width", self.width, 2, 8)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a slot: its shape without the slot dimension, its dtype, and whether its second dimension is W."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    entries: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes per slot."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """What one slot of one layer holds.

    Attributes:
        recurrence: MAMBA2, GDN, KDA or another ``Recurrence``.
        heads: H, value heads.
        groups: G, key heads; head h uses group ``h // (H/G)``.
        head_dim: P, width of a value head.
        state_dim: K, width of a key.
        window: W, entries that the buffer holds, drafts included.
        max_draft: T, most tokens that a row brings in one step; 1 is plain decode.
        dtype: of the activations: x, B, C, q, k, v, and of the output.
        precision: how checkpoint, read copy and derived values are stored.
        conv: the short convolution whose tail is kept and rolled back with the state, if any.
    """

    recurrence: Recurrence
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    window: int = 16
    max_draft: int = 1
    dtype: torch.dtype = torch.bfloat16
    precision: Precision = field(default_factory=Precision)
    conv: Conv | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.recurrence, Recurrence):
            raise ReplayError(f"recurrence: expected MAMBA2, GDN, KDA or a Recurrence, got {self.recurrence!r}")
        for name in ("heads", "groups", "head_dim", "state_dim", "window", "max_draft"):
            checks.integer(name, getattr(self, name), 1)
        checks.one_of("dtype", self.dtype, ACTIVATIONS)
        if self.heads % self.groups:
            raise ReplayError(f"heads: {self.heads} heads do not divide into groups={self.groups}")
        if self.max_draft > self.window:
            raise ReplayError(f"max_draft: {self.max_draft} drafts do not fit into window={self.window}")
        if not isinstance(self.precision, Precision):
            raise ReplayError(f"precision: expected a Precision, got {self.precision!r}")
        if (self.precision.checkpoint == torch.float64) != (self.dtype == torch.float64):
            raise ReplayError("precision: a float64 checkpoint and dtype=torch.float64 go together")

    @property
    def wide(self) -> torch.dtype:
        """The dtype that arithmetic and state-like results are in: float32 (float64 for a float64 layout)."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def room(self) -> int:
        """Most committed entries that leave room for a full draft: ``window - max_draft`` (invariant I4)."""
        return self.window - self.max_draft

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Name -> shape and dtype of each tensor that a slot of one layer has.

        Buffer tensors are head-major, ``[heads or groups, W, …]``, so that one head's entries are contiguous.
        """
        h, g, p, k, w, wide = self.heads, self.groups, self.head_dim, self.state_dim, self.window, self.wide
        checkpoint, buffer, copy = self.precision.checkpoint, self.precision.buffer, self.precision.read_copy
        assert isinstance(checkpoint, torch.dtype)
        found = {"checkpoint": TensorSpec((h, p, k), checkpoint)}
        if isinstance(copy, torch.dtype):
            found["read_copy"] = TensorSpec((h, p, k), copy)
        found["key"] = TensorSpec((g, w, k), self.dtype, entries=True)
        found["value"] = TensorSpec((h, w, p), self.dtype, entries=True)
        found["weight"] = TensorSpec((h, w), wide, entries=True)
        if self.recurrence.decay != "none":
            channels = (k,) if self.recurrence.decay == "channel" else ()
            found["decay"] = TensorSpec((h, w, *channels), wide, entries=True)
        if self.recurrence.update == "delta":
            assert buffer is None or isinstance(buffer, torch.dtype)
            found["key_scale"] = TensorSpec((g, w), wide, entries=True)
            found["written"] = TensorSpec((h, w, p), buffer or wide, entries=True)
        if self.conv is not None:
            found["conv"] = TensorSpec((self.conv.channels, self.conv.width - 1 + self.max_draft), self.dtype)
        return found

    @property
    def slot_bytes(self) -> int:
        """Bytes that one slot of one layer takes: checkpoint, read copy, buffer and convolution tail."""
        return sum(spec.nbytes for spec in self.tensors.values())
