"""What the tokens of a step read with: their queries and keys as probes of the state, and their scores.

All that depends on keys and their decay alone, once for the heads that share them. Scores are raw here: scales of keys
and a head's decay go on later, to a few numbers instead of to vectors. Letters as in ``step``.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.formats import columns_of
from replayssm.backends.triton.gates import channel_gates, fall
from replayssm.backends.triton.tile import (
    cut,
    pairs_by_channel,
    product,
    product_of_terms,
    stacked,
    state_terms,
    sums_of,
    turned,
)


@triton.jit
def blocks_of(x):
    """[R, BE] as BE/16 arrays [R, 16]: entries are taken sixteen at once, as many as there are."""
    R: tl.constexpr = x.shape[0]
    COUNT: tl.constexpr = x.shape[1] // 16
    apart = tl.reshape(x, [R, COUNT, 16])
    blocks = ()
    for n in tl.static_range(COUNT):
        blocks = blocks + (tl.sum(tl.where(tl.arange(0, COUNT)[None, :, None] == n, apart, 0.0), 1),)
    return blocks


@triton.jit
def queries_and_keys(inputs, strides, at, wide, readers, KEYS_READ: tl.constexpr):
    """Columns of what reads [M, N] and of the keys [J, N], which are one where keys read as well."""
    asks_token, of_q, token, of_k, is_k = readers
    q = tl.load(inputs.q + (asks_token * strides.q)[:, None] + at, mask=of_q & wide, other=0.0)
    k = tl.load(inputs.k + (token * strides.k)[:, None] + at, mask=of_k & wide, other=0.0)
    if KEYS_READ:
        q = tl.where(is_k[:, None], k, q)
        return q, q
    else:
        return q, k


@triton.jit
def probes_of_group(inputs, strides, group, key, to, readers, known, KEYS_READ: tl.constexpr, S: tl.constexpr):
    """Where a head has one decay: a tuple of

    the C pieces of x as terms of a product with the state, scores with the tokens' keys [M, J], with the entries' keys
    (blocks [M, 16]), squared lengths of what reads [M] and of the keys [J]. The keys are appended (``to``).
    """
    M: tl.constexpr = readers[0].shape[0]
    J: tl.constexpr = readers[2].shape[0]
    ACT: tl.constexpr = inputs.q.dtype.element_ty
    C: tl.constexpr = S.C
    e = tl.arange(0, S.BE)
    # All pieces are on their way before one is used.
    every_q, every_k, every_old = (), (), ()
    for piece in tl.static_range(C):
        columns = columns_of(piece, S)[None, :]
        wide = columns < S.K
        q, k = queries_and_keys(inputs, strides, group * S.K + columns, wide, readers, KEYS_READ)
        tl.store(to[0] + columns, k, mask=to[1] & wide)
        old = tl.load(key + e[:, None] * S.K + columns, mask=(e < known)[:, None] & wide, other=0.0)
        every_q, every_k, every_old = every_q + (q,), every_k + (k,), every_old + (old,)
    squares_q, squares_k = tl.full([M], 0.0, tl.float32), tl.full([J], 0.0, tl.float32)
    scores = tl.full([M, J], 0.0, tl.float32)
    old_scores = tl.full([M, S.BE], 0.0, tl.float32)
    probes = ()
    for piece in tl.static_range(C):
        q, k = every_q[piece], every_k[piece]
        squares_q += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
        squares_k += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
        scores += product(q, tl.trans(k), S)
        old_scores += product(q, tl.trans(every_old[piece]), S)
        probes = probes + (turned(state_terms(q, ACT, ACT, S)),)
    return probes, scores, blocks_of(old_scores), squares_q, squares_k


@triton.jit
def pairs_of_tree(x, g, line, mine, S: tl.constexpr):
    """Σ_c x_i[c] k_j[c] exp(Σ g_m[c] over the path from j to i) in a tree: [M, M], every token's path anew."""
    T: tl.constexpr = S.T
    rank = tl.arange(0, 2 * S.BT)
    once = tl.where(mine[:, None], g, 0.0)
    by_key = tl.full([2 * S.BT, 2 * S.BT], 0.0, tl.float32)
    for i in range(T):
        path = tl.sum(tl.where((rank == i)[:, None], line.to(tl.int32), 0), 0)
        decayed = x * tl.exp(sums_of((path[None, :] > line.to(tl.int32)) & mine[None, :], once, S))
        q = tl.sum(tl.where((rank == i)[:, None], x, 0.0), 0)
        k = tl.sum(tl.where((rank == S.BT + i)[:, None], x, 0.0), 0)
        by_key = tl.where((rank == i)[None, :], tl.sum(decayed * q[None, :], 1)[:, None], by_key)
        by_key = tl.where((rank == S.BT + i)[None, :], tl.sum(decayed * k[None, :], 1)[:, None], by_key)
    return tl.trans(by_key)


