"""The step: outputs of a row's new tokens from the checkpoint and the buffer, and their entries (docs: mathematics).

Queries and keys of a row's tokens are the rows of one matrix x [J, K], J = 2·BT: queries first, keys behind. All of
them read the state and the entries, M = J, where written values depend on what is there; else the queries do, M = BT.
``decode`` is the same for one token. Letters as in ``backends.torch``.

Tiles of the state are factors on the left, in C pieces of BK columns, so that they go from memory to tensor cores
through registers alone (``tile.state_terms``); outputs and written values [BP, M] have a token a column.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.formats import as_loaded, planes, read_state, row_scales, store_written
from replayssm.backends.triton.gates import gate_inputs, head_gates, load_or, unit_scales
from replayssm.backends.triton.probes import blocks_of, probes_of_group, probes_of_head
from replayssm.backends.triton.tile import (
    accumulate,
    ancestors,
    beside,
    between,
    column_of,
    cut,
    no_sums,
    product_of_terms,
    row_of,
    sides,
    sixteen,
    state_terms,
    turned,
)

# What is wrong with a row, as ``launch`` words it.
BAD_SLOT = tl.constexpr(1)
BAD_OFFSETS = tl.constexpr(2)
BAD_COUNT = tl.constexpr(3)
BAD_PENDING = tl.constexpr(4)
BAD_LENGTH = tl.constexpr(5)
BAD_PARENT = tl.constexpr(6)


@triton.jit
def report(error, code, row, value):
    """Keep the first error until the host reads it: code, row, value."""
    if tl.atomic_cas(error, 0, code) == 0:
        tl.store(error + 1, row)
        tl.store(error + 2, value)


@triton.jit
def admit(batch, row, slots, tokens, W: tl.constexpr, T: tl.constexpr):
    """A row's slot, first token, number of tokens, committed entries, and what is wrong with it (0: nothing)."""
    slot = tl.load(batch.slots + row)
    start = tl.load(batch.offsets + row)
    end = tl.load(batch.offsets + row + 1)
    count = end - start
    inside = (slot >= 0) & (slot < slots)
    length = tl.load(batch.length + slot, mask=inside, other=0)
    pending = tl.load(batch.drafts + slot, mask=inside, other=0)
    code = tl.where(inside & ((length < 0) | (length + count > W)), BAD_LENGTH, 0)
    # Another layer's programs of this very step may have noted `count` already; they and we agree.
    code = tl.where(inside & (pending != 0) & (pending != count), BAD_PENDING, code)
    code = tl.where(count > T, BAD_COUNT, code)
    code = tl.where((count < 0) | (start < 0) | (end > tokens), BAD_OFFSETS, code)
    code = tl.where((slot < -1) | (slot >= slots), BAD_SLOT, code)
    return slot, start, count, length, code


@triton.jit
def clear(out, first, last, head, p, S: tl.constexpr):
    """Zero the outputs of tokens that nobody computes."""
    for token in range(first, last):
        at = out + (((p * 0).to(tl.int64) + token) * S.H + head) * S.P + p
        tl.store(at, (p * 0.0).to(out.dtype.element_ty), mask=p < S.P)


@triton.jit
def entries_of(layer, strides, where, head, e, known, S: tl.constexpr):
    """What is stored of a head's entries beside vectors, loaded: decays of those after e [BE] and of the first, and
    what goes on the values or the written values [BE].
    """
    later, first = e * 0.0, 0.0
    if layer.decay is not None:
        decay = layer.decay + where * strides.decay + head * S.W
        later = tl.load(decay + e + 1, mask=e + 1 < known, other=0.0)
        first = tl.load(decay, mask=known > 0, other=0.0)
    if layer.written is None:
        weight = tl.load(layer.weight + where * strides.weight + head * S.W + e, mask=e < known, other=0.0)
    else:
        scales = None
        if layer.written_scale is not None:
            scales = layer.written_scale + where * strides.written_scale + head * S.W
        weight = load_or(scales, e, e < known, 1.0)
    return later, first, weight


@triton.jit
def reach_of(stored, e, known):
    """What entries' values are multiplied by [BE], and the exponent from the checkpoint to now, from ``entries_of``.

    An exponent is a sum over its own segment, from the end.
    """
    since = tl.cumsum(stored[0], 0, reverse=True)
    return tl.where(e < known, tl.exp(since) * stored[2], 0.0), tl.sum(stored[0], 0) + stored[1]


