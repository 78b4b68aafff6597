"""What a decode step reads with: q and k as probes of the entries' keys and of the state, and the sums they make.

On tensor cores where what is read is exact in 16 bits: a product takes eight columns at least, so that the terms of
q and k side by side cost no more than one of them. Float32 states go through multiply-adds: their terms would cost
more than the products spare.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.formats import by_turns, columns_of, element_bytes, fetch_state, fetched_state, planes
from replayssm.backends.triton.tile import cut, ordered, product


@triton.constexpr_function
def probe_terms(word):
    """Terms of a float32 probe of a state in this format: of bfloat16, of float16, or 0 where it stays as it is."""
    return {"fp32": 0, "bf16": 3}.get(word, 2)


@triton.jit
def rows_of_two(x, y, EACH: tl.constexpr):
    """x and y [1, BK] as rows of a tile [8, BK], EACH rows of either, the others zero."""
    n = tl.arange(0, 8)[:, None]
    return tl.where(n < EACH, x, tl.where(n < 2 * EACH, y, 0.0))


@triton.jit
def columns_summed(sums, EACH: tl.constexpr):
    """What the columns of a product with ``rows_of_two`` come to: x's [R] and y's [R]."""
    n = tl.arange(0, 8)[None, :]
    of_x = tl.sum(tl.where(n < EACH, sums, 0.0), 1)
    return of_x, tl.sum(tl.where((n >= EACH) & (n < 2 * EACH), sums, 0.0), 1)


@triton.jit
def scores_of(key, q, k, e, known, live, S: tl.constexpr):
    """Raw scores of the entries' keys with q and k, from where those are stored if ``live``: [BE] each."""
    BITS: tl.constexpr = q.dtype.element_ty.primitive_bitwidth
    WIDE: tl.constexpr = min(512 // BITS, S.KP)
    PIECES: tl.constexpr = S.KP // WIDE
    n = tl.arange(0, 8)[:, None]
    keys, reads = (), ()
    for piece in tl.static_range(PIECES):
        columns = (by_turns(piece, WIDE) if PIECES % 2 == 0 else piece * WIDE + tl.arange(0, WIDE))[None, :]
        inside = columns < S.K
        keys = keys + (tl.load(key + e[:, None] * S.K + columns, mask=(e < known)[:, None] & inside, other=0.0),)
        from_q = tl.load(q + n * 0 + columns, mask=(n == 0) & inside & live, other=0.0)
        from_k = tl.load(k + n * 0 + columns, mask=(n == 1) & inside & live, other=0.0)
        reads = reads + (tl.where(n == 0, from_q, from_k),)
    RUN: tl.constexpr = 32 // BITS
    found = tl.full([S.BE, 8], 0.0, tl.float32)
    for piece in tl.static_range(PIECES):
        found += product(ordered(keys[piece], RUN), tl.trans(ordered(reads[piece], RUN)), S)
    return columns_summed(found, 1)


@triton.jit
def power_of_two(x):
    """The power of two that brings the largest of x (float32) to 2^14 … 2^15, and its reciprocal."""
    exponent = tl.maximum(tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) >> 23, 15)
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def state_order(x, S: tl.constexpr):
    """Columns of a tile of the state, or of probes, as a product takes them: see ``tile.state_terms``."""
    RUN: tl.constexpr = 4 if element_bytes(S.read) == 1 else 2
    x = ordered(x, RUN)
    return x.to(tl.float32) if S.dot == "interpret" else x


