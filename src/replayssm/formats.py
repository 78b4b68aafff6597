"""How a state is stored, one record a format: which tensors, encode, decode.

Low-precision formats keep codes and scales. A scale covers a row (one value channel's ``state_dim`` elements) or a
block of 16 elements of a row. What holds for all of them, so that kernels can do the same to the bit:

* A scale is the largest magnitude times a constant just below 1/top, so that decoding never exceeds it, not even
  float32's range; it is 0 for zeros and at least 2^-100 otherwise, so that neither it nor its reciprocal is denormal.
* An element is multiplied by the scale's reciprocal, clamped to ±top and rounded; zeros are stored as zero bytes.
* A NaN or an infinity makes the scale of its row or block NaN, and what it covers reads as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.rounding import round_integer, round_stochastic

Parts = dict[str, Tensor]
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]

BLOCK = 16
"""Elements that share a scale in the four-bit formats."""
SMALLEST = 2.0**-100
"""The smallest scale that is not 0."""
_SHRINK = 1 - 2.0**-22
_E4M3 = torch.float8_e4m3fn
_LARGEST_BLOCK_SCALE = 448.0


class Format(Protocol):
    """One way to store states [.., H, P, K]. Tensors are named by what follows "checkpoint" or "read_copy"."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    def specs(self, heads: int, head_dim: int, state_dim: int) -> Specs:
        """Suffix -> shape and dtype of each tensor of one slot."""
        ...

    def encode(self, state: Tensor, bits: Tensor | None = None) -> Parts:
        """Store; to the nearest code, or stochastically where ``bits`` (uint32 as int64, like the state) are given."""
        ...

    def decode(self, parts: Parts, state_dim: int, wide: torch.dtype) -> Tensor:
        """The state in ``wide``."""
        ...


@dataclass(frozen=True)
class Plain:
    """A floating-point dtype without scales.

    Attributes:
        name: for users.
        dtype: of the elements.
    """

    name: str
    dtype: torch.dtype

    def specs(self, heads: int, head_dim: int, state_dim: int) -> Specs:
        """See ``Format``."""
        return {"": ((heads, head_dim, state_dim), self.dtype)}

    def encode(self, state: Tensor, bits: Tensor | None = None) -> Parts:
        """See ``Format``."""
        return {"": state.to(self.dtype) if bits is None else round_stochastic(state, self.dtype, bits)}

    def decode(self, parts: Parts, state_dim: int, wide: torch.dtype) -> Tensor:
        """See ``Format``."""
        return parts[""].to(wide)


@dataclass(frozen=True)
class RowScaled:
    """Eight-bit codes and a float32 scale per row: value = code · scale.

    A scale per 32 elements would cost 9 % more bytes for an error 6…15 % (fp8) smaller, and kernels would multiply per
    element instead of once a row, after the sum.

    Attributes:
        name: for users.
        dtype: of the codes: int8, float8_e4m3fn or float8_e5m2.
        top: largest code.
    """

    name: str
    dtype: torch.dtype
    top: float

    def specs(self, heads: int, head_dim: int, state_dim: int) -> Specs:
        """See ``Format``."""
        return {"": ((heads, head_dim, state_dim), self.dtype), "_scale": ((heads, head_dim), torch.float32)}

    def encode(self, state: Tensor, bits: Tensor | None = None) -> Parts:
        """See ``Format``."""
        state = state.float()
        scale = _scale(state.abs().amax(-1), self.top)
        scaled = _scaled(state, scale[..., None], self.top)
        if self.dtype == torch.int8:
            codes = round_integer(scaled, bits).to(torch.int8)
        else:
            codes = scaled.to(self.dtype) if bits is None else round_stochastic(scaled, self.dtype, bits)
        return {"": codes, "_scale": scale}

    def decode(self, parts: Parts, state_dim: int, wide: torch.dtype) -> Tensor:
        """See ``Format``."""
        return parts[""].to(wide) * parts["_scale"].to(wide)[..., None]