@triton.jit
def values_of(pointer, p, known, S: tl.constexpr):
    """Values, or written values, of the entries that are there: blocks [16, BP], loaded."""
    e = tl.arange(0, 16)
    blocks = ()
    for n in tl.static_range((S.W + 15) // 16):
        at = pointer + (n * 16 + e)[:, None] * S.P + p[None, :]
        there = (n * 16 + e < known)[:, None] & (p < S.P)[None, :]
        blocks = blocks + (tl.load(at, mask=there, other=0.0),)
    return blocks


@triton.jit
def used_values(layer, strides, where, head, S: tl.constexpr):
    """Pointer to what outputs get of a head's entries: written values where there are any, else values."""
    if layer.written is None:
        return layer.value + where * strides.value + head * S.W * S.P
    else:
        return layer.written + where * strides.written + head * S.W * S.P


@triton.jit
def add_entries(sums, values, reach, known, S: tl.constexpr):
    """The sums of a product [BP, M] and what the entries add to it, blocks that nobody is in left out."""
    large, middle, small = sums
    for n in tl.static_range((S.W + 15) // 16):
        if n * 16 < known:
            large, middle, small = accumulate(
                (large, middle, small), turned(cut(as_loaded(values[n], S), S)), reach[n], S
            )
    return large, middle, small


@triton.jit
def readers_columns(x, APART: tl.constexpr):
    """Columns of queries and columns of keys of x [BP, M]; all of them twice where they are not apart."""
    if APART:
        return sides(x)
    else:
        return x, x


@triton.jit
def responses(now, beta, j, is_k, S: tl.constexpr):
    """What outputs and written values get of what the tokens bring: Z [M, J], of a written value beside its own.

    What token j brings is w_j, its β (v − what the state before all of them holds for its key), or its v where nothing
    is taken from that. ``now`` are the scores of x_i and k_j. A written value is u_i = w_i − β_i Σ_j<i now_ij u_j, an
    output takes Σ_j≤i now_ij u_j more. The rows of Z are found one token after another, by substitution.
    """
    if S.update == "delta":
        T: tl.constexpr = S.T
        takes = tl.where(is_k[:, None], tl.where(j[:, None] == j[None, :], 0.0, -beta[:, None] * now), now)
        own = tl.where(is_k[:, None] & (j[:, None] == j[None, :]), 1.0, 0.0)
        found = own
        for t in tl.static_range(T):
            found += column_of(takes, S.BT + t) * row_of(found, S.BT + t)
        return found - own
    else:
        return now * beta[None, :]


@triton.jit(do_not_specialize=["rows", "tokens", "bound", "slots", "each"])
def step_kernel(
    layer,
    strides,
    inputs,
    token_strides,
    batch,
    out,
    rows,
    tokens,
    bound,
    slots,
    low,
    high,
    each,
    S: tl.constexpr,
):
    """Grid: rows × sets of heads with one key and one decay of it × chunks of ``each`` of the set's tiles.

    What a set shares (x, its scores among itself and with the entries' keys) is computed once, what a head needs once
    for its tiles. ``each`` is no compile-time number: a result must not depend on it. ``tokens`` N and ``bound``, how
    many of them have all that they need (parents may be fewer).
    """
    W: tl.constexpr = S.W
    T: tl.constexpr = S.T
    K: tl.constexpr = S.K
    C: tl.constexpr = S.C
    J: tl.constexpr = 2 * S.BT
    KEYS_READ: tl.constexpr = S.update == "delta" or layer.channels is not None
    M: tl.constexpr = J if KEYS_READ else S.BT
    PLANES: tl.constexpr = planes(S.read)
    ACT: tl.constexpr = inputs.q.dtype.element_ty
    PROBE: tl.constexpr = ACT if layer.channels is None else tl.float32
    blocks: tl.constexpr = (S.P + S.BP - 1) // S.BP
    chunks = (S.share * blocks + each - 1) // each
    pid = tl.program_id(0)
    row = pid // (chunks * (S.H // S.share))
    shared = (pid // chunks) % (S.H // S.share) * S.share
    chunk = pid % chunks
    group = shared // (S.H // S.G)

    slot, start, count, length, code = admit(batch, row, slots, bound, W, T)
    j = tl.arange(0, J)
    t = j % S.BT
    is_k = j >= S.BT
    line, fault = ancestors(batch.parents, start, tl.where(code == 0, count, 0), t, t, S)
    code = tl.where((fault != 0) & (slot >= 0), BAD_PARENT, code)
    live = (slot >= 0) & (slot < slots) & (code == 0)
    where = slot.to(tl.int64)
    known = tl.where(live, length, 0)
    valid = (t < count) & live
    token = start.to(tl.int64) + t
    place = length + t
    # Of what reads: its token, whether it is a query, and on whose path it is.
    asks = tl.arange(0, M)
    asks_q = asks < S.BT
    asks_valid = (asks % S.BT < count) & live
    asks_token = start.to(tl.int64) + asks % S.BT
    path = line
    if not KEYS_READ:
        path, _ = ancestors(batch.parents, start, tl.where(live, count, 0), asks, t, S)
    # Keys as columns of what they see and bring: without the queries' where either has a product's eight for itself.
    # Sixteen each would move between threads: 3,250 instructions a tile (GDN) were 3,660.
    APART: tl.constexpr = KEYS_READ and S.BT == 8
    own = S.BT + tl.arange(0, S.BT) if APART else j
    own_valid = (own >= S.BT) & (own % S.BT < count) & live
    own_token = start.to(tl.int64) + own % S.BT
    own_place = length + own % S.BT
    result_valid = own_valid if APART else asks_valid & asks_q
    result_token = own_token if APART else asks_token
    e = tl.arange(0, S.BE)
    key = layer.key + where * strides.key + group * W * K
    channels = None if layer.channels is None else layer.channels + where * strides.channels + shared * W * K
    key_scale = None if layer.key_scale is None else layer.key_scale + where * strides.key_scale + group * W
    first_of_group = valid & is_k & (chunk == 0) & (shared % (S.H // S.G) == 0)

    readers = asks_token, (asks_valid & asks_q)[:, None], token, (valid & is_k)[:, None], is_k
    to = key + place[:, None] * K, first_of_group[:, None]
    if channels is None:
        group_reads = probes_of_group(inputs, token_strides, group, key, to, readers, known, KEYS_READ, S)
    else:
        writes_key = (chunk == 0) & (shared % (S.H // S.G) == 0)
        group_reads = probes_of_head(
            inputs,
            token_strides,
            shared,
            group,
            key,
            channels,
            (start, tl.where(live, count, 0), known),
            writes_key,
            line,
            is_k,
            low,
            high,
            S,
        )
    probes, back, scores, old_scores, asks_squares, squares = group_reads
    # Scales and a head's decay go on afterwards, to a few numbers instead of to the state.
    q_scale, k_scale = unit_scales(asks_squares, squares, S)
    scale = tl.where(is_k, k_scale, q_scale) if KEYS_READ else q_scale
    scores = tl.where(path & is_k[None, :], scores * scale[:, None] * k_scale[None, :], 0.0)
    old_scales = blocks_of(load_or(key_scale, e, e < known, 1.0)[:, None])
    if key_scale is not None:
        tl.store(key_scale + place, k_scale, mask=first_of_group)

    begin = chunk * each
    end = tl.minimum(begin + each, S.share * blocks)
    # Of a row that is not there no tile is read.
    stop = tl.where(live, end, begin)
    first_head = shared + begin // blocks
    last_head = shared + tl.maximum(stop - 1, begin) // blocks
    # The next head's numbers come while this one's tiles go by, and so do the next tile's values of 16 bits; those of
    # float32 go through the tiles' stage.
    stored = entries_of(layer, strides, where, first_head, e, known, S)
    raw = gate_inputs(inputs, token_strides, token, valid, first_head)
    AHEAD: tl.constexpr = used_values(layer, strides, where, first_head, S).dtype.element_ty != tl.float32
    within = tl.arange(0, S.BP)
    next_u = ()
    if AHEAD:
        pointer = used_values(layer, strides, where, first_head, S)
        next_u = values_of(pointer, begin % blocks * S.BP + within, known, S)
    # What a head's tiles share.
    reach = ()
    for _ in tl.static_range((S.W + 15) // 16):
        reach = reach + (cut(tl.full([16, M], 0.0, tl.float32), S),)
    response = turned(cut(sixteen(tl.full([M, J], 0.0, tl.float32)), S))
    distant = asks * 0.0
    own_beta = own * 0.0
    for item in tl.range(begin, stop, num_stages=S.stages):
        head, block = shared + item // blocks, item % blocks
        if (item == begin) | (block == 0):
            g, beta = head_gates(inputs, raw, valid, low, high, S)
            weight_of_entry, total = reach_of(stored, e, known)
            stored = entries_of(layer, strides, where, tl.minimum(head + 1, last_head), e, known, S)
            raw = gate_inputs(inputs, token_strides, token, valid, tl.minimum(head + 1, last_head))
            beta = tl.where(is_k, beta, 0.0)
            along = tl.sum(tl.where(path & is_k[None, :], g[None, :], 0.0), 1)
            weights = blocks_of(weight_of_entry[:, None])
            reach = ()
            for n in tl.static_range((S.W + 15) // 16):
                on_entries = old_scores[n] * (tl.exp(along) * scale)[None, :] * (weights[n] * old_scales[n])
                reach = reach + (cut(on_entries, S),)
            now = scores if layer.decay is None else scores * tl.exp(between(g, path, line, is_k, S))
            response = turned(cut(sixteen(responses(now, beta, j, is_k, S)), S))
            distant = tl.exp(total + along) * (scale * back)
            own_beta = tl.gather(beta, own, 0) if APART else beta
            tl.store(layer.weight + where * strides.weight + head * W + place, beta, mask=valid & is_k)
            if layer.decay is not None:
                tl.store(layer.decay + where * strides.decay + head * W + place, g, mask=valid & is_k)
        p = block * S.BP + within
        inside = p < S.P
        rows_inside = None if S.P % S.BP == 0 else inside
        value = layer.value + where * strides.value + head * W * S.P
        lower = None if layer.written_low is None else layer.written_low + where * strides.written_low + head * W * S.P
        if AHEAD:
            old_u = next_u
            then = tl.minimum(item + 1, stop - 1)
            pointer = used_values(layer, strides, where, shared + then // blocks, S)
            next_u = values_of(pointer, then % blocks * S.BP + within, known, S)
        else:
            old_u = values_of(used_values(layer, strides, where, head, S), p, known, S)
        at_v = head * S.P + p[:, None]
        brought = own_valid[None, :] & inside[:, None]
        v = tl.load(inputs.v + (own_token * token_strides.v)[None, :] + at_v, mask=brought, other=0.0)
        sums = no_sums(S.BP, M)
        for part in tl.static_range(C // PLANES):
            found = read_state(layer, strides, where, head * S.P + p, rows_inside, part, S.BK, S)
            for plane in tl.static_range(PLANES):
                terms = state_terms(found[plane], ACT, PROBE, S)
                sums = accumulate(sums, terms, probes[part + plane * (C // PLANES)], S)
        by_row = row_scales(layer, strides, where, head, head * S.P + p, rows_inside, S)
        seen = (sums[0] + (sums[1] + sums[2])) * (distant[None, :] * by_row[:, None])
        sums = add_entries((seen, no_sums(S.BP, M)[0], no_sums(S.BP, M)[0]), old_u, reach, known, S)
        if lower is not None:
            sums = add_entries(sums, values_of(lower, p, known, S), reach, known, S)
        seen, held = readers_columns(sums[0] + (sums[1] + sums[2]), APART)
        brings = v
        if S.update == "delta":
            brings = own_beta[None, :] * (v.to(tl.float32) - held)
        every = beside(tl.zeros_like(brings), brings) if APART else brings
        found, more = readers_columns(product_of_terms(cut(sixteen(every), S), response, S), APART)
        result = (seen + found).to(out.dtype.element_ty)
        mask = result_valid[None, :] & inside[:, None]
        tl.store(out + (result_token * S.H * S.P)[None, :] + at_v, result, mask=mask)
        tl.store(value + own_place[None, :] * S.P + p[:, None], v, mask=brought)
        if layer.written is not None:
            written = layer.written + where * strides.written + head * W * S.P
            scales = None
            if layer.written_scale is not None:
                scales = layer.written_scale + where * strides.written_scale + head * W
            values = tl.trans(brings + more)
            store_written(written, lower, scales, own_place[:, None], p[None, :], values, tl.trans(brought), S)

    if live & (shared == 0) & (chunk == 0):
        tl.store(batch.drafts + slot, count)
    # Outputs that nobody computes are zero.
    if (live == 0) | (row == rows - 1):
        for item in range(begin, end):
            head = shared + item // blocks
            p = item % blocks * S.BP + tl.arange(0, S.BP)
            if row == rows - 1:
                clear(out, tl.maximum(start + count, 0), tokens, head, p, S)
            if live == 0:
                clear(out, tl.maximum(start, 0), tl.minimum(start + count, tokens), head, p, S)
        if (code != 0) & (shared == 0) & (chunk == 0):
            report(batch.error, code, row, tl.where(code == BAD_SLOT, slot, count))
