"""The step: outputs of a row's new tokens from the checkpoint and the buffer, and their entries (docs: mathematics).

Queries and keys of a row's tokens are the rows of one matrix x [M, K], M = 2·BT: queries first, keys behind. So the
state, the entries and the tokens among themselves are read with one product each. ``decode`` is the same for one token.
Letters as in ``backends.torch``.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.formats import (
    joined,
    operand,
    planes,
    read_state,
    row_scales,
    store_written,
    whole_columns,
)
from replayssm.backends.triton.gates import channel_gates, head_gates, load_or, unit_scales
from replayssm.backends.triton.tile import ancestors, between, exact, pairs_by_channel, product, write

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
def decay_of_entries(decay, e, length):
    """Exponents of a head's scalar decay: entry -> now [BE], checkpoint -> now.

    Each is a sum over its own segment: the entries after e are loaded one place further and summed from the end.
    """
    if decay is None:
        return e * 0.0, 0.0
    else:
        later = tl.load(decay + e + 1, mask=e + 1 < length, other=0.0)
        first = tl.load(decay, mask=length > 0, other=0.0)
        return tl.cumsum(later, 0, reverse=True), tl.sum(later, 0) + first


@triton.jit
def pairs_of_tree(x, g, line, mine, S: tl.constexpr):
    """Σ_c x_i[c] k_j[c] exp(Σ g_m[c] over the path from j to i) in a tree: [M, M], every token's path anew."""
    T: tl.constexpr = S.T
    rank = tl.arange(0, 2 * S.BT)
    once = tl.where(mine[:, None], g, 0.0)
    by_key = tl.full([2 * S.BT, 2 * S.BT], 0.0, tl.float32)
    for i in range(T):
        path = tl.sum(tl.where((rank == i)[:, None], line.to(tl.int32), 0), 0)
        apart = exact((path[None, :] > line.to(tl.int32)) & mine[None, :], S)
        decayed = x * tl.exp(product(apart, once, S))
        q = tl.sum(tl.where((rank == i)[:, None], x, 0.0), 0)
        k = tl.sum(tl.where((rank == S.BT + i)[:, None], x, 0.0), 0)
        by_key = tl.where((rank == i)[None, :], tl.sum(decayed * q[None, :], 1)[:, None], by_key)
        by_key = tl.where((rank == S.BT + i)[None, :], tl.sum(decayed * k[None, :], 1)[:, None], by_key)
    return tl.trans(by_key)


