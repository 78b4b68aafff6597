"""The conventional decode step on a GPU, reading and rewriting the state at every token: the baseline of every figure.

One kernel for all recurrences with the library's own gates, so that it differs from the replay step in one thing only.
With ``wide=torch.float64`` it is the reference of long drift runs.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.triton.args import Tokens
from replayssm.backends.triton.gates import channel_gates, gate_inputs, head_gates, unit_scales
from replayssm.backends.triton.launch import Raw, Tile, inner_contiguous, make_shape, raw_inputs
from replayssm.inputs import Inputs
from replayssm.layout import Layout


@triton.jit
def conventional_kernel(
    state, slots, inputs, strides, out, low, high, S: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr
):
    """Grid: rows × heads × tiles of head_dim."""
    tiles: tl.constexpr = (S.P + S.BP - 1) // S.BP
    pid = tl.program_id(0)
    row = pid // (S.H * tiles)
    head = (pid // tiles) % S.H
    group = head // (S.H // S.G)
    p = (pid % tiles) * S.BP + tl.arange(0, S.BP)
    columns = tl.arange(0, S.BK)
    slot = tl.load(slots + row).to(tl.int64)
    token = row.to(tl.int64) + tl.arange(0, 1)
    valid = token >= 0
    inside = (p < S.P)[:, None] & (columns < S.K)[None, :]
    at = state + ((slot * S.H + head) * S.P + p)[:, None] * S.K + columns[None, :]
    s = tl.load(at, mask=inside, other=0.0).to(WIDE)
    wide = (columns < S.K)[None, :]
    place = token[:, None] * 0 + group * S.K + columns[None, :]
    q = tl.load(inputs.q + token[:, None] * strides.q + place, mask=wide, other=0.0).to(tl.float32)
    k = tl.load(inputs.k + token[:, None] * strides.k + place, mask=wide, other=0.0).to(tl.float32)
    v = tl.load(inputs.v + token * strides.v + head * S.P + p, mask=p < S.P, other=0.0).to(WIDE)
    q_scale, k_scale = unit_scales(tl.sum(q * q, 1), tl.sum(k * k, 1), S)
    q = (q * q_scale[:, None]).to(WIDE)
    k = (k * k_scale[:, None]).to(WIDE)
    g, beta = head_gates(inputs, gate_inputs(inputs, strides, token, valid, head), valid, low, high, S)
    if CHANNELS:
        s *= tl.exp(channel_gates(inputs, strides, token, wide, head, columns, low, high, S).to(WIDE))
    else:
        s *= tl.exp(g.to(WIDE))[:, None]
    if S.update == "delta":
        v -= tl.sum(s * k, 1)
    s += (beta.to(WIDE) * v)[:, None] * k
    tl.store(at, s.to(state.dtype.element_ty), mask=inside)
    o = tl.sum(s * q, 1)
    tl.store(out + (token * S.H + head) * S.P + p, o.to(out.dtype.element_ty), mask=p < S.P)


def conventional_step(
    state: Tensor,
    slots: Tensor,
    inputs: Inputs,
    layout: Layout,
    out: Tensor,
    tile: Tile,
    wide: torch.dtype | None = None,
) -> Tensor:
    """One token for each row; ``state`` [slots, H, P, K] is rewritten in place."""
    raw: Raw = raw_inputs(inputs, layout)
    tensors = Tokens(*(inner_contiguous(t) for t in raw.tensors))
    shape = make_shape(layout, tile, raw.gate, raw.unit, False, tokens=1)
    conventional_kernel[(len(slots) * layout.heads * triton.cdiv(layout.head_dim, tile.p),)](
        state,
        slots,
        tensors,
        Tokens(*(0 if t is None else t.stride(0) for t in tensors)),
        out,
        raw.low,
        raw.high,
        S=shape,
        WIDE=tl.float64 if wide == torch.float64 else tl.float32,
        CHANNELS=layout.recurrence.decay == "channel",
        num_warps=tile.warps,
    )
    return out
