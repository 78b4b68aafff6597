"""The fold: checkpoints advanced by their buffer entries, for all layers' rows of a work list in one launch.

Everything is recomputed from the raw inputs and the checkpoint, with the state in registers, so the window may have any
size. ``materialise`` is the same kernel with another destination.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.formats import element, fold_columns, load_state, scale_element, store_state
from replayssm.backends.triton.gates import load_or
from replayssm.backends.triton.tile import cut, product_of_terms, turned


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
def add_block(parts, key, value, weight, decay, key_scale, first, length, p, columns, S: tl.constexpr):
    """Advance a state, C parts [BP, BK], by the entries first … first + BE − 1 where none reads it: one product.

    Parts of eight columns (``launch.fold_shape``) are loaded by the threads that a product leaves its sums in. What is
    added is summed up by itself: tensor cores cut off where they add, which a state would remember.
    """
    e = first + tl.arange(0, S.BE)
    last = tl.minimum(first + S.BE, length)
    live = e < last
    v = tl.load(value + e[:, None] * S.P + p[None, :], mask=live[:, None] & (p < S.P)[None, :], other=0.0)
    factor = tl.load(weight + e, mask=live, other=0.0) * load_or(key_scale, e, live, 1.0)
    g = load_or(decay, e, live, 0.0)
    later = load_or(decay, e + 1, e + 1 < last, 0.0)
    u = v.to(tl.float32) * (factor * tl.exp(tl.cumsum(later, 0, reverse=True)))[:, None]
    fall = tl.exp(tl.sum(g, 0))
    C: tl.constexpr = S.C
    written = turned(cut(u, S))
    after = ()
    for part in tl.static_range(C):
        inside = live[:, None] & (columns[part] < S.K)[None, :]
        k = tl.load(key + e[:, None] * S.K + columns[part][None, :], mask=inside, other=0.0)
        after = after + (parts[part] * fall + product_of_terms(written, cut(k, S), S),)
    return after


@triton.jit
def walk(parts, key, value, weight, decay, channels, key_scale, e, p, columns, S: tl.constexpr):
    """Advance a state, C parts [BP, BK], by entry e: the recurrence as it is written, in float32.

    Two multiply-adds an element beside its decay. Blocks of entries on tensor cores need a triangular solve and three
    bfloat16 terms of every element, and took as long at 32 entries, four times as long where a decay is per channel.
    """
    C: tl.constexpr = S.C
    v = tl.load(value + e * S.P + p, mask=p < S.P, other=0.0).to(tl.float32)
    weight_now = tl.load(weight + e)
    fall = 1.0 if decay is None else tl.exp(tl.load(decay + e))
    scale = 1.0 if key_scale is None else tl.load(key_scale + e)
    seen = tl.full([S.BP, S.BK], 0.0, tl.float32)
    decayed, keys = (), ()
    for part in tl.static_range(C):
        wide = columns[part] < S.K
        k = tl.load(key + e * S.K + columns[part], mask=wide, other=0.0).to(tl.float32)[None, :]
        s = parts[part] * fall
        if channels is not None:
            s *= tl.exp(tl.load(channels + e * S.K + columns[part], mask=wide, other=0.0))[None, :]
        seen += s * k
        decayed = decayed + (s,)
        keys = keys + (k,)
    if S.update == "delta":
        v -= tl.sum(seen, 1) * scale
    u = (weight_now * scale * v)[:, None]
    after = ()
    for part in tl.static_range(C):
        after = after + (decayed[part] + u * keys[part],)
    return after


@triton.jit(do_not_specialize=["copies", "layers", "seed"])
def fold_kernel(
    table,
    work,
    amount,
    copies,
    layers,
    seed,
    S: tl.constexpr,
    COPIED: tl.constexpr,
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
        STATE: tl.constexpr = TYPES.state
        TARGET: tl.constexpr = TYPES.target
        COPY: tl.constexpr = TYPES.copy
        ACT: tl.constexpr = TYPES.act
        C: tl.constexpr = S.C
        columns = ()
        for part in tl.static_range(C):
            columns = columns + (fold_columns(part, S),)
        rows = head * S.P + p
        inside = p < S.P
        state, scale, head_scale = state_of(table, layer, 0, 10, slot, STATE, TYPES)
        parts = load_state(state, scale, head_scale, head, rows, inside, STATE, S)
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
        if S.update == "add" and not TYPES.channels:
            for first in tl.range(0, length, S.BE, num_stages=1):
                parts = add_block(parts, key, value, weight, decay, key_scale, first, length, p, columns, S)
        else:
            for e in tl.range(0, length, num_stages=1):
                parts = walk(parts, key, value, weight, decay, channels, key_scale, e, p, columns, S)
        new = ()
        for part in tl.static_range(C):
            if S.P % S.BP == 0 and S.K == C * S.BK:
                new = new + (parts[part],)
            else:
                # Keys that are not finite make NaN of columns that do not exist.
                new = new + (tl.where(inside[:, None] & (columns[part] < S.K)[None, :], parts[part], 0.0),)
        random = (seed, layer, counter) if TYPES.stochastic else None
        state, scale, head_scale = state_of(table, layer, 8, 10, target, TARGET, TYPES)
        store_state(state, scale, head_scale, new, random, head, rows, inside, TARGET, S)
        if COPY is not None:
            # Read back, in tiles of another shape: see ``launch.copy_shape``.
            tl.debug_barrier()
            held = load_state(state, scale, head_scale, head, rows, inside, TARGET, COPIED)
            state, scale, head_scale = state_of(table, layer, 9, 12, target, COPY, TYPES)
            store_state(state, scale, head_scale, held, None, head, rows, inside, COPY, COPIED)