@triton.jit
def probes_of(q, k, S: tl.constexpr):
    """q and k [KP] float32 as probes: C pieces of both, and what sums with q and with k are to be multiplied by.

    By gathers: they keep the layout of q from spreading to the tiles of the state.
    """
    LAST: tl.constexpr = q.shape[0] - 1
    TERMS: tl.constexpr = probe_terms(S.read)
    C: tl.constexpr = S.C
    unit_q, unit_k, back_q, back_k = 1.0, 1.0, 1.0, 1.0
    if TERMS == 2:
        # Within float16's range, and far from its denormal numbers.
        unit_q, back_q = power_of_two(q)
        unit_k, back_k = power_of_two(k)
    probes = ()
    for piece in tl.static_range(C):
        columns = columns_of(piece, S)
        at = tl.minimum(columns, LAST)
        x = tl.where(columns < S.K, tl.gather(q, at, 0), 0.0)[None, :]
        y = tl.where(columns < S.K, tl.gather(k, at, 0), 0.0)[None, :]
        if TERMS == 0:
            probes = probes + ((x, y),)
        else:
            both = rows_of_two(x * unit_q, y * unit_k, TERMS)
            term = tl.arange(0, 8)[:, None] % TERMS
            if TERMS == 2:
                high = both.to(tl.float16)
                low = both - high.to(tl.float32)
                both = tl.where(term == 0, high, low.to(tl.float16))
            elif S.dot == "interpret":
                both = tl.where(term == 0, both, 0.0)
            else:
                terms = cut(both, S)
                both = tl.where(term == 0, terms[0], tl.where(term == 1, terms[1], terms[2]))
            probes = probes + (tl.trans(state_order(both, S)),)
    return probes, back_q, back_k


@triton.jit
def fetch_tile(layer, strides, where, rows, live, S: tl.constexpr):
    """The rows [BP] of the state in the slot ``where`` as they are stored, one tuple for each part of the columns."""
    PARTS: tl.constexpr = S.C // planes(S.read)
    found = ()
    for part in tl.static_range(PARTS):
        found = found + (fetch_state(layer, strides, where, rows, live, part, S.BK, S),)
    return found


@triton.jit
def sums_of_state(fetched, probes, S: tl.constexpr):
    """Sums over the rows [BP] of a fetched tile with q and with k: [BP] each. See ``formats.fetched_state``."""
    PLANES: tl.constexpr = planes(S.read)
    TERMS: tl.constexpr = probe_terms(S.read)
    PARTS: tl.constexpr = S.C // PLANES
    if TERMS == 0:
        sums_q, sums_k = tl.full([S.BP, S.BK], 0.0, tl.float32), tl.full([S.BP, S.BK], 0.0, tl.float32)
        for part in tl.static_range(PARTS):
            s = fetched_state(fetched[part], S.BK, S)[0]
            sums_q += s * probes[part][0]
            sums_k += s * probes[part][1]
        return tl.sum(sums_q, 1), tl.sum(sums_k, 1)
    else:
        sums = tl.full([S.BP, 8], 0.0, tl.float32)
        for part in tl.static_range(PARTS):
            found = fetched_state(fetched[part], S.BK, S)
            for plane in tl.static_range(PLANES):
                sums = tl.dot(state_order(found[plane], S), probes[part + plane * PARTS], sums)
        return columns_summed(sums, TERMS)


