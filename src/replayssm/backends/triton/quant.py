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
def random_words(seed, layer, counter, index):
    """Uniform uint32 for pairs of elements; ``index`` is the place in the state of the one with the smaller column."""
    key = mixed((index * 0).to(tl.uint32) + seed.to(tl.uint32))
    key = mixed(key + layer.to(tl.uint32))
    key = mixed(key + counter.to(tl.uint32))
    return mixed(mixed(index.to(tl.uint32) + key) ^ key)


@triton.jit
def bits_of(word, upper):
    """The bits of the element of a pair that has the ``upper`` half of their word, or of the other."""
    return tl.where(upper, word & 0xFFFF0000, word << 16) ^ 0xFFFFFF00


@triton.jit
def random_bits(seed, layer, counter, index, column):
    """The bits of elements in a layer's rounding number ``counter``, given their places in the state and columns."""
    upper = column & 32
    return bits_of(random_words(seed, layer, counter, index - upper), upper > 0)


@triton.jit
def below(bits, fraction):
    """Whether to round up: with the probability ``fraction``."""
    return bits.to(tl.float32) * (1.0 / 4294967296.0) < fraction


@triton.jit
def round_stochastic(x, bits, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """Round float32 to one of its two neighbours in a 16-bit dtype, in expectation x; saturates, keeps NaN and inf.

    Up if ``bits`` are ``below`` the share of a step that is left over: if that share and what the bits lack, in units
    of 2^-16 of a step, make a whole one.
    """
    lacking = bits ^ 0xFFFFFF00
    if tl.bfloat16 == DTYPE:
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        code = tl.minimum((magnitude + (lacking >> 16).to(tl.int32)) >> 16, 0x7F7F)
        code |= (x.to(tl.int32, bitcast=True) >> 16) & 0x8000
        rounded = code.to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.where(magnitude < 0x7F800000, rounded, x.to(tl.bfloat16))
    else:
        return to_float16(x, lacking, ARCH)


@triton.jit
def to_float16(x, lacking, ARCH: tl.constexpr):
    """``round_stochastic`` to float16: x and a part of a step, cut off."""
    # The power of two at or below |x|, as far as steps differ: below 2^-14 they are those of 2^-14.
    power = tl.clamp(tl.abs(x), 2.0**-14, 2.0**15).to(tl.int32, bitcast=True) & 0x7F800000
    power = power.to(tl.float32, bitcast=True)
    if ARCH > 0:
        # A part of a step of 2^-10: what is lacking, as digits behind those of 1/8. The sum and the conversion cut
        # off, and do with NaN, infinities and what is too large as is wanted.
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 a, b, c, d;
            .reg .b32 size, sign;
            prmt.b32 size, $3, 0x3E000000, 0x7632;
            mov.b32 c, size;
            prmt.b32 size, $4, 0x3E000000, 0x7632;
            mov.b32 d, size;
            add.f32 c, c, 0fBE000000;
            add.f32 d, d, 0fBE000000;
            mov.b32 a, $1;
            mov.b32 b, $2;
            abs.f32 a, a;
            abs.f32 b, b;
            fma.rz.f32 a, c, $5, a;
            fma.rz.f32 b, d, $6, b;
            cvt.rz.f16x2.f32 size, b, a;
            prmt.b32 sign, $1, $2, 0x7632;
            lop3.b32 $0, size, sign, 0x80008000, 0xF8;
            }""",
            "=r,r,r,r,r,f,f",
            [x, lacking, power],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        steps = tl.minimum(tl.abs(x), 65504.0) * (1024.0 / power)
        whole = tl.floor(steps)
        whole += ((steps - whole) * 65536.0 + (lacking >> 16).to(tl.float32) >= 65536.0).to(tl.float32)
        size = (whole * (power * (1 / 1024.0))).to(tl.int32, bitcast=True)
        sign = x.to(tl.int32, bitcast=True) & -0x80000000
        return tl.where(tl.abs(x) < float("inf"), (size | sign).to(tl.float32, bitcast=True), x).to(tl.float16)
