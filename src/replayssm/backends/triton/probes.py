"""What the tokens of a step read with: their queries and keys as probes of the state, and their scores.

All that depends on keys and their decay alone, once for the heads that share them. Scores are raw here: scales of keys
and a head's decay go on later, to a few numbers instead of to vectors. Letters as in ``step``.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.formats import columns_of, plane, planes
from replayssm.backends.triton.gates import fall, gates, load_or
from replayssm.backends.triton.reading import power_of_two
from replayssm.backends.triton.tile import (
    as_float16,
    halved,
    parts_of,
    piled,
    product,
    product_of_terms,
    state_terms,
    sums_of,
    totals,
    turned,
)


@triton.jit
def blocks_of(x):
    """[BE, N] as arrays [16, N]: entries are taken sixteen at once, as many as there are."""
    N: tl.constexpr = x.shape[1]
    COUNT: tl.constexpr = x.shape[0] // 16
    apart = tl.reshape(x, [COUNT, 16, N])
    blocks = ()
    for n in tl.static_range(COUNT):
        blocks = blocks + (tl.sum(tl.where(tl.arange(0, COUNT)[:, None, None] == n, apart, 0.0), 0),)
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
def scaled_probes(pieces, sizes, ACT: tl.constexpr, PROBE: tl.constexpr, S: tl.constexpr):
    """What reads, in pieces [M, BK], as terms of products with the state, and what those are to be multiplied by, [M].

    For float16 (``tile.state_terms``) a row is brought to where the largest of its ``sizes`` [N, M], no less than any
    of its numbers, is 2^14 or more: a number loses its last digits, or 2^-39 of that.
    """
    unit, back = 1.0, 1.0
    if as_float16(S.read):
        unit, back = power_of_two(sizes)
    probes = ()
    for n in tl.static_range(len(pieces)):
        x = pieces[n]
        if as_float16(S.read):
            x = x.to(tl.float32) * unit[:, None]
        probes = probes + (turned(state_terms(x, ACT, PROBE, S)),)
    return probes, back


@triton.jit
def probes_of_group(inputs, strides, group, key, to, readers, known, KEYS_READ: tl.constexpr, S: tl.constexpr):
    """Where a head has one decay: a tuple of

    the C pieces of x as ``scaled_probes`` has them and what their sums are to be multiplied by [M], scores with the
    tokens' keys [M, J] and with the entries' (blocks [16, M]), squared lengths of what reads [M] and of the keys [J].
    The keys are appended (``to``).
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
    old_scores = tl.full([S.BE, M], 0.0, tl.float32)
    for piece in tl.static_range(C):
        q, k = every_q[piece], every_k[piece]
        squares_q += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
        squares_k += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
        scores += product(q, tl.trans(k), S)
        old_scores += product(every_old[piece], tl.trans(q), S)
    largest = tl.abs(every_q[0].to(tl.float32))
    for piece in tl.static_range(1, C):
        largest = tl.maximum(largest, tl.abs(every_q[piece].to(tl.float32)))
    probes, back = scaled_probes(every_q, tl.trans(largest), ACT, ACT, S)
    return probes, back, scores, blocks_of(old_scores), squares_q, squares_k


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
def pairs_of_chain(queries, keys, falls, S: tl.constexpr):
    """Scores of a chain's tokens with keys up to them, decayed on the way: [J, J], those of its right half; and x with
    the decay from the first token on: [J, N].

    All three are tuples of BT rows [N], ``falls`` exp g. A key falls from token to token where it is: no thread needs
    another's columns but for the sums over them.
    """
    BT: tl.constexpr = S.BT
    nothing = tl.zeros_like(falls[0])
    reach = falls[0]
    decayed, near_q, near_k, products, rows = (), (), (), (), ()
    for i in tl.static_range(BT):
        if i > 0:
            reach = reach * falls[i]
        further = ()
        for j in tl.static_range(i):
            further = further + (decayed[j] * falls[i],)
        decayed = further + (keys[i],)
        near_q, near_k = near_q + (queries[i] * reach,), near_k + (keys[i] * reach,)
        for j in tl.static_range(BT):
            products = products + (queries[i] * decayed[j] if j <= i else nothing,)
        for j in tl.static_range(BT):
            products = products + (keys[i] * decayed[j] if j <= i else nothing,)
        # A few tokens at once, or registers do not hold them.
        if i % 4 == 3:
            rows, products = rows + (totals(piled(products)),), ()
    scores = tl.permute(tl.reshape(piled(rows), [BT, 2, BT]), (1, 0, 2))
    scores = tl.reshape(scores, [2 * BT, BT])
    both = tl.permute(tl.join(tl.zeros_like(scores), scores), (0, 2, 1))
    return tl.reshape(both, [2 * BT, 2 * BT]), piled(near_q + near_k)


