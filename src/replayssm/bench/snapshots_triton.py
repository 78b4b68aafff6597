"""The conventional step of one or several tokens a row on a GPU: reads a state once and writes it after every token.

With one token that is the ordinary decode step; with drafts each token's state is kept, so that a rejected one can be
forgotten by looking at an earlier state, as serving engines do. It has the library's own gates.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# ruff: noqa: SIM108, RUF005

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.triton.args import Tokens
from replayssm.backends.triton.gates import channel_gates, gate_inputs, head_gates, unit_scales
from replayssm.backends.triton.launch import Tile, inner_contiguous, make_shape, raw_inputs
from replayssm.inputs import Inputs
from replayssm.layout import Layout
from replayssm.rows import Rows


@triton.jit
def load_token(
    inputs, strides, token, valid, head, group, p, columns, low, high, S: tl.constexpr, CHANNELS: tl.constexpr
):
    """q, k [1, BK] with their scales, v [BP], the decay [1] or [1, BK] and β [1] of one token."""
    wide = (columns < S.K)[None, :] & valid[:, None]
    place = token[:, None] * 0 + group * S.K + columns[None, :]
    q = tl.load(inputs.q + token[:, None] * strides.q + place, mask=wide, other=0.0).to(tl.float32)
    k = tl.load(inputs.k + token[:, None] * strides.k + place, mask=wide, other=0.0).to(tl.float32)
    v = tl.load(inputs.v + token * strides.v + head * S.P + p, mask=(p < S.P) & valid, other=0.0).to(tl.float32)
    g, beta = head_gates(inputs, gate_inputs(inputs, strides, token, valid, head), valid, low, high, S)
    if CHANNELS:
        decay = channel_gates(inputs, strides, token, wide, head, columns, low, high, S)
    else:
        decay = g[:, None]
    q_scale, k_scale = unit_scales(tl.sum(q * q, 1), tl.sum(k * k, 1), S)
    return q * q_scale[:, None], k * k_scale[:, None], v, tl.exp(decay), beta


@triton.jit
def snapshot_kernel(
    states, current, table, inputs, strides, out, low, high,
    S: tl.constexpr, T: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """``states`` [slots, T, H, P, K]; ``table``: slots [R], offsets [R + 1]. Grid: rows × heads × tiles of head_dim."""
    tiles: tl.constexpr = (S.P + S.BP - 1) // S.BP
    size: tl.constexpr = S.H * S.P * S.K
    pid = tl.program_id(0)
    row = pid // (S.H * tiles)
    head = (pid // tiles) % S.H
    group = head // (S.H // S.G)
    p = (pid % tiles) * S.BP + tl.arange(0, S.BP)
    columns = tl.arange(0, S.BK)
    slot = tl.load(table[0] + row).to(tl.int64)
    if slot < 0:
        return
    start = tl.load(table[1] + row).to(tl.int64)
    count = tl.load(table[1] + row + 1) - start
    inside = (p < S.P)[:, None] & (columns < S.K)[None, :]
    at = states + slot * T * size + (head * S.P + p)[:, None] * S.K + columns[None, :]
    s = tl.load(at + tl.load(current + slot).to(tl.int64) * size, mask=inside, other=0.0)
    # All loads first: a load does not pass a store of unknown address.
    parts = ()
    for t in tl.static_range(T):
        token = start + t + tl.arange(0, 1).to(tl.int64)
        valid = tl.full([1], t, tl.int64) < count
        parts = parts + (load_token(inputs, strides, token, valid, head, group, p, columns, low, high, S, CHANNELS),)
    for t in tl.static_range(T):
        q, k, v, decay, beta = parts[t]
        s *= decay
        if S.update == "delta":
            v -= tl.sum(s * k, 1)
        s += (beta * v)[:, None] * k
        if t < count:
            tl.store(at + t * size, s, mask=inside)
            o = tl.sum(s * q, 1)
            tl.store(out + ((start + t) * S.H + head) * S.P + p, o.to(out.dtype.element_ty), mask=p < S.P)


def snapshot_step(
    states: Tensor, current: Tensor, rows: Rows, inputs: Inputs, layout: Layout, out: Tensor, tile: Tile
) -> Tensor:
    """Each row's tokens from its slot's state number ``current``; ``states`` [slots, T, H, P, K] gets T new ones."""
    raw = raw_inputs(inputs, layout)
    tensors = Tokens(*(inner_contiguous(t) for t in raw.tensors))
    shape = make_shape(layout, tile, raw.gate, raw.unit, False, tokens=1)
    snapshot_kernel[(len(rows.slots) * layout.heads * triton.cdiv(layout.head_dim, tile.p),)](
        states,
        current,
        (rows.slots, rows.offsets),
        tensors,
        Tokens(*(0 if t is None else t.stride(0) for t in tensors)),
        out,
        raw.low,
        raw.high,
        S=shape,
        T=states.shape[1],
        CHANNELS=layout.recurrence.decay == "channel",
        num_warps=tile.warps,
    )
    return out


def tile_of(layout: Layout, knobs: tuple[int, int]) -> Tile:
    """A tile of ``knobs`` (rows, warps) with all columns of the state."""
    return Tile(knobs[0], triton.next_power_of_2(layout.state_dim), knobs[1])


def states_of(layout: Layout, layers: int, slots: int, device: torch.device) -> Tensor:
    """States [layers, slots, max_draft, H, P, K] in float32, zero."""
    return torch.zeros((layers, slots, layout.max_draft, *layout.state_shape), device=device)
