"""What every kernel is made of: products at float32 accuracy, paths of drafts, scores of pairs."""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.formats import element_bytes


@triton.jit
def opaque(x, S: tl.constexpr):
    """x (float32) as one number: of a product the compiler would take the digits that it was rounded to from the
    number, and what is left of them from the factors, in one kernel and not in another (I6).
    """
    if S.arch > 0:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return x


@triton.jit
def cut(x, S: tl.constexpr):
    """x as a tuple of factors that tensor cores take, the largest first, whose sum is x to the bit.

    bfloat16 is one. Others are cut into bfloat16 terms of 8 digits each, cut off, not rounded: float16 into two,
    float32 into three. In integer arithmetic: conversions with rounding have an eighth of its rate.
    """
    if S.dot == "interpret":
        return (x.to(tl.float32),)
    elif x.dtype == tl.bfloat16:
        return (x,)
    else:
        wide = opaque(x, S) if x.dtype == tl.float32 else x.to(tl.float32)
        bits = wide.to(tl.uint32, bitcast=True)
        rest = wide - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        rest_bits = rest.to(tl.uint32, bitcast=True)
        high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        middle = (rest_bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        if x.dtype == tl.float16:
            return high, middle
        else:
            last = rest - (rest_bits & 0xFFFF0000).to(tl.float32, bitcast=True)
            last_bits = last.to(tl.uint32, bitcast=True)
            return high, middle, (last_bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def halves(x):
    """x (float32) as two numbers of tf32, of 11 digits each, the larger one rounded: what is left has 12 at most, and
    tensor cores leave out the last, so that x is read to half a digit.
    """
    bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
    high = bits.to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def halved(x, S: tl.constexpr):
    """x (float32) as terms of a product: ``halves``."""
    if S.dot == "interpret":
        return (x,)
    else:
        return halves(opaque(x, S))


@triton.jit
def turned(terms):
    """The transposes of terms: to cut first keeps words of sixteen bytes whole on the way."""
    found = ()
    for n in tl.static_range(len(terms)):
        found = found + (tl.trans(terms[n]),)
    return found


@triton.jit
def accumulate(sums, a, b, S: tl.constexpr):
    """Add a [M, C] @ b [C, N], both as terms, to a product that three sums make, the largest terms' first.

    Products of terms that are below the last digit of float32 are left out.
    """
    large, middle, small = sums
    LEVELS: tl.constexpr = max(len(a), len(b))
    PRECISION: tl.constexpr = "tf32" if S.arch > 0 else "ieee"
    for i in tl.static_range(len(a)):
        for j in tl.static_range(len(b)):
            if i + j == 0:
                large = tl.dot(a[i], b[j], large, input_precision=PRECISION)
            elif i + j < LEVELS:
                if i + j == 1:
                    middle = tl.dot(a[i], b[j], middle, input_precision=PRECISION)
                else:
                    small = tl.dot(a[i], b[j], small, input_precision=PRECISION)
    return large, middle, small


@triton.jit
def no_sums(M: tl.constexpr, N: tl.constexpr):
    """What ``accumulate`` begins with."""
    zero = tl.full([M, N], 0.0, tl.float32)
    return zero, zero, zero


@triton.jit
def product_of_terms(a, b, S: tl.constexpr):
    """a [M, C] @ b [C, N], both as terms, to float32 accuracy: products of terms from the smallest on in one sum."""
    LEVELS: tl.constexpr = max(len(a), len(b))
    PRECISION: tl.constexpr = "tf32" if S.arch > 0 else "ieee"
    found = tl.full([a[0].shape[0], b[0].shape[1]], 0.0, tl.float32)
    for back in tl.static_range(LEVELS):
        for i in tl.static_range(len(a)):
            for j in tl.static_range(len(b)):
                if i + j == LEVELS - 1 - back:
                    found = tl.dot(a[i], b[j], found, input_precision=PRECISION)
    return found


@triton.jit
def product(a, b, S: tl.constexpr):
    """a [M, C] @ b [C, N] to float32 accuracy, on tensor cores. One tf32 product would lose half of the digits."""
    if S.dot != "interpret" and a.dtype == tl.float16 and b.dtype == tl.float16:
        return tl.dot(a, b)
    else:
        return product_of_terms(cut(a, S), cut(b, S), S)


@triton.jit
def ordered(x, RUN: tl.constexpr):
    """Columns of x [R, BK] in the order in which tensor cores take them from threads that loaded them.

    Four threads load a row, BK/4 columns each, in words of sixteen bytes; a product has runs of ``RUN`` columns in turn
    from each of them.
    """
    R: tl.constexpr = x.shape[0]
    BK: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [R, 4, BK // (4 * RUN), RUN]), [0, 2, 1, 3]), [R, BK])


@triton.constexpr_function
def as_float16(word):
    """Whether steps have the elements of this format in float16."""
    return word not in ("fp32", "bf16")


@triton.jit
def state_terms(x, ACT: tl.constexpr, PROBE: tl.constexpr, S: tl.constexpr):
    """Columns [R, BK] of the state, or of probes, as terms of a product of the two.

    Where both are exact in one 16-bit type they go as they are. So does any state in float16: a probe, which comes in
    float32, of a size for float16, is one term of it or two. Else they go in halves. ``ACT`` is the element type of
    activations, ``PROBE`` that of probes.

    Columns are ``ordered``, those of both factors, so that nothing moves between threads: in runs of as many as the
    compiler sees fit into 32 bits, of the narrowest numbers that go into the product.
    """
    STATE_BITS: tl.constexpr = 8 * element_bytes(S.read)
    RUN: tl.constexpr = 32 // min(STATE_BITS, ACT.primitive_bitwidth)
    x = ordered(x, RUN)
    if S.dot == "interpret":
        return (x.to(tl.float32),)
    elif as_float16(S.read):
        high = x.to(tl.float16)
        if x.dtype == tl.float16 or PROBE.primitive_bitwidth == 16:
            return (high,)
        else:
            return high, (x - high.to(tl.float32)).to(tl.float16)
    elif S.read == "bf16" and tl.bfloat16 == PROBE:
        return (x,)
    elif x.dtype == tl.float32:
        return halves(x)
    else:
        return (x.to(tl.float32),)


@triton.jit
def row_of(x, at: tl.constexpr):
    """Row ``at`` of x [R, N]: [1, N]."""
    return tl.gather(x, tl.full([1, x.shape[1]], at, tl.int32), 0)


@triton.jit
def column_of(x, at: tl.constexpr):
    """Column ``at`` of x [R, N]: [R, 1]."""
    return tl.gather(x, tl.full([x.shape[0], 1], at, tl.int32), 1)


@triton.jit
def beside(left, right):
    """Two tiles [R, N] as one [R, 2N], which ``sides`` takes apart again."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def sixteen(x):
    """x [R, J] with zeros behind it, where J is less than the sixteen that a product adds up at least."""
    J: tl.constexpr = x.shape[1]
    if J >= 16:
        return x
    else:
        return beside(x, tl.zeros_like(x))


@triton.jit
def stacked(above, below):
    """Two tiles [R, N] as one [2R, N]."""
    R: tl.constexpr = above.shape[0]
    N: tl.constexpr = above.shape[1]
    return tl.reshape(tl.permute(tl.join(above, below), (2, 0, 1)), [2 * R, N])


@triton.jit
def joined(rows):
    """Each of the first half of them beside its like in the second half."""
    HALF: tl.constexpr = len(rows) // 2
    found = ()
    for n in tl.static_range(HALF):
        found = found + (tl.join(rows[n], rows[n + HALF]),)
    return found


@triton.jit
def piled(rows):
    """Rows [N], a power of two of them, as one tile [R, N]. Nothing moves between threads."""
    level = rows
    for _ in tl.static_range(8):
        if len(level) > 1:
            level = joined(level)
    return tl.trans(tl.reshape(level[0], [rows[0].shape[0], len(rows)]))


@triton.jit
def sides(x):
    """The left half and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def sides_of_each(tiles):
    """Halves of tiles, one tile's behind another's."""
    found = ()
    for n in tl.static_range(len(tiles)):
        left, right = sides(tiles[n])
        found = found + (left, right)
    return found


@triton.jit
def parts_of(x, BK: tl.constexpr):
    """A tile's columns as tiles of BK: what a thread has of few columns of many parts is exchanged once."""
    level = (x,)
    for _ in tl.static_range(8):
        if level[0].shape[1] > BK:
            level = sides_of_each(level)
    return level


@triton.jit
def totals(x):
    """Sums over the columns of x [R, N], of which a thread has four: [R].

    Halves of a row come together where few threads have much of a few rows each: far fewer exchanges than if all of
    them added up every row.
    """
    found = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 4]), 2)
    for _ in tl.static_range(8):
        if found.shape[1] > 4:
            left, right = sides(found)
            found = left + right
    return tl.sum(found, 1)


