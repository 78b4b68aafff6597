"""The short convolution's step, from the ring of its last inputs (see ``replayssm.conv``)."""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.gates import load_or
from replayssm.backends.triton.step import BAD_SLOT, admit, report


@triton.jit(do_not_specialize=["rows", "tokens", "bound", "slots"])
def conv_kernel(
    ring,
    ring_stride,
    x,
    x_stride,
    weight,
    bias,
    batch,
    position_ptr,
    out,
    rows,
    tokens,
    bound,
    slots,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    SILU: tl.constexpr,
    BC: tl.constexpr,
):
    """Grid: rows × blocks of channels."""
    blocks: tl.constexpr = (C + BC - 1) // BC
    RING: tl.constexpr = WIDTH - 1 + T
    pid = tl.program_id(0)
    row = pid // blocks
    c = (pid % blocks) * BC + tl.arange(0, BC)
    inside = c < C
    zero = tl.full([BC], 0, tl.int64)
    slot, start, count, _, code = admit(batch, row, slots, bound, W, T)
    live = (slot >= 0) & (code == 0)
    if (code != 0) & (pid % blocks == 0):
        report(batch.error, code, row, tl.where(code == BAD_SLOT, slot, count))
    position = tl.load(position_ptr + slot, mask=live, other=0)
    inputs = ring + slot.to(tl.int64) * ring_stride + c * RING
    first = tl.maximum(start, 0)
    last = tl.minimum(start + count, tokens)
    for token in range(first, last):
        total = load_or(bias, c, inside, 0.0)
        node = token - start
        for back in tl.static_range(WIDTH):
            tap = tl.load(weight + c * WIDTH + (WIDTH - 1 - back), mask=inside, other=0.0).to(tl.float32)
            draft = node >= 0
            new = tl.load(x + (zero + start + node) * x_stride + c, mask=inside & draft & live, other=0.0)
            place = (position + RING + tl.minimum(node, -1)) % RING
            old = tl.load(inputs + place, mask=inside & live & (node < 0), other=0.0)
            total += tap * (new.to(tl.float32) + old.to(tl.float32))
            if batch.parents is None:
                node -= 1
            else:
                above = tl.load(batch.parents + start + node, mask=draft & live, other=0)
                node = tl.where(draft, tl.minimum(above, node - 1), node - 1)
        if SILU:
            total = total * tl.sigmoid(total)
        total = tl.where(live, total, 0.0)
        tl.store(out + (zero + token) * C + c, total.to(out.dtype.element_ty), mask=inside)
        kept = tl.load(x + (zero + token) * x_stride + c, mask=inside & live, other=0.0)
        tl.store(inputs + (position + token - start) % RING, kept, mask=inside & live)
    if row == rows - 1:
        for token in range(tl.maximum(start + count, 0), tokens):
            tl.store(out + (zero + token) * C + c, tl.full([BC], 0.0, tl.float32).to(out.dtype.element_ty), mask=inside)
    if live & (pid % blocks == 0):
        tl.store(batch.drafts + slot, count)


@triton.jit
def compact_conv_kernel(
    table,
    slots_ptr,
    path,
    path_width,
    moves,
    rows,
    layers,
    C: tl.constexpr,
    RING: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Move a tree's accepted inputs along the ring. ``table`` int64 [layers, 2]: address, bytes between slots."""
    blocks: tl.constexpr = (C + BC - 1) // BC
    pid = tl.program_id(0)
    row = pid // (layers * blocks)
    layer = (pid // blocks) % layers
    taken = tl.load(moves + rows + row)
    if taken == 0:
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(moves + 2 * rows + row)
    base = (tl.load(table + layer * 2) + tl.load(table + layer * 2 + 1) * slot).to(tl.pointer_type(DTYPE))
    c = (pid % blocks) * BC + tl.arange(0, BC)
    i = tl.arange(0, BT)
    source = (position + tl.load(path + row * path_width + i, mask=i < taken, other=0)) % RING
    goal = (position + i) % RING
    mask = (i < taken)[:, None] & (c < C)[None, :]
    moved = tl.load(base + c[None, :] * RING + source[:, None], mask=mask, other=0.0)
    tl.debug_barrier()
    tl.store(base + c[None, :] * RING + goal[:, None], moved, mask=mask)
