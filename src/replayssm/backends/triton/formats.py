"""State formats on the device: what a step reads, and how a fold reads and stores, as ``replayssm.formats`` to the bit.

A format is a word (its name in ``replayssm.formats``); the functions here are the only ones that ask which. Steps take
the elements of formats with scales as exact float16 numbers; scales of rows and heads are left to whoever sums them up.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.backends.triton.gates import load_or
from replayssm.backends.triton.quant import below, bits_of, random_words, round_stochastic


@triton.constexpr_function
def is_plain(word):
    """Whether elements are floating-point numbers without scales."""
    return word in ("fp32", "bf16", "fp16")


@triton.constexpr_function
def planes(word):
    """Into how many runs of columns a row is cut: byte m of a four-bit row holds element m and element m + K'/2."""
    return 2 if word in ("int4", "nvfp4") else 1


@triton.constexpr_function
def plane(word, state_dim):
    """Columns of a plane, and stored elements of a row."""
    return (state_dim + 31) // 32 * 16 if word in ("int4", "nvfp4") else state_dim


@triton.constexpr_function
def element_bytes(word):
    """Bytes of a stored element: one of a four-bit format is two numbers."""
    return {"fp32": 4, "bf16": 2, "fp16": 2}.get(word, 1)


# Columns -------------------------------------------------------------------------------------------------------------


@triton.jit
def by_turns(piece, BK: tl.constexpr):
    """Columns [BK] of a piece where two at a time have a quarter of theirs in turn: four threads, which load a quarter
    each, ask for all of a line with the first of the two, and have the rest of it for the second.
    """
    RUN: tl.constexpr = BK // 4
    at = tl.arange(0, BK)
    return piece // 2 * (2 * BK) + piece % 2 * RUN + at // RUN * (2 * RUN) + at % RUN


@triton.constexpr_function
def takes_turns(shape):
    """Whether pieces of a row of the state are ``by_turns``: in decode, of half a line each."""
    width = shape.BK * element_bytes(shape.read)
    return shape.BT == 1 and planes(shape.read) == 1 and width == 64 and shape.K % (2 * shape.BK) == 0