@triton.jit
def every_column(S: tl.constexpr):
    """Columns [N] such that the parts of BK among them are pieces of ``columns_of``; K or more where there is none."""
    PLANES: tl.constexpr = planes(S.read)
    EACH: tl.constexpr = max(S.KP // PLANES, S.BK)
    HALF: tl.constexpr = plane(S.read, S.K)
    # As the compiler sees it in runs of four, so that a thread has the same columns of whatever is loaded.
    at = tl.arange(0, PLANES * EACH) // 4 * 4 + tl.arange(0, PLANES * EACH) % 4
    if PLANES == 1 or EACH == HALF:
        return at
    else:
        return tl.where(at % EACH < HALF, at // EACH * HALF + at % EACH, S.K)


@triton.jit
def probes_of_head(
    inputs, strides, head, group, key, channels, row, appends_key, line, is_k, low, high, S: tl.constexpr
):  # fmt: skip
    """Where each channel has its decay: as ``probes_of_group``, x and the entries' keys decayed to where they meet.

    ``row``: the first token, how many there are, and how many entries. The tokens' keys and decays are appended.
    A thread has the same few columns of every token and entry, a row each, so that sums over them stay in it; of the
    entries sixteen at once, the newest first, as far as there are any.
    """
    BT: tl.constexpr = S.BT
    PLANES: tl.constexpr = planes(S.read)
    C: tl.constexpr = S.C
    EACH: tl.constexpr = C // PLANES
    ACT: tl.constexpr = inputs.q.dtype.element_ty
    COUNT: tl.constexpr = (S.W + 15) // 16
    start, count, known = row
    columns = every_column(S)
    wide = columns < S.K
    at_q = inputs.q + start.to(tl.int64) * strides.q + group * S.K + columns
    at_k = inputs.k + start.to(tl.int64) * strides.k + group * S.K + columns
    at_a = inputs.channels + start.to(tl.int64) * strides.channels + head * S.K + columns
    rate = load_or(inputs.rate, head + tl.arange(0, 1), True, 0.0)
    bias = load_or(inputs.bias, head * S.K + columns, wide, 0.0)
    raw_q, raw_k, raw_a = (), (), ()
    for i in tl.static_range(BT):
        there = wide & (i < count)
        raw_q = raw_q + (tl.load(at_q + i * strides.q, mask=there, other=0.0),)
        raw_k = raw_k + (tl.load(at_k + i * strides.k, mask=there, other=0.0),)
        raw_a = raw_a + (tl.load(at_a + i * strides.channels, mask=there, other=0.0).to(tl.float32),)
    queries, keys, decays, falls, squares_q, squares_k = (), (), (), (), (), ()
    for i in tl.static_range(BT):
        there = wide & (i < count)
        q, k = raw_q[i].to(tl.float32), raw_k[i].to(tl.float32)
        g, _ = gates(raw_a[i], raw_a[i], rate, bias, low, high, S)
        g = tl.where(there, g, 0.0)
        tl.store(key + (known + i) * S.K + columns, raw_k[i], mask=there & appends_key)
        tl.store(channels + (known + i) * S.K + columns, g, mask=there)
        queries, keys, decays, falls = queries + (q,), keys + (k,), decays + (g,), falls + (fall(g, S),)
        squares_q, squares_k = squares_q + (q * q,), squares_k + (k * k,)
    squares = totals(piled(squares_q + squares_k))
    if S.tree:
        x, g = piled(queries + keys), piled(decays + decays)
        near = x * fall(sums_of(line & is_k[None, :], g, S), S)
        scores = pairs_of_tree(x, g, line, is_k, S)
    else:
        scores, near = pairs_of_chain(queries, keys, falls, S)

    reads = turned(halved(near, S))
    since = tl.zeros_like(decays[0])
    old_scores = ()
    for _ in tl.static_range(COUNT):
        old_scores = old_scores + (tl.full([16, 2 * BT], 0.0, tl.float32),)
    blocks = (known + 15) // 16
    for back in tl.range(0, blocks, num_stages=2):
        block = blocks - 1 - back
        at_decay = channels + (block * 16 + 1) * S.K + columns
        at_key = key + block * 16 * S.K + columns
        left = known - block * 16
        later, old, decayed = (), (), ()
        for e in tl.static_range(16):
            later = later + (tl.load(at_decay + e * S.K, mask=wide & (e + 1 < left), other=0.0),)
            old = old + (tl.load(at_key + e * S.K, mask=wide & (e < left), other=0.0),)
        for e in tl.static_range(16):
            since += later[15 - e]
            decayed = (old[15 - e].to(tl.float32) * fall(since, S),) + decayed
        found = product_of_terms(halved(piled(decayed), S), reads, S)
        kept = ()
        for n in tl.static_range(COUNT):
            kept = kept + (tl.where(block == n, found, old_scores[n]),)
        old_scores = kept
    total = since + tl.load(channels + columns, mask=wide & (known > 0), other=0.0)
    far = near * fall(total, S)[None, :]
    sizes = totals(tl.abs(far))[None, :]
    far = parts_of(far, S.BK)
    pieces = ()
    for piece in tl.static_range(C):
        pieces = pieces + (far[piece // EACH * (len(far) // PLANES) + piece % EACH],)
    probes, back = scaled_probes(pieces, sizes, ACT, tl.float32, S)
    return probes, back, scores, old_scores, squares, squares
