"""The fold: checkpoints advanced by their buffer entries, for all layers' rows of a work list in one launch.

Everything is recomputed from the raw inputs and the checkpoint, a block of entries at a time with the state in
registers, so the window may have any size. ``materialise`` is the same kernel with another destination.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.formats import element, load_state, scale_element, store_state, whole_columns
from replayssm.backends.triton.gates import load_or
from replayssm.backends.triton.quant import random_bits
from replayssm.backends.triton.tile import between, pairs_by_channel, product, write


@triton.jit
def tensor_of(table, layer, column: tl.constexpr, slot, DTYPE: tl.constexpr, TYPES: tl.constexpr):
    """Pointer to a slot of a layer's tensor.

    The table int64 [layers, 16, 2] holds address and bytes between slots of: checkpoint, key, value, weight, decay,
    channels (a decay per channel), key_scale, written, the fold's target, its read copy; and the scales of rows or
    blocks and of heads of the checkpoint and of the copy, then written_scale and written_low. Absent ones are 0.
    """
    entry = table + (layer * 16 + column) * 2
    address = (tl.load(entry) + tl.load(entry + 1) * slot).to(tl.pointer_type(DTYPE))
    if column < 10:
        ALIGN: tl.constexpr = TYPES.align
        address = tl.multiple_of(address, ALIGN)
    return address


@triton.jit
def state_of(table, layer, tensor: tl.constexpr, scales: tl.constexpr, slot, WORD: tl.constexpr, TYPES: tl.constexpr):
    """Pointers to a slot's state in a format: its elements (column ``tensor``), its scales and those of its heads."""
    state = tensor_of(table, layer, tensor, slot, element(WORD), TYPES)
    scale = tensor_of(table, layer, scales, slot, scale_element(WORD), TYPES)
    return state, scale, tensor_of(table, layer, scales + 1, slot, tl.float32, TYPES)


@triton.jit
def block_by_channel(past, k, first, last, columns, S: tl.constexpr):
    """Keys of a block as probes of the state before it, decayed to its end, scores among them, and the total decay."""
    if past is None:
        return k, k, product(k, tl.trans(k), S), 0.0
    else:
        e = first + tl.arange(0, S.BE)
        wide = (columns < S.K)[None, :]
        at = e[:, None] * S.K + columns[None, :]
        g = tl.load(past + at, mask=(e < last)[:, None] & wide, other=0.0)
        later = tl.load(past + S.K + at, mask=(e + 1 < last)[:, None] & wide, other=0.0)
        wide_k = k.to(tl.float32)
        i = tl.arange(0, S.BE)
        BE: tl.constexpr = S.BE
        scores = pairs_by_channel(wide_k, g, i, i >= 0, BE, S)
        after = tl.exp(tl.cumsum(later, 0, reverse=True))
        return wide_k * tl.exp(tl.cumsum(g, 0)), wide_k * after, scores, tl.sum(g, 0)[None, :]


@triton.jit
def advance(s, key, value, weight, decay, channels, key_scale, first, length, p, columns, S: tl.constexpr):
    """Advance a state s [BP, BK] by the entries first … min(first + BE, length) − 1."""
    e = first + tl.arange(0, S.BE)
    last = tl.minimum(first + S.BE, length)
    live = e < last
    wide = (columns < S.K)[None, :]
    k = tl.load(key + e[:, None] * S.K + columns[None, :], mask=live[:, None] & wide, other=0.0)
    v = tl.load(value + e[:, None] * S.P + p[None, :], mask=live[:, None] & (p < S.P)[None, :], other=0.0)
    beta = tl.load(weight + e, mask=live, other=0.0)
    scale = load_or(key_scale, e, live, 1.0)
    g = load_or(decay, e, live, 0.0)
    later = load_or(decay, e + 1, e + 1 < last, 0.0)
    i = tl.arange(0, S.BE)
    line = i[None, :] <= i[:, None]
    probe, after, scores, total = block_by_channel(channels, k, first, last, columns, S)
    seen = product(probe, tl.trans(s), S) * (tl.exp(tl.cumsum(g, 0)) * scale)[:, None]
    among = scores * tl.exp(between(g, line, i >= 0, S)) * scale[:, None] * scale[None, :]
    among = tl.where(i[None, :] < i[:, None], among, 0.0)
    BE: tl.constexpr = S.BE
    u = write(v.to(tl.float32), beta, seen, among, BE, S)
    u *= (tl.exp(tl.cumsum(later, 0, reverse=True)) * scale)[:, None]
    return s * tl.exp(total + tl.sum(g, 0)) + product(tl.trans(u), after, S)