@triton.jit
def factors_of(reach_q, reach_k, VALUES: tl.constexpr, S: tl.constexpr):
    """What an entry's value counts for in the outputs of q and of k, for N heads each [N, BE], as ``sums_of_entries``
    wants it for values of type VALUES: a product's columns, or eight entries at once.
    """
    N: tl.constexpr = S.N
    if tl.float32 == VALUES:
        EIGHTS: tl.constexpr = S.BE // 8
        both = ()
        for i in tl.static_range(EIGHTS):
            here = tl.arange(0, EIGHTS)[None, :, None] == i
            of_q = tl.sum(tl.where(here, tl.reshape(reach_q, [N, EIGHTS, 8]), 0.0), 1)
            of_k = tl.sum(tl.where(here, tl.reshape(reach_k, [N, EIGHTS, 8]), 0.0), 1)
            both = both + ((of_q[:, :, None], of_k[:, :, None]),)
        return both
    else:
        # Three terms for each head, those for k behind.
        COLUMNS: tl.constexpr = columns_for(S.update, N)
        n = tl.arange(0, COLUMNS)[:, None]
        found = for_columns(reach_q, n // 3 % N, COLUMNS, S)
        if S.update == "delta":
            found = tl.where(n < 3 * N, found, for_columns(reach_k, n // 3 % N, COLUMNS, S))
        if S.dot == "interpret":
            return tl.trans(tl.where(n % 3 == 0, found, 0.0))
        else:
            terms = cut(found, S)
            return tl.trans(tl.where(n % 3 == 0, terms[0], tl.where(n % 3 == 1, terms[1], terms[2])))


@triton.jit
def for_columns(x, head, COLUMNS: tl.constexpr, S: tl.constexpr):
    """The rows ``head`` [COLUMNS, 1] of x [N, BE]. One row goes to all without a gather, which Triton 3.6 cannot lower
    for a row that several warps hold.
    """
    if S.N == 1:
        return tl.broadcast_to(x, [COLUMNS, S.BE])
    else:
        return tl.gather(x, tl.broadcast_to(head, [COLUMNS, S.BE]), 0)


@triton.constexpr_function
def columns_for(update, heads):
    """Columns of ``factors_of``: a power of two of at least eight."""
    columns = 8
    while columns < (6 if update == "delta" else 3) * heads:
        columns *= 2
    return columns


@triton.jit
def fetch_entries(values, lower, block, known, S: tl.constexpr):
    """The entries' values for the rows of a block: a tuple of tiles, [BE, BP] or eight entries each [N, 8, BP / N].

    ``values`` points to those of the N heads, ``lower`` to what is to be added to them or is None; a row is one of
    BP / N of each head.
    """
    N: tl.constexpr = S.N
    DEEP: tl.constexpr = S.BP // S.N
    if values.dtype.element_ty == tl.float32:
        p = block * DEEP + tl.arange(0, DEEP)
        few = tl.arange(0, 8)
        spot = tl.arange(0, N)[:, None, None] * (S.W * S.P) + few[None, :, None] * S.P + p[None, None, :]
        found = ()
        for i in tl.static_range(S.BE // 8):
            there = (few + i * 8 < known)[None, :, None] & (p < S.P)[None, None, :]
            found = found + (tl.load(values + spot + i * 8 * S.P, mask=there, other=0.0),)
        return found
    else:
        r = tl.arange(0, S.BP)
        e = tl.arange(0, S.BE)[:, None]
        p = block * DEEP + r % DEEP
        at = e * S.P + (r // DEEP * (S.W * S.P) + p)[None, :]
        there = (e < known) & (p < S.P)[None, :]
        found = (tl.load(values + at, mask=there, other=0.0),)
        if lower is not None:
            found = found + (tl.load(lower + at, mask=there, other=0.0),)
        return found


@triton.jit
def sums_of_entries(fetched, factors, S: tl.constexpr):
    """What fetched entries add to the outputs of q and of k: [BP] each."""
    N: tl.constexpr = S.N
    DEEP: tl.constexpr = S.BP // S.N
    if fetched[0].dtype == tl.float32:
        # Of the entries eight are summed across threads, the rest in registers.
        sums_q, sums_k = tl.full([N, 8, DEEP], 0.0, tl.float32), tl.full([N, 8, DEEP], 0.0, tl.float32)
        for i in tl.static_range(S.BE // 8):
            sums_q += fetched[i] * factors[i][0]
            sums_k += fetched[i] * factors[i][1]
        return tl.reshape(tl.sum(sums_q, 1), [S.BP]), tl.reshape(tl.sum(sums_k, 1), [S.BP])
    else:
        sums = tl.full([S.BP, factors.shape[1]], 0.0, tl.float32)
        for part in tl.static_range(len(fetched)):
            terms = cut(fetched[part], S)
            for term in tl.static_range(len(terms)):
                sums = tl.dot(tl.trans(terms[term]), factors, sums)
        n = tl.arange(0, factors.shape[1])[None, :]
        own = n // 3 % N == (tl.arange(0, S.BP) // DEEP)[:, None]
        of_q = tl.sum(tl.where(own & (n < 3 * N), sums, 0.0), 1)
        return of_q, tl.sum(tl.where(own & (n >= 3 * N) & (n < 6 * N), sums, 0.0), 1)
