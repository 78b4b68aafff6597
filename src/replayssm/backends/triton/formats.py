"""State formats on the device: how ``replayssm.formats`` decodes, to the bit, and what a step reads.

A format is a word (its name in ``replayssm.formats``); the functions here are the only ones that ask which. Elements
of formats with scales are read exactly as float16 numbers; scales of rows and heads are left to whoever sums them up.
"""

# The language of kernels is no Python: a type checker sees constexpr records and tensors as other things.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


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


# Columns -------------------------------------------------------------------------------------------------------------


@triton.jit
def columns_of(piece, S: tl.constexpr):
    """Columns [BK] of one of the C pieces of a row; K where there is none. Pieces of the first plane come first."""
    EACH: tl.constexpr = S.C // planes(S.read)
    HALF: tl.constexpr = plane(S.read, S.K)
    at = piece % EACH * S.BK + tl.arange(0, S.BK)
    if (EACH == S.C) or (HALF == EACH * S.BK):
        return piece // EACH * HALF + at
    else:
        return tl.where(at < HALF, piece // EACH * HALF + at, S.K)


@triton.jit
def whole_columns(S: tl.constexpr):
    """Columns [BK] of a tile that has all of them; K where there is none."""
    HALF: tl.constexpr = plane(S.read, S.K)
    WIDTH: tl.constexpr = S.BK // planes(S.read)
    at = tl.arange(0, S.BK)
    if (WIDTH == S.BK) or (WIDTH == HALF):
        return at
    else:
        return tl.where(at % WIDTH < HALF, at // WIDTH * HALF + at % WIDTH, S.K)


@triton.jit
def joined(tiles, WORD: tl.constexpr):
    """Tiles [BP, N], one a plane, side by side."""
    if planes(WORD) == 1:
        return tiles[0]
    else:
        ROWS: tl.constexpr = tiles[0].shape[0]
        WIDTH: tl.constexpr = tiles[0].shape[1]
        return tl.reshape(tl.permute(tl.join(tiles[0], tiles[1]), (0, 2, 1)), [ROWS, 2 * WIDTH])


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
        # The low nibble of a byte goes to the top of one half of a word, the high one to that of another; 0xEA is the
        # truth table of (a & b) | c.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, x;
            prmt.b32 b, $4, 0, 0x1404;
            prmt.b32 d, $4, 0, 0x3424;
            shl.b32 a, b, 4;
            shl.b32 c, d, 4;
            and.b32 $0, a, 0x80008000;
            and.b32 $1, c, 0x80008000;
            and.b32 $2, b, 0x80008000;
            and.b32 $3, d, 0x80008000;
            shr.u32 x, a, 3;
            lop3.b32 $0, x, 0x0E000E00, $0, 0xEA;
            shr.u32 x, c, 3;
            lop3.b32 $1, x, 0x0E000E00, $1, 0xEA;
            shr.u32 x, b, 3;
            lop3.b32 $2, x, 0x0E000E00, $2, 0xEA;
            shr.u32 x, d, 3;
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
def load_levels(pointer, first, live, at, WIDTH: tl.constexpr, WORD: tl.constexpr, S: tl.constexpr):
    """``WIDTH`` elements, from ``at`` on in each plane, of BP rows from ``first`` on: a tuple of [BP, WIDTH]."""
    ROW: tl.constexpr = plane(WORD, S.K)
    columns = at + tl.arange(0, WIDTH)[None, :]
    rows = pointer + first * ROW + tl.arange(0, S.BP)[:, None] * ROW
    return levels(tl.load(rows + columns, mask=live[:, None] & (columns < ROW), other=0), WORD, S.arch)


@triton.jit
def load_blocks(pointer, first, live, at, WIDTH: tl.constexpr, WORD: tl.constexpr, S: tl.constexpr):
    """The block scales of what ``load_levels`` loads, as float16."""
    ROW: tl.constexpr = plane(WORD, S.K) // 16
    N: tl.constexpr = WIDTH // 16
    block = at // 16 + tl.arange(0, N)[None, :]
    rows = pointer + first * (2 * ROW) + tl.arange(0, S.BP)[:, None] * (2 * ROW)
    scales = ()
    for part in tl.static_range(2):
        codes = tl.load(rows + part * ROW + block, mask=live[:, None] & (block < ROW), other=0)
        wide = tl.broadcast_to(e4m3(codes, S.arch)[:, :, None], [S.BP, N, 16])
        scales = scales + (tl.reshape(wide, [S.BP, WIDTH]),)
    return scales


@triton.jit
def read_state(layer, strides, where, first, live, part, WIDTH: tl.constexpr, S: tl.constexpr):
    """What a step reads of BP rows, from row ``first`` of the slot ``where`` on: a tuple of tiles, one a plane.

    Tile n has ``WIDTH`` columns from ``part * WIDTH`` on in plane n (``columns_of`` the piece
    ``part + n * S.C // planes(S.read)`` where WIDTH is BK). Plain formats come as they are stored; others as float16,
    exactly, and a sum over a row's elements is to be multiplied by ``row_scales``.
    """
    WORD: tl.constexpr = S.read
    found = load_levels(layer.state + where * strides.state, first, live, part * WIDTH, WIDTH, WORD, S)
    if planes(WORD) == 1:
        return found
    else:
        scales = load_blocks(layer.scale + where * strides.scale, first, live, part * WIDTH, WIDTH, WORD, S)
        UNIT: tl.constexpr = block_unit(WORD, S.arch)
        return found[0] * (scales[0] * UNIT), found[1] * (scales[1] * UNIT)


@triton.jit
def row_scales(layer, strides, where, head, first, live, S: tl.constexpr):
    """What the sums over the rows of ``read_state`` are multiplied by: [BP] float32, or one number."""
    if is_plain(S.read):
        return 1.0
    elif planes(S.read) == 1:
        scales = layer.scale + where * strides.scale + first
        return tl.load(scales + tl.arange(0, S.BP), mask=live, other=0.0)
    else:
        return tl.load(layer.head_scale + where * strides.head_scale + head) * tile_unit(S.read)


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