@dataclass(frozen=True)
class BlockScaled:
    """Four-bit codes, an e4m3 scale per block of 16 and a float32 scale per head: value = level · block · head.

    Rows are padded with zeros to a multiple of 32 elements, K'. Codes are planar: byte m of a row holds element m in
    its low nibble and element m + K'/2 in its high one. A block's scale is rounded to the nearest e4m3 number, so its
    largest elements may saturate (by 1/17 at most); with stochastic rounding it is rounded up instead, because
    saturation would be a bias.

    Attributes:
        name: for users.
        top: largest level.
        floating: e2m1 codes (sign and 0, ½, 1, 1½, 2, 3, 4, 6); else two's complement, −7…7.
    """

    name: str
    top: float
    floating: bool

    def specs(self, heads: int, head_dim: int, state_dim: int) -> Specs:
        """See ``Format``."""
        wide = padded(state_dim)
        return {
            "": ((heads, head_dim, wide // 2), torch.uint8),
            "_scale": ((heads, head_dim, wide // BLOCK), _E4M3),
            "_head_scale": ((heads,), torch.float32),
        }

    def encode(self, state: Tensor, bits: Tensor | None = None) -> Parts:
        """See ``Format``."""
        extra = padded(state.shape[-1]) - state.shape[-1]
        blocks = F.pad(state.float(), (0, extra)).unflatten(-1, (-1, BLOCK))
        finite = torch.isfinite(blocks)
        largest = torch.where(finite, blocks.abs(), 0.0).amax(-1)
        head = _scale(largest.amax((-1, -2)), self.top * _LARGEST_BLOCK_SCALE)
        factor = _reciprocal(head) * (1 / self.top)
        scale = _block_scale(largest * factor[..., None, None], up=bits is not None)
        scale = torch.where(finite.all(-1), scale, float("nan"))
        scaled = _scaled(blocks, (scale * head[..., None, None])[..., None], self.top)
        random = None if bits is None else F.pad(bits, (0, extra)).unflatten(-1, (-1, BLOCK))
        codes = (self._floating(scaled, random) if self.floating else self._integer(scaled, random)).flatten(-2)
        half = codes.shape[-1] // 2
        return {"": codes[..., :half] | codes[..., half:] << 4, "_scale": scale.to(_E4M3), "_head_scale": head}

    def decode(self, parts: Parts, state_dim: int, wide: torch.dtype) -> Tensor:
        """See ``Format``."""
        levels = torch.tensor(self.levels, dtype=wide, device=parts[""].device)
        codes = torch.cat([parts[""] & 15, parts[""] >> 4], -1)
        scale = parts["_scale"].to(wide) * parts["_head_scale"].to(wide)[..., None, None]
        blocks = levels[codes.int()].unflatten(-1, (-1, BLOCK)) * scale[..., None]
        return blocks.flatten(-2)[..., :state_dim]

    @property
    def levels(self) -> tuple[float, ...]:
        """The level of each of the 16 codes."""
        if self.floating:
            half = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
            return half + tuple(-level for level in half)
        return tuple(float(n if n < 8 else n - 16) for n in range(16))

    def _floating(self, x: Tensor, bits: Tensor | None) -> Tensor:
        """Codes of e2m1. The middles between levels go to the even code."""
        size = x.abs()
        if bits is None:
            above = (size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5)
            code = torch.stack(above).sum(0)
        else:  # on this piecewise linear scale the levels are whole numbers
            code = round_integer(torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)), bits)
        return code.to(torch.uint8) | torch.signbit(x).to(torch.uint8) << 3

    def _integer(self, x: Tensor, bits: Tensor | None) -> Tensor:
        return round_integer(x, bits).to(torch.int8).view(torch.uint8) & 15


@dataclass(frozen=True)
class Split:
    """The sum of two bfloat16 numbers: 16 bits of mantissa in operands that tensor cores multiply exactly."""

    name: str

    def specs(self, heads: int, head_dim: int, state_dim: int) -> Specs:
        """See ``Format``."""
        shape = (heads, head_dim, state_dim)
        return {"": (shape, torch.bfloat16), "_low": (shape, torch.bfloat16)}

    def encode(self, state: Tensor, bits: Tensor | None = None) -> Parts:
        """See ``Format``."""
        high = state.to(torch.bfloat16)
        return {"": high, "_low": (state - high.to(state.dtype)).to(torch.bfloat16)}

    def decode(self, parts: Parts, state_dim: int, wide: torch.dtype) -> Tensor:
        """See ``Format``."""
        return parts[""].to(wide) + parts["_low"].to(wide)


@dataclass(frozen=True)
class PowerScaled:
    """float16 and a power of two per row that brings its largest number to 2^14…2^15: no overflow, no denormals lost.

    A NaN or an infinity stays where it is; the scale comes from the finite numbers.
    """

    name: str

    def specs(self, heads: int, head_dim: int, state_dim: int) -> Specs:
        """See ``Format``."""
        return {"": ((heads, head_dim, state_dim), torch.float16), "_scale": ((heads, head_dim), torch.float32)}

    def encode(self, state: Tensor, bits: Tensor | None = None) -> Parts:
        """See ``Format``."""
        largest = torch.where(torch.isfinite(state), state.abs(), 0.0).amax(-1)
        power = (torch.frexp(largest).exponent - 15).clamp(min=-100)
        scale = torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), power), 1.0).float()
        return {"": (state / scale[..., None]).half(), "_scale": scale}

    def decode(self, parts: Parts, state_dim: int, wide: torch.dtype) -> Tensor:
        """See ``Format``."""
        return parts[""].to(wide) * parts["_scale"].to(wide)[..., None]


