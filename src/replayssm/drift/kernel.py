"""The conventional recurrence in one kernel: a program walks one head's tokens with the state in registers.

131,072 tokens one after the other take about as many microseconds, which no loop of launches does.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# ruff: noqa: RET505

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.triton.quant import random_bits
from replayssm.rounding import seed_bits

if TYPE_CHECKING:
    from replayssm.drift.loop import Loop, Tokens


@dataclass(frozen=True)
class Grid:
    """The numbers that a format has, as kernels round to them: multiples of a power of two that grows with the number.

    Attributes:
        digits: binary ones behind the point.
        least: exponent below which the multiples stay the same: that of the smallest normal number; for integers, one
            that none of them reaches.
        top: the largest number.
        scale: "none", "row" (a float32 a row) or "block" (an e4m3 a block of 16, a float32 a head).
    """

    digits: int
    least: int
    top: float
    scale: str


GRIDS = {
    "bf16": Grid(7, -119, torch.finfo(torch.bfloat16).max, "none"),  # numbers below 2^-119 are beside the point
    "fp16": Grid(10, -14, 65504.0, "none"),
    "fp8": Grid(3, -6, 448.0, "row"),
    "fp8_e5m2": Grid(2, -14, 57344.0, "row"),
    "int8": Grid(7, 7, 127.0, "row"),
    "int4": Grid(3, 3, 7.0, "block"),
    "nvfp4": Grid(1, 0, 6.0, "block"),
}


@dataclass(frozen=True)
class Walk:
    """Compile-time numbers and words.

    Attributes:
        H, G, P, K: heads, groups, head_dim, state_dim.
        BP, BK: P and K rounded up to powers of two.
        delta: whether the update is "delta".
        channel: whether the decay is per channel.
        grid: of the state's format; None where it is not rounded.
        stochastic: how it is rounded.
    """

    H: int
    G: int
    P: int
    K: int
    BP: int
    BK: int
    delta: bool
    channel: bool
    grid: Grid | None
    stochastic: bool


@triton.jit
def on_grid(x, bits, up: tl.constexpr, DIGITS: tl.constexpr, LEAST: tl.constexpr):
    """x (float32) on a grid: stochastically with ``bits``; without them ``up``, or to the nearest with ties to even."""
    exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, LEAST) - DIGITS
    unit = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    y = x * ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    if bits is not None:
        size = tl.abs(y)
        low = tl.floor(size)
        size = low + (bits.to(tl.float32) * (1.0 / 4294967296.0) < size - low).to(tl.float32)
        return tl.where(x < 0, -size, size) * unit
    elif up:
        return tl.ceil(y) * unit
    else:
        return ((y + 12582912.0) - 12582912.0) * unit  # 1.5 · 2^23, where float32 counts by ones


@triton.jit
def scale_of(largest, top):
    """The scale that brings ``largest`` to ``top``, as ``formats`` has it."""
    return tl.where(largest > 0, tl.maximum(largest * ((1 - 2.0**-22) / top), 2.0**-100), 0.0)


@triton.jit
def reciprocal(scale):
    """1/scale; 0 where the scale is 0."""
    return tl.where(scale > 0, tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def rounded(s, seed, number, index, column, S: tl.constexpr):
    """What a head's state [BP, BK] decodes to after it was stored.

    ``number``, ``index`` and ``column`` say which random bits.
    """
    bits = None
    if S.stochastic:
        bits = random_bits(seed, seed * 0, number, index, column)
    if S.grid is None:
        return s
    elif S.grid.scale == "none":
        found = on_grid(s, bits, False, S.grid.digits, S.grid.least)
        beyond = S.grid.top if S.stochastic else float("inf")
        found = tl.where(found > S.grid.top, beyond, found)
        return tl.where(found < -S.grid.top, -beyond, found)
    elif S.grid.scale == "row":
        scale = scale_of(tl.max(tl.abs(s), 1), S.grid.top)[:, None]
        scaled = tl.clamp(s * reciprocal(scale), -S.grid.top, S.grid.top)
        return on_grid(scaled, bits, False, S.grid.digits, S.grid.least) * scale
    else:
        blocks = tl.reshape(s, [S.BP, S.BK // 16, 16])
        largest = tl.max(tl.abs(blocks), 2)
        head = scale_of(tl.max(tl.max(largest, 1), 0), S.grid.top * 448.0)
        ratio = tl.minimum(largest * (reciprocal(head) * (1 / S.grid.top)), 448.0)
        scale = (on_grid(ratio, None, S.stochastic, 3, -6) * head)[:, :, None]
        scaled = tl.clamp(blocks * reciprocal(scale), -S.grid.top, S.grid.top)
        if S.stochastic:
            bits = tl.reshape(bits, [S.BP, S.BK // 16, 16])
        found = on_grid(scaled, bits, False, S.grid.digits, S.grid.least) * scale
        return tl.reshape(found, [S.BP, S.BK])


@triton.jit
def one_token(tokens, at, head, p, c, there, S: tl.constexpr):
    """q, k [BK], v [BP], decay ([BK] or a number) and β of a token of one head; zeros where it is not ``there``."""
    shared = (at * S.G + head // (S.H // S.G)) * S.K + c
    wide = there & (c < S.K)
    q = tl.load(tokens.q + shared, mask=wide, other=0.0)
    k = tl.load(tokens.k + shared, mask=wide, other=0.0)
    place = at * S.H + head
    v = tl.load(tokens.v + place * S.P + p, mask=there & (p < S.P), other=0.0)
    beta = tl.load(tokens.beta + place, mask=there, other=0.0)
    if tokens.g is None:
        decay = beta * 0 + 1
    elif S.channel:
        decay = tl.load(tokens.g + place * S.K + c, mask=wide, other=0.0)
    else:
        decay = tl.load(tokens.g + place, mask=there, other=0.0)
    return q, k, v, decay, beta


@triton.jit(do_not_specialize=["seed", "amount"])
def walk_kernel(state, tokens, out, count, seed, amount, S: tl.constexpr):
    """Grid: rows × heads. ``tokens.g`` holds decays, exp g. The next token's inputs are on their way meanwhile."""
    head = tl.program_id(0) % S.H
    row = (tl.program_id(0) // S.H).to(tl.int64)
    p = tl.arange(0, S.BP)
    c = tl.arange(0, S.BK)
    index = (head * S.P + p)[:, None] * S.K + c[None, :]
    inside = (p < S.P)[:, None] & (c < S.K)[None, :]
    at_state = state + row * (S.H * S.P * S.K) + index
    s = tl.load(at_state, mask=inside, other=0.0)
    before = tl.load(count)
    at = row * amount
    q, k, v, decay, beta = one_token(tokens, at, head, p, c, amount > 0, S)
    for t in range(amount):
        next_q, next_k, next_v, next_decay, next_beta = one_token(tokens, at + t + 1, head, p, c, t + 1 < amount, S)
        if S.channel:
            s *= decay[None, :]
        else:
            s *= decay
        if S.delta:
            v -= tl.sum(s * k[None, :], 1)
        s += (beta * v)[:, None] * k[None, :]
        o = tl.sum(s * q[None, :], 1)
        tl.store(out + ((at + t) * S.H + head) * S.P + p, o, mask=p < S.P)
        s = rounded(s, seed, before + t + 1, index, c[None, :], S)
        q, k, v, decay, beta = next_q, next_k, next_v, next_decay, next_beta
    tl.store(at_state, s, mask=inside)


def walk(loop: Loop, tokens: Tokens) -> Tensor:
    """Advance a loop's states by T tokens; outputs [B, T, H, P] in the loop's wide dtype."""
    layout, policy = loop.layout, loop.precision
    rows, amount = tokens.v.shape[:2]
    out = torch.empty(tokens.v.shape, dtype=loop.wide, device=tokens.v.device)
    shape = Walk(
        layout.heads,
        layout.groups,
        layout.head_dim,
        layout.state_dim,
        triton.next_power_of_2(layout.head_dim),
        max(16, triton.next_power_of_2(layout.state_dim)),
        layout.recurrence.update == "delta",
        layout.recurrence.decay == "channel",
        GRIDS.get(policy.checkpoint_format.name),
        policy.rounding == "stochastic",
    )
    decay = None if tokens.g is None else tokens.g.exp()
    dense = type(tokens)(*(None if t is None else t.contiguous() for t in tokens._replace(g=decay)))
    warps = min(16, max(1, shape.BP * shape.BK // 512))
    walk_kernel[(rows * layout.heads,)](
        loop.state, dense, out, loop.count, seed_bits(loop.seed), amount, S=shape, num_warps=warps
    )
    loop.count += amount
    return out
