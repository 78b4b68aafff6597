"""What a cache holds: the recurrence, its sizes, and the precision it is kept in. Frozen and hashable."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, get_args

import torch

from replayssm import checks
from replayssm.checks import ReplayError
from replayssm.formats import BUFFERS, FORMATS, Format

Decay = Literal["head", "channel", "none"]
Update = Literal["add", "delta"]
Rounding = Literal["nearest", "stochastic"]

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int8: "int8",
}
# Every way to write a format's name: its own, and those of torch ("float32").
_NAMES = {**{name: name for name in (*FORMATS, *BUFFERS)}, **{checks.dtype_name(d): n for d, n in _DTYPES.items()}}
_PLAIN = {name: dtype for dtype, name in _DTYPES.items() if name in ("fp64", "fp32", "bf16", "fp16")}
_COPIES = {name: one for name, one in FORMATS.items() if name not in ("fp64", "fp32")}


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
    """How the state is stored (docs: precision).

    A format is given by name or torch dtype; the attributes hold the dtype of formats that are one ("fp32" becomes
    ``torch.float32``) and the name of formats with scales ("fp8", "fp8_e5m2", "int8", "int4", "nvfp4").

    Attributes:
        checkpoint: "fp32", "bf16", "fp16", or a format with scales; "fp64" with a float64 layout.
        read_copy: a low-precision copy that steps read instead of the checkpoint: "bf16", "fp16", a format with scales,
            or None. It never feeds the recurrence.
        buffer: format of the written values ``u`` that the delta rule keeps inside a window: "fp32", "bf16", "fp16",
            "bf16x2" (the sum of two), "fp16_scaled" (a power of two per entry); None: float32.
        rounding: of a checkpoint narrower than float32. "stochastic" is reproducible from the cache's seed.
    """

    checkpoint: torch.dtype | str = torch.float32
    read_copy: torch.dtype | str | None = None
    buffer: torch.dtype | str | None = None
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.read_copy is not None:
            object.__setattr__(self, "read_copy", _format("read_copy", self.read_copy, _COPIES, optional=True))
        if self.buffer is not None:
            object.__setattr__(self, "buffer", _format("buffer", self.buffer, BUFFERS, optional=True))
        object.__setattr__(self, "checkpoint", _format("checkpoint", self.checkpoint, FORMATS))
        checks.one_of("rounding", self.rounding, get_args(Rounding))
        if self.rounding == "stochastic" and self.checkpoint in (torch.float32, torch.float64):
            raise ReplayError(
                f"rounding: 'stochastic' needs a checkpoint narrower than float32, got {_name(self.checkpoint)}"
            )

    @classmethod
    def preset(cls, name: str) -> Precision:
        """The policy of a name: ``CHECKPOINT[sr][+READ_COPY]``, as ``float32``, ``float32+nvfp4``, ``fp16sr+fp8``.

        "sr" is stochastic rounding. Formats are those of the attributes; "float32" may be written for "fp32". Where
        steps read eight bits an element or fewer, at 1 % of error or more, written values are bfloat16, at 0.2 %.

        Raises:
            ReplayError: no such format, with the list of them.
        """
        checkpoint, plus, copy = name.partition("+")
        stochastic = checkpoint.removesuffix("sr") if checkpoint.endswith("sr") else None
        kept, read = _NAMES.get(stochastic or checkpoint), _NAMES.get(copy)
        if kept not in FORMATS or (plus and read not in _COPIES):
            raise ReplayError(
                f"precision: got {name!r}, expected a checkpoint ({', '.join(FORMATS)}; with sr for stochastic "
                f"rounding) and, if steps read a copy, + its format ({', '.join(_COPIES)}); such as float32+fp8"
            )
        few = (read if plus else kept) not in _PLAIN
        rounding: Rounding = "nearest" if stochastic is None else "stochastic"
        return cls(kept, read if plus else None, "bf16" if few else None, rounding)

    @property
    def name(self) -> str:
        """The policy as ``preset`` reads it (it does not say the buffer's format)."""
        rounding = "sr" if self.rounding == "stochastic" else ""
        return _name(self.checkpoint) + rounding + (f"+{_name(self.read_copy)}" if self.read_copy else "")

    @property
    def checkpoint_format(self) -> Format:
        """How the checkpoint is stored."""
        return FORMATS[_name(self.checkpoint)]

    @property
    def read_format(self) -> Format | None:
        """How the read copy is stored; None without one."""
        return None if self.read_copy is None else FORMATS[_name(self.read_copy)]

    @property
    def steps_read(self) -> Format:
        """How what steps read is stored: the read copy, or the checkpoint without one."""
        return self.read_format or self.checkpoint_format


def _name(value: torch.dtype | str) -> str:
    return value if isinstance(value, str) else _DTYPES[value]


def _format(argument: str, value: object, formats: dict[str, Format], optional: bool = False) -> torch.dtype | str:
    """What a policy keeps of a format that the caller named: a dtype, or the name of a format with scales."""
    found = None
    if isinstance(value, torch.dtype):
        found = _DTYPES.get(value)
    elif isinstance(value, str):
        found = _NAMES.get(value)
    if found not in formats:
        supported = ", ".join([*(["None"] if optional else []), *map(repr, formats)])
        raise ReplayError(f"{argument}: got {value!r}, supported: {supported}")
    return _PLAIN.get(found, found)


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

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(H, P, K), whatever the checkpoint's format makes of it."""
        return self.heads, self.head_dim, self.state_dim

    @property
    def written_format(self) -> Format:
        """How the written values ``u`` are stored."""
        return BUFFERS[_name(self.precision.buffer or self.wide)]

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Name -> shape and dtype of each tensor that a slot of one layer has.

        Buffer tensors are head-major, ``[heads or groups, W, …]``, so that one head's entries are contiguous.
        """
        h, g, p, k, w, wide = self.heads, self.groups, self.head_dim, self.state_dim, self.window, self.wide
        policy = self.precision
        found = _specs("checkpoint", policy.checkpoint_format, (h, p, k))
        if policy.read_format is not None:
            found |= _specs("read_copy", policy.read_format, (h, p, k))
        found["key"] = TensorSpec((g, w, k), self.dtype, entries=True)
        found["value"] = TensorSpec((h, w, p), self.dtype, entries=True)
        found["weight"] = TensorSpec((h, w), wide, entries=True)
        if self.recurrence.decay != "none":
            channels = (k,) if self.recurrence.decay == "channel" else ()
            found["decay"] = TensorSpec((h, w, *channels), wide, entries=True)
        if self.recurrence.update == "delta":
            found["key_scale"] = TensorSpec((g, w), wide, entries=True)
            found |= _specs("written", self.written_format, (h, w, p), entries=True)
        if self.conv is not None:
            found["conv"] = TensorSpec((self.conv.channels, self.conv.width - 1 + self.max_draft), self.dtype)
        return found

    @property
    def slot_bytes(self) -> int:
        """Bytes that one slot of one layer takes: checkpoint, read copy, buffer and convolution tail."""
        return sum(spec.nbytes for spec in self.tensors.values())


def _specs(name: str, form: Format, sizes: tuple[int, int, int], entries: bool = False) -> dict[str, TensorSpec]:
    """The tensors of a format, by full name."""
    return {name + suffix: TensorSpec(*spec, entries=entries) for suffix, spec in form.specs(*sizes).items()}