@triton.jit(do_not_specialize=["copies", "layers", "seed"])
def fold_kernel(
    table,
    work,
    amount,
    copies,
    layers,
    seed,
    S: tl.constexpr,
    TYPES: tl.constexpr,
):
    """A fixed number of programs share ``amount[0]`` rows × layers × heads × tiles.

    ``work`` int32 [4, copies]: slot, entries, slot of the target, number of the rounding.
    """
    tiles: tl.constexpr = (S.P + S.BP - 1) // S.BP
    each = layers * S.H * tiles
    for item in range(tl.program_id(0), tl.load(amount) * each, tl.num_programs(0)):
        row = item // each
        layer = (item // (S.H * tiles)) % layers
        head = (item // tiles) % S.H
        group = head // (S.H // S.G)
        slot = tl.load(work + row).to(tl.int64)
        length = tl.load(work + copies + row)
        target = tl.load(work + 2 * copies + row).to(tl.int64)
        counter = tl.load(work + 3 * copies + row)
        p = (item % tiles) * S.BP + tl.arange(0, S.BP)
        columns = whole_columns(TYPES.order, S)
        ACT: tl.constexpr = TYPES.act
        first_row = head * S.P + (item % tiles) * S.BP
        inside = p < S.P
        state, scale, head_scale = state_of(table, layer, 0, 10, slot, TYPES.state, TYPES)
        s = load_state(state, scale, head_scale, head, first_row, inside, columns, TYPES.state, S)
        key = tensor_of(table, layer, 1, slot, ACT, TYPES) + group * S.W * S.K
        value = tensor_of(table, layer, 2, slot, ACT, TYPES) + head * S.W * S.P
        weight = tensor_of(table, layer, 3, slot, tl.float32, TYPES) + head * S.W
        if TYPES.decay:
            decay = tensor_of(table, layer, 4, slot, tl.float32, TYPES) + head * S.W
        else:
            decay = None
        if TYPES.channels:
            channels = tensor_of(table, layer, 5, slot, tl.float32, TYPES) + head * S.W * S.K
        else:
            channels = None
        if TYPES.key_scale:
            key_scale = tensor_of(table, layer, 6, slot, tl.float32, TYPES) + group * S.W
        else:
            key_scale = None
        for first in tl.range(0, length, S.BE, num_stages=S.stages):
            s = advance(s, key, value, weight, decay, channels, key_scale, first, length, p, columns, S)
        # Keys that are not finite make NaN of columns that do not exist.
        s = tl.where(inside[:, None] & (columns < S.K)[None, :], s, 0.0)
        bits = None
        if TYPES.stochastic:
            bits = random_bits(seed, layer, counter, (head * S.P + p)[:, None] * S.K + columns[None, :])
        state, scale, head_scale = state_of(table, layer, 8, 10, target, TYPES.target, TYPES)
        new = store_state(state, scale, head_scale, s, bits, head, first_row, inside, columns, TYPES.target, S)
        if TYPES.copy is not None:
            state, scale, head_scale = state_of(table, layer, 9, 12, target, TYPES.copy, TYPES)
            store_state(state, scale, head_scale, new, None, head, first_row, inside, columns, TYPES.copy, S)
