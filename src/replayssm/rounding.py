"""Stochastic rounding, from bits that a counter makes.

The bits depend on the cache's seed, the layer, how often the slot has been rounded since it was loaded, and the
element's place in the state [H, P, K]. So a run is reproducible, and depends neither on the slot's number nor on the
batch.

Elements whose columns differ by 32 alone share a 32-bit word, half of it each. Sixteen bits are as many as a 16-bit
dtype drops from a float32 number, so that a probability is exact there; elsewhere it is cut off at 2^-16.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_CODES = {1: torch.int8, 2: torch.int16}


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (two rounds of multiply and xor-shift) on int64 tensors that hold uint32 values."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def seed_bits(seed: int) -> int:
    """A cache's 64-bit seed as the uint32 that the bits start from.

    Not the seed itself: 0 is the hash's fixed point, and seeds that differ in the upper half must differ here.
    """
    return ((seed + 1) * 0x9E3779B97F4A7C15 >> 32) & _MASK


def row_keys(seed: int, layer: int, counter: Tensor) -> Tensor:
    """What the bits of the roundings number ``counter`` [R] of a layer come from: uint32 as int64 [R]."""
    key = _mix(torch.full((), seed_bits(seed), dtype=torch.int64, device=counter.device))  # no copy from the host
    key = _mix((key + layer) & _MASK)
    return _mix((key + counter.long()) & _MASK)


def random_bits(seed: int, layer: int, counter: Tensor, elements: int, state_dim: int) -> Tensor:
    """32-bit integers [R, elements] as int64, for the roundings number ``counter`` [R] of a layer.

    The upper sixteen bits n are uniform, what half of a word lacks. With the others they are just below (n + 1)·2^16,
    and exact as a float32, so that they are ``below`` a multiple of 2^-16 with its probability.
    """
    key = row_keys(seed, layer, counter)[:, None]
    index = torch.arange(elements, device=counter.device)
    upper = index % state_dim & 32
    word = _mix(_mix((index - upper + key) & _MASK) ^ key)
    return torch.where(upper > 0, word & 0xFFFF0000, word << 16 & _MASK) ^ 0xFFFFFF00


def below(bits: Tensor, fraction: Tensor) -> Tensor:
    """Whether to round up: True with probability ``fraction``."""
    return bits.to(fraction.dtype) / 2.0**32 < fraction


def round_stochastic(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round x (float32) to one of its two neighbours in ``dtype`` (16 or 8 bits), in expectation x.

    Values beyond the largest finite number saturate; infinities and NaN stay.
    """
    code = _CODES[dtype.itemsize]
    magnitude = x.abs().clamp(max=torch.finfo(dtype).max)  # a conversion to 8 bits may saturate or give NaN
    nearest = magnitude.to(dtype)
    under = nearest.view(code) - (nearest.to(x.dtype) > magnitude).to(code)
    low = under.view(dtype).to(x.dtype)
    high = (under + 1).view(dtype).to(x.dtype)
    up = below(bits, (magnitude - low) / (high - low)).to(code)
    rounded = (under + up).view(dtype).to(x.dtype).copysign(x)
    return torch.where(torch.isfinite(x), rounded, x).to(dtype)


def round_integer(x: Tensor, bits: Tensor | None) -> Tensor:
    """Round to a whole number: to the nearest, ties to even, or with ``bits`` to one of the two around |x|."""
    if bits is None:
        return x.round()
    low = x.abs().floor()
    return (low + below(bits, x.abs() - low)).copysign(x)