@triton.jit
def columns_of(piece, S: tl.constexpr):
    """Columns [BK] of one of the C pieces of a row; K where there is none. Pieces of the first plane come first.

    In four runs, as the compiler sees it: so a thread of a step loads as many columns of a key as of a row of the state
    (see ``tile.ordered``).
    """
    if takes_turns(S):
        return by_turns(piece, S.BK)
    EACH: tl.constexpr = S.C // planes(S.read)
    HALF: tl.constexpr = plane(S.read, S.K)
    RUN: tl.constexpr = S.BK // 4
    at = tl.arange(0, S.BK)
    at = piece % EACH * S.BK + (at // RUN * RUN + at % RUN)
    if (EACH == S.C) or (HALF == EACH * S.BK):
        return piece // EACH * HALF + at
    else:
        return tl.where(at < HALF, piece // EACH * HALF + at, S.K)


@triton.jit
def fold_columns(part, S: tl.constexpr):
    """Columns [BK] of one of the C parts that a fold takes a row in; K where there is none.

    They follow the planes of a four-bit row whatever the format, so that sums over a row do not depend on formats, and
    the parts n and n + C/2 are packed together.
    """
    EACH: tl.constexpr = S.C // 2
    HALF: tl.constexpr = plane("nvfp4", S.K)
    at = tl.arange(0, S.BK)
    if S.BK == 8:
        at = part % 2 * 2 + at // 2 * 4 + at % 2
        return part // EACH * HALF + part % EACH // 2 * 16 + at
    at = part % EACH * S.BK + at
    if HALF == EACH * S.BK:
        return part // EACH * HALF + at
    else:
        return tl.where(at < HALF, part // EACH * HALF + at, S.K)


@triton.jit
def pair_columns(two, S: tl.constexpr):
    """Columns [16] of the parts 2·two and 2·two + 1 of a fold whose parts have eight.

    A thread loads four at once, two of each part, as a product leaves them: in fours, as the compiler sees it.
    """
    EACH: tl.constexpr = S.C // 4
    at = tl.arange(0, 16)
    return two // EACH * plane("nvfp4", S.K) + two % EACH * 16 + (at // 4 * 4 + at % 4)


@triton.jit
def apart(x):
    """``pair_columns`` of a tile [R, 16] as two parts [R, 8], in the same threads."""
    R: tl.constexpr = x.shape[0]
    a, b = tl.split(tl.permute(tl.reshape(x, [R, 4, 2, 2]), (0, 1, 3, 2)))
    return tl.reshape(a, [R, 8]), tl.reshape(b, [R, 8])


@triton.jit
def paired(a, b):
    """Two parts [R, 8] as the tile [R, 16] that they come from.

    What a thread has is then what tensor cores take from it, as the compiler sees joined tiles, and nothing moves.
    """
    R: tl.constexpr = a.shape[0]
    both = tl.reshape(tl.join(a, b), [R, 4, 2, 2])
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), [R, 16])


# Codes as float16 ----------------------------------------------------------------------------------------------------


@triton.jit
def small_floats(codes, BIAS: tl.constexpr, MANTISSA: tl.constexpr):
    """Floating-point codes of n bits, sign in front, as float16 numbers 2^(15 − BIAS) times smaller: bits moved."""
    code = codes.to(tl.uint16)
    TOP: tl.constexpr = 1 << (MANTISSA + (5 if BIAS == 15 else 4 if BIAS == 7 else 2))
    placed = ((code & TOP) * (0x8000 // TOP)) | ((code & (TOP - 1)) << (10 - MANTISSA))
    return placed.to(tl.float16, bitcast=True)


@triton.jit
def e4m3(codes, ARCH: tl.constexpr):
    """e4m3 codes (uint8) as float16."""
    if ARCH >= 89:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        return tl.where((codes & 0x7F) == 0x7F, float("nan"), small_floats(codes, 7, 3) * 256.0)


@triton.jit
def bytes_of(codes, ARCH: tl.constexpr):
    """int8 codes (as uint8) as float16: behind the bits of 1024, where a float16 counts by ones."""
    if ARCH > 0:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, y;
            mov.b32 y, 0x64806480;
            xor.b32 x, $2, 0x80808080;
            prmt.b32 $0, x, 0x64646464, 0x4140;
            prmt.b32 $1, x, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, y;
            sub.f16x2 $1, $1, y;
            }""",
            "=&r,=&r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return ((codes.to(tl.uint16) ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def nibbles_of(codes, ARCH: tl.constexpr):
    """The two planes of int4 codes as float16."""
    if ARCH > 0:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, y, a, b;
            mov.b32 y, 0x64086408;
            xor.b32 x, $4, 0x88888888;
            and.b32 a, x, 0x0F0F0F0F;
            shr.u32 b, x, 4;
            and.b32 b, b, 0x0F0F0F0F;
            prmt.b32 $0, a, 0x64646464, 0x4140;
            prmt.b32 $1, a, 0x64646464, 0x4342;
            prmt.b32 $2, b, 0x64646464, 0x4140;
            prmt.b32 $3, b, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, y;
            sub.f16x2 $1, $1, y;
            sub.f16x2 $2, $2, y;
            sub.f16x2 $3, $3, y;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        code = codes.to(tl.uint16) ^ 0x88
        low = ((code & 15) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        return low, ((code >> 4) | 0x6400).to(tl.float16, bitcast=True) - 1032.0


@triton.constexpr_function
def has_e2m1(arch):
    """Whether the GPU converts e2m1 to float16 in one instruction."""
    return arch >= 100


@triton.constexpr_function
def e2m1_unit(arch):
    """What ``e2m1`` is smaller by."""
    return 1.0 if has_e2m1(arch) else 2.0**14


@triton.constexpr_function
def tile_unit(word):
    """What four-bit tiles are smaller by than levels times block scales, so that float16 holds every factor."""
    return 2.0**7 if word == "nvfp4" else 1.0


@triton.constexpr_function
def block_unit(word, arch):
    """What makes such tiles of the levels as they are unpacked."""
    return e2m1_unit(arch) / tile_unit(word) if word == "nvfp4" else 1.0


@triton.jit
def e2m1(codes, ARCH: tl.constexpr):
    """The two planes of e2m1 codes as float16; 2^14 times smaller where bits are placed instead of converted."""
    if has_e2m1(ARCH):
        return tl.inline_asm_elementwise(
            """{
            .reg .b8 c<4>;
            .reg .b32 p<4>;
            mov.b32 {c0, c1, c2, c3}, $4;
            cvt.rn.f16x2.e2m1x2 p0, c0;
            cvt.rn.f16x2.e2m1x2 p1, c1;
            cvt.rn.f16x2.e2m1x2 p2, c2;
            cvt.rn.f16x2.e2m1x2 p3, c3;
            prmt.b32 $0, p0, p1, 0x5410;
            prmt.b32 $1, p2, p3, 0x5410;
            prmt.b32 $2, p0, p1, 0x7632;
            prmt.b32 $3, p2, p3, 0x7632;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    elif ARCH > 0:
        # Two bytes in the halves of a word each, from where sign and rest are moved up by multiplications, which do not
        # queue with logic; 0xEA is the truth table of (a & b) | c.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 b, d, x;
            prmt.b32 b, $4, 0, 0x4140;
            prmt.b32 d, $4, 0, 0x4342;
            mul.lo.u32 x, b, 4096;
            and.b32 $0, x, 0x80008000;
            mul.lo.u32 x, b, 512;
            lop3.b32 $0, x, 0x0E000E00, $0, 0xEA;
            mul.lo.u32 x, d, 4096;
            and.b32 $1, x, 0x80008000;
            mul.lo.u32 x, d, 512;
            lop3.b32 $1, x, 0x0E000E00, $1, 0xEA;
            mul.lo.u32 x, b, 256;
            and.b32 $2, x, 0x80008000;
            mul.lo.u32 x, b, 32;
            lop3.b32 $2, x, 0x0E000E00, $2, 0xEA;
            mul.lo.u32 x, d, 256;
            and.b32 $3, x, 0x80008000;
            mul.lo.u32 x, d, 32;
            lop3.b32 $3, x, 0x0E000E00, $3, 0xEA;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        return small_floats(codes & 15, 1, 1), small_floats(codes >> 4, 1, 1)


@triton.jit
def times(a, b, ARCH: tl.constexpr):
    """a · b in float16, two at once; the compiler would take them one by one."""
    if ARCH > 0:
        return tl.inline_asm_elementwise(
            "mul.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return a * b


@triton.jit
def levels(codes, WORD: tl.constexpr, ARCH: tl.constexpr):
    """Codes as numbers, a tuple of one tensor a plane. Plain formats as they are, others as float16."""
    if is_plain(WORD):
        return (codes,)
    elif WORD == "fp8":
        return (e4m3(codes, ARCH),)
    elif WORD == "fp8_e5m2":
        return (small_floats(codes, 15, 2),)
    elif WORD == "int8":
        return (bytes_of(codes, ARCH),)
    elif WORD == "int4":
        return nibbles_of(codes, ARCH)
    else:
        return e2m1(codes, ARCH)


# Reading -------------------------------------------------------------------------------------------------------------


@triton.jit
def load_codes(pointer, rows, live, columns, WORD: tl.constexpr, S: tl.constexpr):
    """Elements of the rows [BP] of a state as they are stored: [BP, N], for N ``columns`` of each plane.

    ``live`` is None where all rows are there: an element that a mask could leave out costs an instruction more.
    """
    ROW: tl.constexpr = plane(WORD, S.K)
    N: tl.constexpr = columns.shape[0]
    at = pointer + rows[:, None] * ROW + columns[None, :]
    if live is None and ROW // N * N == ROW:
        return tl.load(at)
    elif live is None:
        return tl.load(at, mask=(rows >= 0)[:, None] & (columns < ROW)[None, :], other=0)
    else:
        return tl.load(at, mask=live[:, None] & (columns < ROW)[None, :], other=0)


@triton.jit
def load_levels(pointer, rows, live, columns, WORD: tl.constexpr, S: tl.constexpr):
    """As ``load_codes``, as numbers: a tuple of [BP, N], one a plane."""
    return levels(load_codes(pointer, rows, live, columns, WORD, S), WORD, S.arch)


@triton.jit
def load_block_codes(pointer, rows, live, at, N: tl.constexpr, WORD: tl.constexpr, S: tl.constexpr):
    """Codes of the block scales of N elements of each plane, from ``at`` on: a tuple of two, of bytes [BP, N/16].

    Four at once as a word where they come so: loads of fewer than four bytes are waited for in a loop.
    """
    ROW: tl.constexpr = plane(WORD, S.K) // 16
    base = pointer + rows[:, None] * (2 * ROW) + at // 16
    live = rows >= 0 if live is None else live
    found = ()
    for part in tl.static_range(2):
        if (N % 64 == 0) and (ROW % 4 == 0):
            word = tl.arange(0, N // 64)[None, :]
            there = live[:, None] & (at // 64 + word < ROW // 4)
            codes = tl.load((base + part * ROW).to(tl.pointer_type(tl.int32)) + word, mask=there, other=0)
        else:
            block = tl.arange(0, N // 16)[None, :]
            codes = tl.load(base + part * ROW + block, mask=live[:, None] & (at // 16 + block < ROW), other=0)
        found = found + (codes,)
    return found


@triton.jit
def block_scales(codes, N: tl.constexpr, S: tl.constexpr):
    """What ``load_block_codes`` found of a plane as float16, one for each of its elements: [BP, N]."""
    BP: tl.constexpr = codes.shape[0]
    if codes.dtype == tl.int32:
        codes = (codes[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]).to(tl.uint8)
        codes = tl.reshape(codes, [BP, N // 16])
    return spread(e4m3(codes, S.arch), N)


@triton.jit
def load_blocks(pointer, rows, live, at, N: tl.constexpr, WORD: tl.constexpr, S: tl.constexpr):
    """Block scales as float16, one for each of N elements, from ``at`` on in each plane: a tuple of two [BP, N]."""
    codes = load_block_codes(pointer, rows, live, at, N, WORD, S)
    return block_scales(codes[0], N, S), block_scales(codes[1], N, S)


@triton.jit
def spread(blocks, N: tl.constexpr):
    """A number a block [BP, N/16], for each of its elements: [BP, N]."""
    ROWS: tl.constexpr = blocks.shape[0]
    return tl.reshape(tl.broadcast_to(blocks[:, :, None], [ROWS, N // 16, 16]), [ROWS, N])


@triton.jit
def fetch_state(layer, strides, where, rows, live, part, N: tl.constexpr, S: tl.constexpr):
    """What a step reads of the rows [BP] of the state in the slot ``where``, as it is stored; see ``fetched_state``."""
    WORD: tl.constexpr = S.read
    columns = by_turns(part, N) if takes_turns(S) and N == S.BK else part * N + tl.arange(0, N)
    codes = load_codes(layer.state + where * strides.state, rows, live, columns, WORD, S)
    if planes(WORD) == 1:
        return (codes,)
    else:
        blocks = load_block_codes(layer.scale + where * strides.scale, rows, live, part * N, N, WORD, S)
        return codes, blocks[0], blocks[1]


@triton.jit
def as_loaded(x, S: tl.constexpr):
    """x (32 bits) in the threads that loaded it, until here: the compiler would load it word by word, in the order of
    its use, or share it among threads, and wait for it, before it loads what comes behind.
    """
    if S.arch > 0 and (x.dtype == tl.float32 or x.dtype == tl.int32):
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    else:
        return x


@triton.jit
def fetched_state(fetched, N: tl.constexpr, S: tl.constexpr):
    """What ``fetch_state`` loaded: a tuple of tiles [BP, N], one a plane.

    The tile of plane n has the columns from ``part * N`` on in it: with N = BK ``columns_of`` piece
    ``part + n * S.C // planes(S.read)``. Plain formats come as they are stored; others as float16, exactly, and a sum
    over a row's elements is to be multiplied by ``row_scales``.
    """
    WORD: tl.constexpr = S.read
    found = levels(fetched[0], WORD, S.arch)
    if planes(WORD) == 1:
        return found
    else:
        UNIT: tl.constexpr = block_unit(WORD, S.arch)
        low, high = block_scales(as_loaded(fetched[1], S), N, S), block_scales(as_loaded(fetched[2], S), N, S)
        low, high = low * UNIT, high * UNIT
        return times(found[0], low, S.arch), times(found[1], high, S.arch)


@triton.jit
def read_state(layer, strides, where, rows, live, part, N: tl.constexpr, S: tl.constexpr):
    """``fetched_state`` of what is fetched at once."""
    return fetched_state(fetch_state(layer, strides, where, rows, live, part, N, S), N, S)


@triton.jit
def row_scales(layer, strides, where, head, rows, live, S: tl.constexpr):
    """What the sums over the rows [BP] of ``read_state`` are multiplied by: float32 [BP] or [1].

    ``head`` is the rows' head, or that of each.
    """
    if is_plain(S.read):
        return tl.full([1], 1.0, tl.float32)
    elif planes(S.read) == 1:
        return load_or(layer.scale + where * strides.scale, rows, rows >= 0 if live is None else live, 0.0)
    else:
        scale = tl.load(layer.head_scale + where * strides.head_scale + head)
        return tl.full([1], tile_unit(S.read), tl.float32) * scale


@triton.jit
def load_state(state, scale, head_scale, head, rows, live, WORD: tl.constexpr, S: tl.constexpr):
    """The rows [BP] of a head in float32, as ``Format.decode`` has them to the bit: a tuple of C parts [BP, BK].

    The columns of a part are ``fold_columns``.
    """
    C: tl.constexpr = S.C
    BK: tl.constexpr = S.BK
    parts = ()
    if planes(WORD) == 2:
        UNIT: tl.constexpr = e2m1_unit(S.arch) if WORD == "nvfp4" else 1.0
        whole = tl.load(head_scale + head)
        behind = ()
        for part in tl.static_range(C // 2):
            found = load_levels(state, rows, live, part * BK + tl.arange(0, BK), WORD, S)
            blocks = load_blocks(scale, rows, live, part * BK, BK, WORD, S)
            parts = parts + (found[0].to(tl.float32) * UNIT * (blocks[0].to(tl.float32) * whole),)
            behind = behind + (found[1].to(tl.float32) * UNIT * (blocks[1].to(tl.float32) * whole),)
        return parts + behind
    elif BK == 8:
        for two in tl.static_range(C // 2):
            found = apart(load_levels(state, rows, live, pair_columns(two, S), WORD, S)[0])
            parts = parts + (found[0].to(tl.float32), found[1].to(tl.float32))
        return parts
    else:
        for part in tl.static_range(C):
            found = load_levels(state, rows, live, fold_columns(part, S), WORD, S)[0].to(tl.float32)
            if not is_plain(WORD):
                found *= tl.load(scale + rows, mask=live, other=0.0)[:, None]
            parts = parts + (found,)
        return parts


# Storing -------------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def element(word):
    """What a pointer to a format's elements points to."""
    return {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}.get(word, tl.uint8)


@triton.constexpr_function
def scale_element(word):
    """What a pointer to the scales of rows or blocks points to."""
    return tl.uint8 if word in ("int4", "nvfp4") else tl.float32


@triton.constexpr_function
def top(word):
    """The largest number of a format with scales, as ``replayssm.formats`` has it."""
    return {"fp8": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int4": 7.0, "nvfp4": 6.0}[word]


@triton.constexpr_function
def head_top(word):
    """The largest number of a four-bit format in units of a head's scale."""
    return top(word) * 448.0


@triton.constexpr_function
def bias(word):
    """The exponent bias of a floating-point format; 0 for integers."""
    return {"fp8": 7, "fp8_e5m2": 15, "nvfp4": 1}.get(word, 0)


@triton.constexpr_function
def mantissa(word):
    """The mantissa bits of a floating-point format."""
    return {"fp8": 3, "fp8_e5m2": 2, "nvfp4": 1}.get(word, 0)


@triton.jit
def nearest_code(x, BIAS: tl.constexpr, MANTISSA: tl.constexpr):
    """The code of x ≥ 0 (float32, within range), of two equally close ones the even one, as int32.

    To a number 2^(23 − MANTISSA) times its power of two, or that of the smallest normal one, x is added in units of its
    last digit. The exponent goes on top; how the two count from zero differs by a number that comes with the former.
    """
    CODES: tl.constexpr = 1 << (3 if BIAS == 1 else 7)
    SHARE: tl.constexpr = 1 << MANTISSA
    MORE: tl.constexpr = ((BIAS - 128) * SHARE) % CODES
    power = tl.maximum(x, 2.0 ** (1 - BIAS)).to(tl.int32, bitcast=True) & 0x7F800000
    digits = power.to(tl.float32, bitcast=True) * (2.0 ** (23 - MANTISSA) + MORE / SHARE) + x
    return (digits.to(tl.int32, bitcast=True) + (power >> (23 - MANTISSA))) & (CODES - 1)


@triton.jit
def number(code, BIAS: tl.constexpr, MANTISSA: tl.constexpr):
    """A floating-point code as float32."""
    return small_floats(code, BIAS, MANTISSA).to(tl.float32) * (2.0 ** (15 - BIAS))


@triton.jit
def value_of(code, WORD: tl.constexpr):
    """What a code (uint8) of a format with scales stands for, as float32."""
    if WORD == "int8":
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    elif WORD == "int4":
        return ((code.to(tl.int32) ^ 8) - 8).to(tl.float32)
    else:
        return number(code, bias(WORD), mantissa(WORD))


@triton.jit
def rounded(x, bits, WORD: tl.constexpr, ARCH: tl.constexpr):
    """Codes of x, which is in units of its scale: of the closest number within range without bits.

    In int32, whose higher bits are the sign's, or in uint8 where the GPU converts.
    """
    BIAS: tl.constexpr = bias(WORD)
    MANTISSA: tl.constexpr = mantissa(WORD)
    TOP: tl.constexpr = top(WORD)
    if BIAS == 0:
        x = tl.minimum(tl.maximum(x, -TOP), TOP)
        if bits is None:
            return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        else:
            size = tl.abs(x)
            low = tl.floor(size)
            code = low.to(tl.int32) + below(bits, size - low).to(tl.int32)
            return tl.where(x < 0, -code, code)
    elif bits is None and ARCH >= 89 and MANTISSA > 1:
        return x.to(tl.float8e4nv if BIAS == 7 else tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        size = tl.minimum(tl.abs(x), TOP)
        if bits is None:
            code = nearest_code(size, BIAS, MANTISSA)
        elif WORD == "nvfp4":
            # On this piecewise linear scale the levels are whole numbers.
            line = tl.where(size < 2, 2 * size, tl.where(size < 4, size + 2, size * 0.5 + 4))
            low = tl.floor(line)
            code = low.to(tl.int32) + below(bits, line - low).to(tl.int32)
        else:
            code = nearest_code(size, BIAS, MANTISSA)
            code -= (number(code, BIAS, MANTISSA) > size).to(tl.int32)
            low = number(code, BIAS, MANTISSA)
            fraction = tl.div_rn(size - low, number(code + 1, BIAS, MANTISSA) - low)
            code += below(bits, fraction).to(tl.int32)
        SIGN: tl.constexpr = 3 if WORD == "nvfp4" else 7
        return code | ((x.to(tl.int32, bitcast=True) >> (31 - SIGN)) & (-1 << SIGN))


@triton.jit
def scale_of(largest, TOP: tl.constexpr):
    """The scale that brings ``largest`` to TOP: 0 for 0, NaN for what is not finite."""
    SHARE: tl.constexpr = (1 - 2.0**-22) / TOP
    scale = tl.where(largest > 0, tl.maximum(largest * SHARE, 2.0**-100), 0.0)
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def reciprocal(scale):
    """1/scale; 0 where the scale is 0 or NaN."""
    one = tl.full(scale.shape, 1.0, tl.float32)
    return tl.where(scale > 0, tl.div_rn(one, tl.where(scale > 0, scale, one)), 0.0)


@triton.jit
def both(a, b, ARCH: tl.constexpr):
    """a & b (uint8), four at once; the compiler would take them one by one."""
    if ARCH > 0:
        return tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        return a & b


@triton.constexpr_function
def first_column(part, state_dim, parts, columns):
    """Where ``fold_columns`` of a part begin, those of two parts of eight where the first of them does."""
    each = parts // 2
    place = part % each // 2 * 16 if columns == 8 else part % each * columns
    return part // each * plane("nvfp4", state_dim) + place


@triton.constexpr_function
def drawn_with(part, state_dim, parts, columns):
    """The part 32 columns before this one, whose words have its bits; itself where its columns are the first of a pair;
    −1 where they are either.
    """
    first = first_column(part, state_dim, parts, columns)
    if first % 32 + max(16, columns) > 32:
        return -1
    if first % 64 < 32:
        return part
    for other in range(part):
        alike = columns > 8 or other % 2 == part % 2
        if alike and first_column(other, state_dim, parts, columns) == first - 32:
            return other
    return -1


@triton.jit
def draw(random, words, rows, part, S: tl.constexpr):
    """The bits that round a part, and ``words``, what was drawn for the parts before, with what was drawn for this one.

    ``random`` is the seed, the layer and the number of the rounding. See ``rounding.random_bits``. What is not among
    the words is drawn again.
    """
    WITH: tl.constexpr = drawn_with(part, S.K, S.C, S.BK)
    column = fold_columns(part, S)
    if WITH == -1 or part == WITH or len(words) <= WITH:
        index = rows[:, None] * S.K + (column - (column & 32))[None, :]
        word = random_words(random[0], random[1], random[2], index)
    else:
        word = words[WITH]
    if WITH == -1:
        return bits_of(word, (column & 32)[None, :] > 0), words + (word,)
    else:
        return bits_of(word, part != WITH), words + (word,)


@triton.jit
def larger(a, b):
    """The larger of two numbers; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(x):
    """The largest magnitude in each row of x; NaN if one is."""
    return tl.reduce(tl.abs(x), len(x.shape) - 1, larger)


@triton.jit
def store_rows(state, scale, parts, random, rows, live, WORD: tl.constexpr, S: tl.constexpr):
    """Encode and store with a scale per row; return what it then holds, as float32."""
    C: tl.constexpr = S.C
    largest = largest_of(parts[0])
    for part in tl.static_range(1, C):
        largest = larger(largest, largest_of(parts[part]))
    scales = scale_of(largest, top(WORD))
    tl.store(scale + rows, scales, mask=live)
    inverse = reciprocal(scales)[:, None]
    keep = tl.where(scales > 0, 0xFF, 0).to(tl.uint8)[:, None]
    held, words = (), ()
    for part in tl.static_range(C):
        columns = fold_columns(part, S)
        bits = None
        if random is not None:
            bits, words = draw(random, words, rows, part, S)
        codes = rounded(parts[part] * inverse, bits, WORD, S.arch).to(tl.uint8)
        codes = both(codes, tl.broadcast_to(keep, codes.shape), S.arch)
        inside = live[:, None] & (columns < S.K)[None, :]
        tl.store(state + rows[:, None] * S.K + columns[None, :], codes, mask=inside)
        held = held + (value_of(codes, WORD) * scales[:, None],)
    return held


@triton.jit
def encode_blocks(x, bits, whole, WORD: tl.constexpr, S: tl.constexpr):
    """Codes of x [BP, BK], their block scales [BP, BK/16] for the head scale ``whole``, and the codes of these.

    Codes have other bits above their four, and are to be 0 where the scale is 0 or NaN.
    """
    TOP: tl.constexpr = top(WORD)
    BP: tl.constexpr = x.shape[0]
    BK: tl.constexpr = x.shape[1]
    largest = largest_of(tl.reshape(x, [BP, BK // 16, 16]))
    ratio = largest * (reciprocal(whole) * (1 / TOP))
    block = nearest_code(tl.minimum(ratio, 448.0), 7, 3)
    if bits is not None:
        # A scale that saturates its block would be a bias.
        block = tl.where(number(block, 7, 3) < ratio, tl.minimum(block + 1, 0x7E), block)
    sound = largest < float("inf")
    scales = tl.where(sound, number(block, 7, 3), float("nan")) * whole
    codes = rounded(x * spread(reciprocal(scales), BK), bits, WORD, S.arch)
    return codes, scales, tl.where(sound, block, 0x7F).to(tl.uint8)


@triton.jit
def largest_finite(parts):
    """The largest finite magnitude of all parts."""
    largest = 0.0
    for part in tl.static_range(len(parts)):
        size = tl.abs(parts[part])
        most = tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0)
        largest = tl.maximum(largest, most)
    return largest


@triton.jit
def store_blocks(state, scale, whole, parts, random, rows, live, WORD: tl.constexpr, S: tl.constexpr):
    """Encode and store rows of a head with a scale per 16 elements; return what they then hold, as float32.

    ``whole`` is the head's scale, which comes from all of its rows.
    """
    BK: tl.constexpr = S.BK
    EACH: tl.constexpr = S.C // 2
    ROW: tl.constexpr = plane(WORD, S.K)
    held, behind = (), ()
    for part in tl.static_range(EACH):
        low_bits, high_bits = None, None
        if random is not None:
            low_bits, _ = draw(random, (), rows, part, S)
            high_bits, _ = draw(random, (), rows, part + EACH, S)
        low, low_scale, low_block = encode_blocks(parts[part], low_bits, whole, WORD, S)
        high, high_scale, high_block = encode_blocks(parts[part + EACH], high_bits, whole, WORD, S)
        keep = tl.where(low_scale > 0, 0x0F, 0) | tl.where(high_scale > 0, 0xF0, 0)
        codes = both(((low & 15) | (high << 4)).to(tl.uint8), spread(keep.to(tl.uint8), BK), S.arch)
        byte = part * BK + tl.arange(0, BK)
        inside = live[:, None] & (byte < ROW)[None, :]
        tl.store(state + rows[:, None] * ROW + byte[None, :], codes, mask=inside)
        block = part * (BK // 16) + tl.arange(0, BK // 16)
        inside = live[:, None] & (block < ROW // 16)[None, :]
        at = scale + rows[:, None] * (ROW // 8) + block[None, :]
        tl.store(at, low_block, mask=inside)
        tl.store(at + ROW // 16, high_block, mask=inside)
        held = held + (value_of(codes & 15, WORD) * spread(low_scale, BK),)
        behind = behind + (value_of(codes >> 4, WORD) * spread(high_scale, BK),)
    return held + behind


@triton.jit
def store_state(state, scale, head_scale, parts, random, head, rows, live, WORD: tl.constexpr, S: tl.constexpr):
    """Store what ``load_state`` loads, zero outside of the head; return what it then holds, in parts as well.

    ``random`` is for stochastic rounding: see ``draw``; or None. Four-bit formats need all rows of the head.
    """
    C: tl.constexpr = S.C
    if planes(WORD) == 2:
        whole = scale_of(largest_finite(parts), head_top(WORD))
        tl.store(head_scale + head, whole)
        return store_blocks(state, scale, whole, parts, random, rows, live, WORD, S)
    elif not is_plain(WORD):
        return store_rows(state, scale, parts, random, rows, live, WORD, S)
    else:
        news, held, words = (), (), ()
        for part in tl.static_range(C):
            if random is None:
                new = parts[part].to(element(WORD))
            else:
                bits, words = draw(random, words, rows, part, S)
                new = round_stochastic(parts[part], bits, element(WORD), S.arch)
            news = news + (new,)
            held = held + (new.to(tl.float32),)
        TOGETHER: tl.constexpr = 2 if S.BK == 8 else 1
        for some in tl.static_range(C // TOGETHER):
            columns = pair_columns(some, S) if TOGETHER == 2 else fold_columns(some, S)
            new = paired(news[2 * some], news[2 * some + 1]) if TOGETHER == 2 else news[some]
            inside = live[:, None] & (columns < S.K)[None, :]
            tl.store(state + rows[:, None] * S.K + columns[None, :], new, mask=inside)
        return held


# Written values ------------------------------------------------------------------------------------------------------


@triton.jit
def store_written(written, low, scales, place, p, u, live, S: tl.constexpr):
    """Store u [E, BP] as entries ``place`` [E, 1] of a head, in the format that the pointers tell; p is [1, BP].

    ``low`` is there for the sum of two numbers, ``scales`` for float16 with a power of two per entry, of which BP must
    be all then.
    """
    if scales is not None:
        size = tl.where(live & (tl.abs(u) < float("inf")), tl.abs(u), 0.0)
        largest = tl.max(size, 1, keep_dims=True)
        # frexp's exponent less 15, at least −100, and that where the number is denormal.
        power = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 141, -100)
        power = tl.where(largest > 0, power, 0)
        there = tl.max(live.to(tl.int32), 1, keep_dims=True) > 0
        tl.store(scales + place, ((power + 127) << 23).to(tl.float32, bitcast=True), mask=there)
        u = u * ((127 - power) << 23).to(tl.float32, bitcast=True)
    high = u.to(written.dtype.element_ty)
    tl.store(written + place * S.P + p, high, mask=live)
    if low is not None:
        tl.store(low + place * S.P + p, (u - high.to(tl.float32)).to(low.dtype.element_ty), mask=live)
