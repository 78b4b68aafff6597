"""The fold: checkpoints advanced by their buffer entries, for all layers' rows of a work list in one launch.

Everything is recomputed from the raw inputs and the checkpoint, with the state in registers, so the window may have any
size. ``materialise`` is the same kernel with another destination.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.formats import (
    apart,
    element,
    fold_columns,
    head_top,
    larger,
    largest_finite,
    largest_of,
    load_state,
    pair_columns,
    paired,
    planes,
    scale_element,
    scale_of,
    store_blocks,
    store_state,
)
from replayssm.backends.triton.gates import fall, load_or
from replayssm.backends.triton.tile import (
    between,
    column_of,
    cut,
    halves,
    product,
    product_of_terms,
    row_of,
    turned,
)


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
def values_at(value, length, p, S: tl.constexpr):
    """Values of a tile's rows, in blocks [BE, BP] of entries, zero where there is none."""
    e = tl.arange(0, S.BE)
    found = ()
    for n in tl.static_range((S.W + S.BE - 1) // S.BE):
        there = (n * S.BE + e < length)[:, None] & (p < S.P)[None, :]
        found = found + (tl.load(value + (n * S.BE + e)[:, None] * S.P + p[None, :], mask=there, other=0.0),)
    return found


@triton.jit
def additions(weight, decay, key_scale, first, length, S: tl.constexpr):
    """What BE entries' values are multiplied by where none reads the state [BE], and what the state falls to."""
    e = first + tl.arange(0, S.BE)
    last = tl.minimum(first + S.BE, length)
    live = e < last
    factor = tl.load(weight + e, mask=live, other=0.0) * load_or(key_scale, e, live, 1.0)
    g = load_or(decay, e, live, 0.0)
    later = load_or(decay, e + 1, e + 1 < last, 0.0)
    return factor * tl.exp(tl.cumsum(later, 0, reverse=True)), tl.exp(tl.sum(g, 0))


@triton.jit
def fallen(part, left, added):
    """A part of the state times what it falls to, and what is added. Products are joined to sums by hand: which of them
    the compiler joins differs from one destination, or copy, to another, and a checkpoint must not (I6).
    """
    return tl.fma(part, tl.broadcast_to(left, part.shape), added)


@triton.jit
def add_block(parts, v, addition, key, first, length, columns, S: tl.constexpr):
    """Advance a state, C parts [BP, BK], by the BE entries from ``first`` on, values v: one product.

    Parts of eight columns (``launch.fold_shape``) are loaded by the threads that a product leaves its sums in. What is
    added is summed up by itself: tensor cores cut off where they add, which a state would remember.
    """
    e = first + tl.arange(0, S.BE)
    live = e < length
    C: tl.constexpr = S.C
    factor, left = addition
    written = turned(cut(v.to(tl.float32) * factor[:, None], S))
    after = ()
    for two in tl.static_range(C // 2):
        keys = load_two(key, e, live, two, columns, S)
        for half in tl.static_range(2):
            after = after + (fallen(parts[2 * two + half], left, product_of_terms(written, cut(keys[half], S), S)),)
    return after


@triton.jit
def load_two(pointer, e, live, two, columns, S: tl.constexpr):
    """Rows e of keys in the parts 2·two and 2·two + 1 [E, BK], zero outside."""
    if S.BK == 8:
        wide = pair_columns(two, S)
        inside = live[:, None] & (wide < S.K)[None, :]
        return apart(tl.load(pointer + e[:, None] * S.K + wide[None, :], mask=inside, other=0.0))
    else:
        found = ()
        for part in tl.static_range(2 * two, 2 * two + 2):
            at = pointer + e[:, None] * S.K + columns[part][None, :]
            found = found + (tl.load(at, mask=live[:, None] & (columns[part] < S.K)[None, :], other=0.0),)
        return found


@triton.jit
def wide_terms(x, S: tl.constexpr):
    """Terms of x for products with a state: float32 numbers, in halves where they are not exact in tf32."""
    if x.dtype == tl.float32 and S.dot != "interpret":
        return halves(x)
    else:
        return (x.to(tl.float32),)


@triton.jit
def solution(key, weight, decay, key_scale, first, length, S: tl.constexpr):
    """What sixteen entries of a head make of each other under the delta rule, for all tiles of its state.

    Returns ((I + A)⁻¹ − I)ᵀ as terms, A_ij = β_i k_i·k_j e^(Σ g over j < m ≤ i) below the diagonal, by substitution;
    what the state before them is read with (scale and decay of each key), β, what the written values get (scale, decay
    of the entries behind), and what the state falls to.
    """
    i = tl.arange(0, 16)
    e = first + i
    live = e < length
    columns = tl.arange(0, S.KP)[None, :]
    k = tl.load(key + e[:, None] * S.K + columns, mask=live[:, None] & (columns < S.K), other=0.0)
    beta = tl.load(weight + e, mask=live, other=0.0)
    scale = load_or(key_scale, e, live, 1.0)
    g = load_or(decay, e, live, 0.0)
    path = i[None, :] <= i[:, None]
    scores = product(k, tl.trans(k), S) * tl.exp(between(g, path, path, i >= 0, S)) * scale[None, :]
    takes = tl.where(i[None, :] < i[:, None], scores * (beta * scale)[:, None], 0.0)
    unit = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inverse = unit
    for t in tl.static_range(15):
        inverse -= column_of(takes, t) * row_of(inverse, t)
    along = tl.sum(tl.where(path, g[None, :], 0.0), 1)
    later = tl.sum(tl.where(path, 0.0, g[None, :]), 1)
    return turned(cut(inverse - unit, S)), scale * tl.exp(along), beta, scale * tl.exp(later), tl.exp(tl.sum(g, 0))


@triton.jit
def solve_block(parts, solved, key, value, first, length, p, columns, S: tl.constexpr):
    """Advance a state, C parts [BP, 8], by sixteen entries under the delta rule, given their ``solution``.

    Two products with the state's columns, one on either side. Tensor cores cut off where they add, and a state would
    remember it: so sums over a row are added up by sixteen columns, and what stays of a value is not multiplied by one.
    """
    inverse, on_state, beta, on_written, left = solved
    C: tl.constexpr = S.C
    e = first + tl.arange(0, 16)
    live = e < length
    keys = ()
    for two in tl.static_range(C // 2):
        keys = keys + load_two(key, e, live, two, columns, S)
    # Registers do not hold values that come ahead, as those of ``add_block`` do.
    v = tl.load(value + e[:, None] * S.P + p[None, :], mask=live[:, None] & (p < S.P)[None, :], other=0.0)
    seen = tl.full([S.BP, 16], 0.0, tl.float32)
    for two in tl.static_range(C // 2):
        state = wide_terms(paired(parts[2 * two], parts[2 * two + 1]), S)
        seen += product_of_terms(state, turned(wide_terms(paired(keys[2 * two], keys[2 * two + 1]), S)), S)
    brought = beta[None, :] * (tl.trans(v).to(tl.float32) - seen * on_state[None, :])
    values = brought + product_of_terms(cut(brought, S), inverse, S)
    written = cut(values * on_written[None, :], S)
    after = ()
    for part in tl.static_range(C):
        after = after + (fallen(parts[part], left, product_of_terms(written, cut(keys[part], S), S)),)
    return after


@triton.jit
def entry_at(key, value, weight, decay, channels, key_scale, e, p, columns, S: tl.constexpr):
    """Entry e as ``walk`` takes it, loaded: its value [BP], its three numbers, and its C keys and exponents [BK]."""
    C: tl.constexpr = S.C
    v = tl.load(value + e * S.P + p, mask=p < S.P, other=0.0)
    keys, exponents = (), ()
    for part in tl.static_range(C):
        wide = columns[part] < S.K
        keys = keys + (tl.load(key + e * S.K + columns[part], mask=wide, other=0.0),)
        if channels is not None:
            exponents = exponents + (tl.load(channels + e * S.K + columns[part], mask=wide, other=0.0),)
    return v, tl.load(weight + e), load_or(key_scale, e, True, 1.0), load_or(decay, e, True, 0.0), keys, exponents


@triton.jit
def walk(parts, entry, S: tl.constexpr):
    """Advance a state, C parts [BP, BK], by an entry: the recurrence as it is written, in float32.

    Two multiply-adds an element beside its decay. For decays per channel, where blocks of sixteen entries on tensor
    cores took 1.8 times as long (their decayed keys do not fit into registers), and for checkpoints with scales.
    """
    C: tl.constexpr = S.C
    value, weight, scale, exponent, keys, exponents = entry
    v = value.to(tl.float32)
    left = tl.exp(exponent)
    seen = tl.full([S.BP, S.BK], 0.0, tl.float32)
    decayed = ()
    for part in tl.static_range(C):
        s = parts[part] * left
        if len(exponents) > 0:
            s *= fall(exponents[part], S)[None, :]
        seen += s * keys[part].to(tl.float32)[None, :]
        decayed = decayed + (s,)
    if S.update == "delta":
        v -= tl.sum(seen, 1) * scale
    u = tl.broadcast_to((weight * scale * v)[:, None], [S.BP, S.BK])
    after = ()
    for part in tl.static_range(C):
        k = tl.broadcast_to(keys[part].to(tl.float32)[None, :], [S.BP, S.BK])
        after = after + (tl.fma(u, k, decayed[part]),)
    return after


@triton.jit
def rows_at(tile, S: tl.constexpr):
    """Rows of a head that a tile has: in fours, as the compiler sees it, as ``pair_columns`` are."""
    at = tl.arange(0, S.BP)
    return tile * S.BP + (at // 4 * 4 + at % 4)


@triton.jit
def rows_of(head, tile, S: tl.constexpr):
    """Rows of a layer's state that a tile of a head has, and whether they are the head's."""
    p = rows_at(tile, S)
    return head * S.P + p, p < S.P


@triton.jit
def copy_rows(table, layer, target, head, tile, S: tl.constexpr, TYPES: tl.constexpr):
    """Write rows of the read copy, from what the checkpoint holds: read back, in tiles of another shape.

    See ``launch.copy_shape``.
    """
    TARGET: tl.constexpr = TYPES.target
    COPY: tl.constexpr = TYPES.copy
    rows, inside = rows_of(head, tile, S)
    state, scale, head_scale = state_of(table, layer, 8, 10, target, TARGET, TYPES)
    held = load_state(state, scale, head_scale, head, rows, inside, TARGET, S)
    state, scale, head_scale = state_of(table, layer, 9, 12, target, COPY, TYPES)
    store_state(state, scale, head_scale, held, None, head, rows, inside, COPY, S)


@triton.jit
def copy_head(table, layer, target, head, largest, S: tl.constexpr, TYPES: tl.constexpr):
    """Write a head's four-bit copy: its scale comes from all of its rows, and they are read back for it.

    ``largest`` is the head's largest magnitude, NaN or infinite if some number of it is not finite.
    """
    TARGET: tl.constexpr = TYPES.target
    COPY: tl.constexpr = TYPES.copy
    tiles: tl.constexpr = (S.P + S.BP - 1) // S.BP
    state, scale, head_scale = state_of(table, layer, 8, 10, target, TARGET, TYPES)
    if (largest < float("inf")) == 0:
        largest = 0.0
        for tile in tl.range(tiles, num_stages=1):
            rows, inside = rows_of(head, tile, S)
            held = load_state(state, scale, head_scale, head, rows, inside, TARGET, S)
            largest = tl.maximum(largest, largest_finite(held))
    whole = scale_of(largest, head_top(COPY))
    codes, block_scale, whole_scale = state_of(table, layer, 9, 12, target, COPY, TYPES)
    tl.store(whole_scale + head, whole)
    for tile in tl.range(tiles, num_stages=1):
        rows, inside = rows_of(head, tile, S)
        held = load_state(state, scale, head_scale, head, rows, inside, TARGET, S)
        store_blocks(codes, block_scale, whole, held, None, rows, inside, COPY, S)


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

    ``work`` int32 [4, copies]: slot, entries, slot of the target, number of the rounding. Tiles of a head are one
    program's unless it walks: what its entries make of each other, or their decays, is computed once for all of them.
    So they are where a head's copy has a scale of them all.
    """
    tiles: tl.constexpr = (S.P + S.BP - 1) // S.BP
    SOLVES: tl.constexpr = S.update == "delta" and S.BK == 8
    ADDS: tl.constexpr = S.update == "add" and not TYPES.channels
    SIZE: tl.constexpr = 16 if SOLVES else S.BE
    BLOCKS: tl.constexpr = (S.W + SIZE - 1) // SIZE if SOLVES or ADDS else 0
    FOUR: tl.constexpr = planes(TYPES.copy) == 2
    TOGETHER: tl.constexpr = tiles if BLOCKS > 0 or FOUR else 1
    each = layers * S.H * (tiles // TOGETHER)
    for item in range(tl.program_id(0), tl.load(amount) * each, tl.num_programs(0)):
        row = item // each
        layer = (item // (S.H * (tiles // TOGETHER))) % layers
        head = (item // (tiles // TOGETHER)) % S.H
        group = head // (S.H // S.G)
        slot = tl.load(work + row).to(tl.int64)
        length = tl.load(work + copies + row)
        target = tl.load(work + 2 * copies + row).to(tl.int64)
        counter = tl.load(work + 3 * copies + row)
        STATE: tl.constexpr = TYPES.state
        TARGET: tl.constexpr = TYPES.target
        ACT: tl.constexpr = TYPES.act
        C: tl.constexpr = S.C
        columns = ()
        for part in tl.static_range(C):
            columns = columns + (fold_columns(part, S),)
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
        solved = ()
        for n in tl.static_range(BLOCKS):
            if SOLVES:
                solved = solved + (solution(key, weight, decay, key_scale, n * SIZE, length, S),)
            else:
                solved = solved + (additions(weight, decay, key_scale, n * SIZE, length, S),)
        state, scale, head_scale = state_of(table, layer, 0, 10, slot, STATE, TYPES)
        to_state, to_scale, to_head_scale = state_of(table, layer, 8, 10, target, TARGET, TYPES)
        most = tl.full([S.BP, S.BK], 0.0, tl.float32)
        first_tile = item % (tiles // TOGETHER)
        behind = ()
        if ADDS:
            behind = values_at(value, length, rows_at(first_tile, S), S)
        for tile in tl.range(first_tile, first_tile + TOGETHER, num_stages=1):
            p = rows_at(tile, S)
            rows, inside = rows_of(head, tile, S)
            parts = load_state(state, scale, head_scale, head, rows, inside, STATE, S)
            if SOLVES:
                for n in tl.static_range(BLOCKS):
                    if n * SIZE < length:
                        parts = solve_block(parts, solved[n], key, value, n * SIZE, length, p, columns, S)
            elif ADDS:
                # The next tile's values come while this one's products are made.
                values = behind
                behind = values_at(value, length, rows_at(tile + 1, S), S)
                for n in tl.static_range(BLOCKS):
                    if n * SIZE < length:
                        parts = add_block(parts, values[n], solved[n], key, n * SIZE, length, columns, S)
            else:
                entry = entry_at(key, value, weight, decay, channels, key_scale, length * 0, p, columns, S)
                for e in tl.range(0, length, num_stages=1):
                    # The next entry comes while this one's products are made.
                    then = tl.minimum(e + 1, length - 1)
                    next = entry_at(key, value, weight, decay, channels, key_scale, then, p, columns, S)
                    parts = walk(parts, entry, S)
                    entry = next
            new = ()
            for part in tl.static_range(C):
                if S.P % S.BP == 0 and S.K == C * S.BK:
                    new = new + (parts[part],)
                else:
                    # Keys that are not finite make NaN of columns that do not exist.
                    new = new + (tl.where(inside[:, None] & (columns[part] < S.K)[None, :], parts[part], 0.0),)
            random = (seed, layer, counter) if TYPES.stochastic else None
            held = store_state(to_state, to_scale, to_head_scale, new, random, head, rows, inside, TARGET, S)
            if FOUR:
                for part in tl.static_range(C):
                    most = larger(most, tl.abs(held[part]))
            elif TYPES.copy is not None:
                tl.debug_barrier()
                copy_rows(table, layer, target, head, tile, COPIED, TYPES)
        if FOUR:
            tl.debug_barrier()
            copy_head(table, layer, target, head, tl.reduce(largest_of(most), 0, larger), COPIED, TYPES)