def padded(state_dim: int) -> int:
    """Elements of a stored row in the four-bit formats."""
    return -(-state_dim // 32) * 32


def _scale(largest: Tensor, top: float) -> Tensor:
    """The scale that brings ``largest`` to ``top``: 0 for 0, NaN for what is not finite."""
    scale = (largest * (_SHRINK / top)).clamp(min=SMALLEST)
    scale = torch.where(largest > 0, scale, 0.0)
    return torch.where(torch.isfinite(largest), scale, float("nan"))


def _reciprocal(scale: Tensor) -> Tensor:
    """1/scale; 0 where the scale is 0 or NaN."""
    return torch.where(scale > 0, 1 / scale, 0.0)


def _scaled(x: Tensor, scale: Tensor, top: float) -> Tensor:
    """x in units of the scale, within ±top; 0 where the scale is 0 or NaN."""
    return torch.where(scale > 0, (x * _reciprocal(scale)).clamp(-top, top), 0.0)


def _block_scale(ratio: Tensor, up: bool) -> Tensor:
    """Ratios of block to head scale as e4m3 numbers, in float32."""
    nearest = ratio.clamp(max=_LARGEST_BLOCK_SCALE).to(_E4M3)
    if up:
        more = (nearest.view(torch.uint8) + 1).clamp(max=0x7E).view(_E4M3)
        nearest = torch.where(nearest.float() < ratio, more.float(), nearest.float())
    return nearest.float()


_FLOATS: dict[str, Format] = {
    "fp64": Plain("fp64", torch.float64),
    "fp32": Plain("fp32", torch.float32),
    "bf16": Plain("bf16", torch.bfloat16),
    "fp16": Plain("fp16", torch.float16),
}
FORMATS: dict[str, Format] = {
    **_FLOATS,
    "fp8": RowScaled("fp8", _E4M3, 448.0),
    "fp8_e5m2": RowScaled("fp8_e5m2", torch.float8_e5m2, 57344.0),
    "int8": RowScaled("int8", torch.int8, 127.0),
    "int4": BlockScaled("int4", 7.0, floating=False),
    "nvfp4": BlockScaled("nvfp4", 6.0, floating=True),
}
"""Formats of checkpoints and read copies, by name."""
BUFFERS: dict[str, Format] = {**_FLOATS, "bf16x2": Split("bf16x2"), "fp16_scaled": PowerScaled("fp16_scaled")}
"""Formats of the written values ``u``, stored as [heads, window, head_dim]."""