@triton.jit
def probes_of_head(
    inputs, strides, head, group, key, to, channels, place, readers, known, line, t, valid, low, high, S: tl.constexpr
):  # fmt: skip
    """Where each channel has its decay: as ``probes_of_group``, x and the entries' keys decayed to where they meet.

    The new tokens' decays are appended too. Rows are taken with all columns, so that sums over entries stay within a
    thread; of the entries sixteen at once, the newest first, as far as there are any.
    """
    J: tl.constexpr = 2 * S.BT
    C: tl.constexpr = S.C
    ACT: tl.constexpr = inputs.q.dtype.element_ty
    is_k = readers[4]
    columns = (tl.arange(0, S.KP) // 4 * 4 + tl.arange(0, S.KP) % 4)[None, :]
    wide = columns < S.K
    x, _ = queries_and_keys(inputs, strides, group * S.K + columns, wide, readers, True)
    tl.store(to[0] + columns, x, mask=to[1] & wide)
    raw, x = x, x.to(tl.float32)
    squares = tl.sum(x * x, 1)

    # Decays of the tokens: once each, then beside their keys.
    n = tl.arange(0, S.BT)
    start = tl.min(readers[2], 0)
    there = (n < tl.sum((valid & is_k).to(tl.int32), 0))[:, None] & wide
    g = channel_gates(inputs, strides, (start + n)[:, None], there, head, columns, low, high, S)
    tl.store(channels + (tl.min(place, 0) + n)[:, None] * S.K + columns, g, mask=there)
    g = stacked(tl.zeros_like(g), g)
    along = sums_of(line & is_k[None, :], g, S)
    near = x * fall(along, S)
    if S.tree:
        scores = pairs_of_tree(x, g, line, is_k, S)
    else:
        T: tl.constexpr = S.T
        own = tl.where(t[:, None] == t[None, :], product(raw, tl.trans(raw), S), 0.0)
        scores = own + pairs_by_channel(x, g, t, is_k, T, S)

    # Rows from the newest entry on, as the compiler adds up from the first one on.
    e = 15 - tl.arange(0, 16)
    backwards = tl.broadcast_to(e[None, :], [J, 16])
    reads = cut(near, S)
    since = tl.full([1, S.KP], 0.0, tl.float32)
    old_scores = ()
    for back in tl.static_range(S.BE // 16):
        first = S.BE - 16 - 16 * back
        found = tl.full([J, 16], 0.0, tl.float32)
        if first < known:
            at = (first + e)[:, None] * S.K + columns
            later = tl.load(channels + S.K + at, mask=(first + e + 1 < known)[:, None] & wide, other=0.0)
            keys = tl.load(key + at, mask=(first + e < known)[:, None] & wide, other=0.0)
            decayed = keys.to(tl.float32) * fall(tl.cumsum(later, 0) + since, S)
            since += tl.sum(later, 0, keep_dims=True)
            found = tl.gather(product_of_terms(reads, turned(cut(decayed, S)), S), backwards, 1)
        old_scores = (found,) + old_scores
    total = tl.reshape(since, [S.KP]) + tl.load(
        channels + tl.reshape(columns, [S.KP]), mask=tl.reshape(wide, [S.KP]) & (known > 0), other=0.0
    )
    # Probes in pieces as a product takes them. What was stored above is read again: to cut up what a thread holds of
    # whole rows would move more.
    tl.debug_barrier()
    probes = ()
    for piece in tl.static_range(C):
        few = columns_of(piece, S)
        inside = (few < S.K)[None, :]
        x, _ = queries_and_keys(inputs, strides, group * S.K + few[None, :], inside, readers, True)
        g = tl.load(channels + place[:, None] * S.K + few[None, :], mask=readers[3] & inside, other=0.0)
        along = sums_of(line & is_k[None, :], g, S) + tl.gather(total, tl.minimum(few, S.KP - 1), 0)[None, :]
        far = x.to(tl.float32) * fall(along, S)
        probes = probes + (turned(state_terms(far, ACT, tl.float32, S)),)
    return probes, scores, old_scores, squares, squares
