"""What every kernel is made of: products at float32 accuracy, the triangular solve, paths of drafts."""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def terms(x):
    """Three bfloat16 numbers whose sum is x (float32), to the bit: 8 of its 24 digits each, cut off, not rounded.

    In integer arithmetic: conversions with rounding have an eighth of its rate.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rest = x - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    rest_bits = rest.to(tl.uint32, bitcast=True)
    last = rest - (rest_bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    last_bits = last.to(tl.uint32, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    middle = (rest_bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return high, middle, (last_bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def product(a, b, S: tl.constexpr):
    """a [M, C] @ b [C, N] to float32 accuracy, on tensor cores.

    Two operands of one 16-bit type are multiplied exactly. A float32 operand is cut into three bfloat16 terms: three
    products beside a bfloat16 operand, six beside another float32 one (the other three are below its last digit). One
    tf32 product would lose half of the digits.
    """
    if S.dot == "interpret":
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif (a.dtype == b.dtype) and (a.dtype.primitive_bitwidth == 16):
        return tl.dot(a, b)
    elif a.dtype == tl.bfloat16:
        high, middle, low = terms(b.to(tl.float32))
        return tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low)))
    elif b.dtype == tl.bfloat16:
        high, middle, low = terms(a.to(tl.float32))
        return tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b)))
    else:
        high, middle, low = terms(a.to(tl.float32))
        b_high, b_middle, b_low = terms(b.to(tl.float32))
        small = tl.dot(middle, b_middle, tl.dot(low, b_high, tl.dot(high, b_low)))
        return tl.dot(high, b_high, tl.dot(high, b_middle, tl.dot(middle, b_high, small)))


@triton.jit
def solve(a, right, N: tl.constexpr, S: tl.constexpr):
    """(I + a)⁻¹ right for a strictly lower triangular a [E, E] and right [E, M].

    a must be zero outside of diagonal blocks of N rows (rounded up to a power of two).

    The inverse is built from blocks: two neighbouring inverses X, Z of n rows and the block b below X make the
    inverse of 2n rows, whose block is −Z b X. log₂ E levels instead of E dependent columns, and as stable as
    substitution (a product of powers of a is not: it cancels).
    """
    E: tl.constexpr = a.shape[0]
    if E == 1:
        return right
    else:
        i = tl.arange(0, E)[:, None]
        j = tl.arange(0, E)[None, :]
        inverse = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (j < i), a, 0.0)
        for level in tl.static_range(1, 7):
            if (1 << level) < N:
                below = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level) & (j < i)
                block = tl.where(below, a, 0.0)
                inverse -= product(product(inverse, block, S), inverse, S)
        return product(inverse, right, S)


@triton.jit
def write(v, beta, seen, among, N: tl.constexpr, S: tl.constexpr):
    """The values u [E, BP] that tokens write: new ones, or a block of entries.

    ``seen`` is what the state before them holds for their keys, ``among`` the scores of k_i and the k_j before it.
    """
    if S.update == "delta":
        return solve(beta[:, None] * among, beta[:, None] * (v - seen), N, S)
    else:
        return beta[:, None] * v


@triton.jit
def ancestors(parents, start, count, t, S: tl.constexpr):
    """Whether token t_j is token t_i itself or an ancestor of it, int1 [M, M]; and whether some parent is none."""
    if S.tree:
        found = t[:, None] == t[None, :]
        above = tl.load(parents + start + t, mask=t < count, other=-1)
        bad = (above < -1) | (above >= t)
        fault = tl.max(bad.to(tl.int32), 0)
        above = tl.where(bad, -1, above)
        T: tl.constexpr = S.T
        for _ in tl.static_range(T - 1):
            found = found | (above[:, None] == t[None, :])
            above = tl.load(parents + start + above, mask=above >= 0, other=-1)
            above = tl.minimum(above, t - 1)
        return found, fault
    else:
        return t[None, :] <= t[:, None], 0


@triton.jit
def exact(mask, S: tl.constexpr):
    """A mask as a factor that ``product`` takes as it is."""
    return mask.to(tl.bfloat16 if S.dot != "interpret" else tl.float32)


@triton.jit
def between(g, line, mine, S: tl.constexpr):
    """Σ g over the path from j (excluded) to i, where j is on i's path: [M, M].

    g [M]; ``line`` [M, M] of ``ancestors``; ``mine`` [M] names each token once. The terms on i's path that are not on
    j's, as a product with zeros and ones: a sum of same-sign terms, no difference of prefix sums.
    """
    on_i = tl.where(line & mine[None, :], g[None, :], 0.0)
    return product(on_i, tl.trans(exact((line == 0) & mine[None, :], S)), S)


@triton.jit
def pairs_by_channel(x, g, t, mine, N: tl.constexpr, S: tl.constexpr):
    """Σ_c x_i[c] x_j[c] exp(Σ g_m[c], t_j < m ≤ t_i) for t_j < t_i < N along a chain: [E, E], zero elsewhere.

    x, g [E, BK] float32; t [E] says which token a row belongs to, ``mine`` [E] names each token's row of g once.
    Pairs whose tokens part at the same power of two are taken together: with m₀ where the upper half of their block
    begins, the factor is exp(Σ m₀ ≤ m ≤ t_i) on one side and exp(Σ t_j < m < m₀) on the other, both at most 1. So
    log₂ N products do what N steps would.
    """
    E: tl.constexpr = x.shape[0]
    found = tl.full([E, E], 0.0, tl.float32)
    at = t[:, None]
    m = t[None, :]
    for level in tl.static_range(5):
        if (1 << level) < N:
            upper = ((t >> level) & 1) == 1
            begin = (((t >> level) | 1) << level)[:, None]
            above = upper[:, None] & (m >= begin) & (m <= at)
            below = (upper[:, None] == 0) & (m > at) & (m < begin)
            scaled = x * tl.exp(product(exact((above | below) & mine[None, :], S), g, S))
            together = (at >> (level + 1)) == (m >> (level + 1))
            pairs = together & upper[:, None] & (upper[None, :] == 0)
            found += tl.where(pairs, product(scaled, tl.trans(scaled), S), 0.0)
    return found