@triton.jit
def sums_of(mask, x, S: tl.constexpr):
    """Σ of the rows j of x [J, N] where mask_ij [M, J]: [M, N], a product with zeros and ones."""
    if x.shape[0] < 16:
        return product(sixteen(exact(mask, S)), stacked(x, tl.zeros_like(x)), S)
    else:
        return product(exact(mask, S), x, S)


@triton.jit
def ancestors(parents, start, count, t, of, S: tl.constexpr):
    """Whether the token of_j [J] is the token t_i [M] or an ancestor of it, int1; and whether some parent is none."""
    if S.tree:
        found = t[:, None] == of[None, :]
        above = tl.load(parents + start + t, mask=t < count, other=-1)
        bad = (above < -1) | (above >= t)
        fault = tl.max(bad.to(tl.int32), 0)
        above = tl.where(bad, -1, above)
        T: tl.constexpr = S.T
        for _ in tl.static_range(T - 1):
            found = found | (above[:, None] == of[None, :])
            above = tl.load(parents + start + above, mask=above >= 0, other=-1)
            above = tl.minimum(above, t - 1)
        return found, fault
    else:
        return of[None, :] <= t[:, None], 0


@triton.jit
def exact(mask, S: tl.constexpr):
    """A mask as a factor that ``product`` takes as it is."""
    return mask.to(tl.bfloat16 if S.dot != "interpret" else tl.float32)


@triton.jit
def between(g, path, line, mine, S: tl.constexpr):
    """Σ g over the path from j (excluded) to i, where j is on i's path: [M, J].

    g [J]; ``path`` [M, J] and ``line`` [J, J] of ``ancestors``; ``mine`` [J] names each token once. The terms on i's
    path that are not on j's, as a product with zeros and ones: a sum of same-sign terms, no difference of prefix sums.
    """
    on_i = tl.where(path & mine[None, :], g[None, :], 0.0)
    if g.shape[0] < 16:
        return tl.sum(tl.where((line == 0)[None, :, :], on_i[:, None, :], 0.0), 2)
    else:
        return product(on_i, tl.trans(exact((line == 0) & mine[None, :], S)), S)
