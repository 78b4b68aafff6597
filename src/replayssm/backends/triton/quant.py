"""Stochastic rounding on the device: the counter's bits, and 16-bit dtypes, as ``replayssm.rounding`` to the bit."""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

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
    """Round float32 to one of its two neighbours in a 16-bit dtype, in expectation x; saturates, keeps NaN and inf.

    Without a division: the code below |x| and the share of a step that is left over are digits of |x|, in bfloat16 as
    they stand, in float16 counted in units of its last digit, which below 2^-14 is 2^-24.
    """
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if tl.bfloat16 == DTYPE:
        TOP: tl.constexpr = 0x7F7F
        code = magnitude >> 16
        up = bits.to(tl.float32) < (magnitude << 16).to(tl.uint32, bitcast=True).to(tl.float32)
    else:
        TOP: tl.constexpr = 0x7BFF
        exponent = tl.maximum(magnitude & 0x7F800000, 113 << 23)
        units = tl.abs(x) * ((132 << 23) - exponent + (132 << 23)).to(tl.float32, bitcast=True)
        near = units + 8388608.0
        over = (near - 8388608.0 > units).to(tl.int32)
        code = near.to(tl.int32, bitcast=True) + (exponent >> 13) - ((150 << 23) + (113 << 10)) - over
        up = below(bits, units - (near - 8388608.0) + over.to(tl.float32))
    code = tl.minimum(code + up.to(tl.int32), TOP) | ((x.to(tl.int32, bitcast=True) >> 16) & 0x8000)
    rounded = code.to(tl.int16).to(DTYPE, bitcast=True)
    return tl.where(magnitude < 0x7F800000, rounded, x.to(DTYPE))
