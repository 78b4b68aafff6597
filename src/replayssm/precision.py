"""How a state is stored: conversion to the checkpoint's dtype, nearest or stochastic, and the read copy.

Stochastic rounding draws its bits from a counter: the cache's seed, the layer, how often the slot has been rounded
since it was loaded, and the element's place in the state. So it is reproducible, and it depends neither on the slot's
number nor on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.layout import Precision

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (two rounds of multiply and xor-shift) on int64 tensors that hold uint32 values."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def random_bits(seed: int, layer: int, counter: Tensor, elements: int) -> Tensor:
    """Uniform 32-bit integers [R, elements] as int64, for the roundings number ``counter`` [R] of a layer."""
    key = _mix(torch.tensor(seed & _MASK, device=counter.device))
    key = _mix((key + layer) & _MASK)
    key = _mix((key + counter.long()) & _MASK)[:, None]
    index = torch.arange(elements, device=counter.device)
    return _mix(_mix((index + key) & _MASK) ^ key)


def round_stochastic(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round x (float32) to one of its two neighbours in ``dtype`` (bfloat16 or float16), in expectation x.

    Values beyond the largest finite number saturate; infinities and NaN stay.
    """
    magnitude = x.abs()
    nearest = magnitude.to(dtype)
    below = nearest.view(torch.int16) - (nearest.to(x.dtype) > magnitude).to(torch.int16)
    low = below.view(dtype).to(x.dtype)
    high = (below + 1).view(dtype).to(x.dtype)
    fraction = (magnitude - low) / (high - low)
    up = (bits.to(x.dtype) / 2.0**32 < fraction).to(torch.int16)
    rounded = (below + up).view(dtype).copysign(x.to(dtype))
    return torch.where(torch.isfinite(x), rounded, x.to(dtype))


def store(state: Tensor, precision: Precision, seed: int, layer: int, counter: Tensor) -> Tensor:
    """Return ``state`` [R, H, P, K] in the checkpoint's dtype.

    Args:
        state: float32 (or float64).
        precision: names dtype and rounding.
        seed, layer: of the cache.
        counter: [R] roundings that the slots have had since they were loaded.
    """
    dtype = precision.checkpoint
    assert isinstance(dtype, torch.dtype)
    if precision.rounding == "nearest" or state.shape[0] == 0:
        return state.to(dtype)
    bits = random_bits(seed, layer, counter, state[0].numel()).view(state.shape)
    return round_stochastic(state, dtype, bits)


def encode(checkpoint: Tensor, precision: Precision) -> dict[str, Tensor]:
    """Return the read copy of a checkpoint, by tensor name; empty where the policy has none."""
    if precision.read_copy is None:
        return {}
    assert isinstance(precision.read_copy, torch.dtype)
    return {"read_copy": checkpoint.to(precision.read_copy)}
