"""Stochastic rounding on the device: the counter's bits, and 16-bit dtypes, as ``replayssm.rounding`` to the bit."""

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
def below(bits, fraction):
    """Whether to round up: with the probability ``fraction``."""
    return bits.to(tl.float32) * (1.0 / 4294967296.0) < fraction


@triton.jit
def round_stochastic(x, bits, DTYPE: tl.constexpr):
    """Round float32 to one of its two neighbours in a 16-bit dtype, in expectation x; saturates, keeps NaN and inf."""
    magnitude = tl.abs(x)
    nearest = magnitude.to(DTYPE)
    under = nearest.to(tl.int16, bitcast=True) - (nearest.to(tl.float32) > magnitude).to(tl.int16)
    low = under.to(DTYPE, bitcast=True).to(tl.float32)
    high = (under + 1).to(DTYPE, bitcast=True).to(tl.float32)
    up = below(bits, tl.div_rn(magnitude - low, high - low)).to(tl.int16)
    sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int16) << 15
    rounded = ((under + up) | sign).to(DTYPE, bitcast=True)
    return tl.where(magnitude < float("inf"), rounded, x.to(DTYPE))
