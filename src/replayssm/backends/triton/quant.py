"""Storing a state: the counter's random bits and stochastic rounding, the same to the bit as ``replayssm.precision``.

Low-precision read copies will be encoded and decoded here.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(x):
    """A 32-bit integer hash: two rounds of multiply and xor-shift, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_bits(seed, layer, counter, index):
    """Uniform uint32 for the elements ``index`` (places in the state) of a layer's rounding number ``counter``."""
    key = mixed((index * 0).to(tl.uint32) + seed.to(tl.uint32))
    key = mixed(key + layer.to(tl.uint32))
    key = mixed(key + counter.to(tl.uint32))
    return mixed(mixed(index.to(tl.uint32) + key) ^ key)


@triton.jit
def round_stochastic(x, bits, DTYPE: tl.constexpr):
    """Round float32 to one of its two neighbours in a 16-bit dtype, in expectation x; saturates, keeps NaN and inf."""
    magnitude = tl.abs(x)
    nearest = magnitude.to(DTYPE)
    below = nearest.to(tl.int16, bitcast=True) - (nearest.to(tl.float32) > magnitude).to(tl.int16)
    low = below.to(DTYPE, bitcast=True).to(tl.float32)
    high = (below + 1).to(DTYPE, bitcast=True).to(tl.float32)
    fraction = tl.div_rn(magnitude - low, high - low)
    up = (bits.to(tl.float32) * (1.0 / 4294967296.0) < fraction).to(tl.int16)
    sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int16) << 15
    rounded = ((below + up) | sign).to(DTYPE, bitcast=True)
    return tl.where(magnitude < float("inf"), rounded, x.to(DTYPE))


@triton.jit
def stored(x, seed, layer, counter, index, DTYPE: tl.constexpr, TYPES: tl.constexpr):
    """x (float32) in the dtype of a checkpoint."""
    if TYPES.stochastic:
        return round_stochastic(x, random_bits(seed, layer, counter, index), DTYPE)
    else:
        return x.to(DTYPE)