@triton.jit
def channel_decay(
    past, inputs, strides, keys, x, e, length, token, valid, head, columns, place, t, line, mine, low, high,
    S: tl.constexpr,
):  # fmt: skip
    """With a decay per channel: keys decayed to now, x as probes of the checkpoint and of the entries, scores among x.

    The new tokens' decays are appended too.
    """
    if past is None:
        return keys, x, x, product(x, tl.trans(x), S)
    else:
        wide = (columns < S.K)[None, :]
        later = tl.load(
            past + S.K + e[:, None] * S.K + columns[None, :], mask=(e + 1 < length)[:, None] & wide, other=0.0
        )
        first = tl.load(past + columns, mask=(columns < S.K) & (length > 0), other=0.0)
        total = (tl.sum(later, 0) + first)[None, :]
        inside = valid[:, None] & wide
        g = channel_gates(inputs, strides, token[:, None], inside, head, columns[None, :], low, high, S)
        tl.store(past + place[:, None] * S.K + columns[None, :], g, mask=inside & mine[:, None])
        x = x.to(tl.float32)
        decayed = keys.to(tl.float32) * tl.exp(tl.cumsum(later, 0, reverse=True))
        along = product(exact(line & mine[None, :], S), g, S)
        if S.tree:
            scores = pairs_of_tree(x, g, line, mine, S)
        else:
            T: tl.constexpr = S.T
            own = tl.where(t[:, None] == t[None, :], product(x, tl.trans(x), S), 0.0)
            scores = own + pairs_by_channel(x, g, t, mine, T, S)
        return decayed, x * tl.exp(along + total), x * tl.exp(along), scores


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
    """Grid: rows × sets of heads with one key and one decay of it × chunks of ``each`` tiles of head_dim.

    What a set shares (x, its scores among itself and with the entries' keys) is computed once; then its tiles go by,
    the next one's state on its way while this one is read. ``each`` is no compile-time number: a result must not depend
    on it. ``tokens`` N and ``bound``, how many of them have all that they need (parents may be fewer).
    """
    W: tl.constexpr = S.W
    T: tl.constexpr = S.T
    M: tl.constexpr = 2 * S.BT
    tiles: tl.constexpr = (S.P + S.BP - 1) // S.BP
    chunks = (S.share * tiles + each - 1) // each
    pid = tl.program_id(0)
    row = pid // (chunks * (S.H // S.share))
    shared = (pid // chunks) % (S.H // S.share) * S.share
    chunk = pid % chunks
    group = shared // (S.H // S.G)
    READ: tl.constexpr = S.read
    WIDTH: tl.constexpr = S.BK // planes(READ)
    columns = whole_columns(READ, S)
    wide = (columns < S.K)[None, :]

    slot, start, count, length, code = admit(batch, row, slots, bound, W, T)
    i = tl.arange(0, M)
    t = i % S.BT
    is_k = i >= S.BT
    line, fault = ancestors(batch.parents, start, tl.where(code == 0, count, 0), t, S)
    code = tl.where((fault != 0) & (slot >= 0), BAD_PARENT, code)
    live = (slot >= 0) & (slot < slots) & (code == 0)
    where = slot.to(tl.int64)
    known = tl.where(live, length, 0)
    valid = (t < count) & live
    token = start.to(tl.int64) + t
    place = length + t
    at = group * S.K + columns[None, :]
    q = tl.load(inputs.q + (token * token_strides.q)[:, None] + at, mask=(valid & ~is_k)[:, None] & wide, other=0.0)
    k = tl.load(inputs.k + (token * token_strides.k)[:, None] + at, mask=(valid & is_k)[:, None] & wide, other=0.0)
    e = tl.arange(0, S.BE)
    old = e < known
    key = layer.key + where * strides.key + group * S.W * S.K
    channels = None if layer.channels is None else layer.channels + where * strides.channels + shared * S.W * S.K
    key_scale = None if layer.key_scale is None else layer.key_scale + where * strides.key_scale + group * S.W
    keys = tl.load(key + e[:, None] * S.K + columns[None, :], mask=old[:, None] & wide, other=0.0)
    old_scale = load_or(key_scale, e, old, 1.0)
    x = tl.where(is_k[:, None], k, q)
    squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    q_scale, k_scale = unit_scales(squares, squares, S)
    scale = tl.where(is_k, k_scale, q_scale)
    keys, far, near, scores = channel_decay(
        channels, inputs, token_strides, keys, x, e, known, token, valid, shared, columns, place, t, line, is_k, low,
        high, S,
    )  # fmt: skip
    # Scales and a head's decay go on afterwards, to a few numbers instead of to the state.
    scores = tl.where(line & is_k[None, :], scores * scale[:, None] * scale[None, :], 0.0)
    old_scores = product(near, tl.trans(keys), S) * scale[:, None] * old_scale[None, :]
    first_of_group = valid & is_k & (chunk == 0) & (shared % (S.H // S.G) == 0)
    tl.store(key + place[:, None] * S.K + columns[None, :], k, mask=first_of_group[:, None] & wide)
    if key_scale is not None:
        tl.store(key_scale + place, k_scale, mask=first_of_group)

    # The gates of all the set's heads at once: in the loop they would be waited for.
    heads = shared + tl.arange(0, S.lanes)[None, :]
    there = valid[:, None] & (heads < shared + S.share)
    gates_g, gates_beta = head_gates(inputs, token_strides, token[:, None], there, heads, low, high, S)
    for item in tl.range(chunk * each, tl.minimum(chunk * each + each, S.share * tiles), num_stages=S.stages):
        head = shared + item // tiles
        tile = item % tiles
        p = tile * S.BP + tl.arange(0, S.BP)
        inside = p < S.P
        found = read_state(layer, strides, where, head * S.P + p, inside & live, 0, WIDTH, S)
        s = operand(joined(found, READ), S)
        by_row = row_scales(layer, strides, where, head, head * S.P + p, inside & live, S)
        entries = head * S.W
        value = layer.value + where * strides.value + entries * S.P
        weight = layer.weight + where * strides.weight + entries
        decay = None if layer.decay is None else layer.decay + where * strides.decay + entries
        written = None if layer.written is None else layer.written + where * strides.written + entries * S.P
        lower = None if layer.written_low is None else layer.written_low + where * strides.written_low + entries * S.P
        scales = None if layer.written_scale is None else layer.written_scale + where * strides.written_scale + entries
        at_v = head * S.P + p[None, :]
        here = (valid & is_k)[:, None] & inside[None, :]
        v = tl.load(inputs.v + (token * token_strides.v)[:, None] + at_v, mask=here, other=0.0)
        g = tl.sum(tl.where(heads == head, gates_g, 0.0), 1)
        beta = tl.sum(tl.where(heads == head, gates_beta, 0.0), 1)
        since, total = decay_of_entries(decay, e, known)
        along = tl.sum(tl.where(line & is_k[None, :], g[None, :], 0.0), 1)
        reach = tl.exp(since[None, :] + along[:, None]) * old_scores
        here_u = old[:, None] & inside[None, :]
        at_u = e[:, None] * S.P + p[None, :]
        if written is None:
            reach *= tl.load(weight + e, mask=old, other=0.0)[None, :]
            old_u = tl.load(value + at_u, mask=here_u, other=0.0)
        else:
            reach *= load_or(scales, e, old, 1.0)[None, :]
            old_u = tl.load(written + at_u, mask=here_u, other=0.0)
        reach = tl.where(old[None, :], reach, 0.0)
        seen = product(far, tl.trans(s), S) * (tl.exp(total + along) * scale)[:, None] * by_row[None, :]
        seen += product(reach, old_u, S)
        if lower is not None:
            seen += product(reach, tl.load(lower + at_u, mask=here_u, other=0.0), S)
        now = scores if layer.decay is None else scores * tl.exp(between(g, line, is_k, S))
        among = tl.where(is_k[:, None] & (i[:, None] != i[None, :]), now, 0.0)
        u = write(v.to(tl.float32), tl.where(is_k, beta, 0.0), seen, among, T, S)
        result = seen + product(now, u, S)
        mask = (valid & ~is_k)[:, None] & inside[None, :]
        tl.store(out + (token * S.H * S.P)[:, None] + at_v, result.to(out.dtype.element_ty), mask=mask)
        tl.store(value + place[:, None] * S.P + p[None, :], v, mask=here)
        if written is not None:
            store_written(written, lower, scales, place[:, None], p[None, :], u, here, S)
        first_of_head = valid & is_k & (tile == 0)
        tl.store(weight + place, beta, mask=first_of_head)
        if decay is not None:
            tl.store(decay + place, g, mask=first_of_head)

    if live & (shared == 0) & (chunk == 0):
        tl.store(batch.drafts + slot, count)
    # Outputs that nobody computes are zero.
    if (live == 0) | (row == rows - 1):
        for item in range(chunk * each, tl.minimum(chunk * each + each, S.share * tiles)):
            head = shared + item // tiles
            p = item % tiles * S.BP + tl.arange(0, S.BP)
            if row == rows - 1:
                clear(out, tl.maximum(start + count, 0), tokens, head, p, S)
            if live == 0:
                clear(out, tl.maximum(start, 0), tl.minimum(start + count, tokens), head, p, S)
        if (code != 0) & (shared == 0) & (chunk == 0):
            report(batch.error, code, row, tl.where(code == BAD_SLOT, slot, count))
