"""Codes of fp8, and tiles that leave by rows and as their transpose.

A tile comes as four tensors: row t of the i-th is row 4t + i of the tile. So a thread holds four
neighbors of each of its columns, packs their codes into one 32-bit word, and the transpose moves
words between threads, not bytes.

Dimensions: R rows, RP of them with padding, C columns; tiles of TILE_ROWS rows and TILE_COLS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import INTERPRETED

# ptxas 12.8, which Triton 3.6 brings, miscompiles Triton's own casts where their codes are both
# stored and shifted into words; the interpreter has no assembly.
ASSEMBLY = tl.constexpr(not INTERPRETED)
HUGE = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _interpreted_codes(v, E5M2: tl.constexpr):
    """Rounded to the grid before the cast, in which the interpreter loses carries."""
    mantissa: tl.constexpr = 2 if E5M2 else 3
    least_exponent: tl.constexpr = -14 if E5M2 else -6
    top: tl.constexpr = 57344.0 if E5M2 else 448.0
    bits = v.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80  # rounding drops that of a zero
    bounded = tl.minimum(tl.maximum(v, -top), top)
    exponent = ((bounded.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    # Added to a value, 1.5 · 2^(e - mantissa + 23) leaves no bits below the grid's spacing.
    shift = (tl.maximum(exponent, least_exponent) - mantissa + 23 + 127) << 23
    rounder = shift.to(tl.float32, bitcast=True) * 1.5
    rounded = (bounded + rounder) - rounder
    codes = rounded.to(tl.float8e5 if E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7F, codes | sign.to(tl.uint8)).to(tl.uint8)


@triton.jit
def codes_of(v, E5M2: tl.constexpr):
    """Codes (uint8) of fp32 values: rounded to nearest even, saturating; NaN stays NaN."""
    if not ASSEMBLY:
        codes = _interpreted_codes(v, E5M2)
    elif E5M2:
        codes = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f", [v], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        codes = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f", [v], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    return codes


@triton.jit
def pairs_of(v0, v1, E5M2: tl.constexpr):
    """Codes of two neighboring rows in one (uint16), the first one in the lower byte."""
    if not ASSEMBLY:
        low, high = _interpreted_codes(v0, E5M2), _interpreted_codes(v1, E5M2)
        pairs = low.to(tl.uint16) | (high.to(tl.uint16) << 8)
    elif E5M2:
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;",
            "=h,f,f", [v0, v1], dtype=tl.uint16, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,f,f", [v0, v1], dtype=tl.uint16, is_pure=True, pack=1,
        )  # fmt: skip
    return pairs


@triton.jit
def words_of(low, high):
    """Codes of four neighboring rows in one word (uint32), from two pairs."""
    if not ASSEMBLY:
        words = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    else:
        words = tl.inline_asm_elementwise(
            "mov.b32 $0, {$1, $2};",
            "=r,h,h", [low, high], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def larger(a, b):
    """The larger one, element by element; NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of_four(v0, v1, v2, v3):
    """The largest absolute value of four, element by element; NaN if one of them is."""
    return larger(larger(tl.abs(v0), tl.abs(v1)), larger(tl.abs(v2), tl.abs(v3)))


@triton.jit
def largest_along(sizes, AXIS: tl.constexpr):
    """The largest one of absolute values along an axis; NaN if one of them is.

    They are ordered as their bits are as integers, NaN above infinity.
    """
    return tl.max(sizes.to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)


@triton.jit
def raise_amax(amax_ptr, sizes):
    """``amax`` becomes the larger one of itself and of a tile's absolute values.

    As integers, so that the order of programs does not matter and NaN wins.
    """
    most = largest_along(largest_along(sizes, 1), 0).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), most, sem="relaxed")


@triton.jit
def inverse_of(scale, POWER_OF_TWO: tl.constexpr = False):
    """``1 / s`` as plain torch rounds it; of a power of two by its exponent, as a division is long.

    2^-127, of 2^127, is the one that has no exponent of its own.
    """
    if POWER_OF_TWO:
        bits = tl.maximum(0x7F000000 - scale.to(tl.int32, bitcast=True), 0x00400000)
        inverse = tl.where(scale < float("inf"), bits.to(tl.float32, bitcast=True), scale)
    else:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return inverse


@triton.jit
def scale_to(top, amax, POWER_OF_TWO: tl.constexpr):
    """The scale that takes amax to ``top``, as ``quantize_plain.scale_for`` defines it.

    Bits of floats are steps of their logarithms, all of one size but for fractions. So a difference
    of bits has the exponent of the quotient, which no rounding raises: no quotient of two fractions
    is so close below a power of two. 2^127 is the largest that there is.
    """
    if POWER_OF_TWO:
        least = top.to(tl.int32, bitcast=True) - 0x3F800000  # amax of the largest scale
        above = tl.maximum(amax.to(tl.int32, bitcast=True) - least, 0)
        scale = ((0x7F000000 - above) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(amax == 0.0, 1.0, scale)
    else:
        scale = tl.minimum(tl.div_rn(top, tl.where(amax == 0.0, top, amax)), HUGE)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def scale_of(amax, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale of what is at most amax, as ``quantize_plain.scale_for`` defines it."""
    top = tl.full(amax.shape, 57344.0 if E5M2 else 448.0, tl.float32)
    return scale_to(top, amax, POWER_OF_TWO)


@triton.jit
def scale_from(number, E5M2: tl.constexpr, MEASURED: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale of a tensor: ``number``, or, if MEASURED, that of the amax which it is.

    Late, where it is first needed, the division takes no registers beside tiles under way.
    """
    if MEASURED:
        number = scale_of(number, E5M2, POWER_OF_TWO)
    return number


@triton.jit
def place(RP, C, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, GROUP: tl.constexpr):
    """The tile of this program, by row and column of tiles.

    GROUP neighbors along a column follow one another, and complete the transpose's cache lines.
    """
    across = tl.cdiv(C, TILE_COLS)
    down = RP // TILE_ROWS
    at = tl.program_id(0)
    first = at // (GROUP * across) * GROUP
    size = tl.minimum(GROUP, down - first)
    at %= GROUP * across
    return first + at % size, at // size


@triton.jit
def tile_rows(tile_row, TILE_ROWS: tl.constexpr):
    """Rows of the first of the four tensors of a tile, (TILE_ROWS / 4, 1)."""
    return (tile_row * TILE_ROWS + 4 * tl.arange(0, TILE_ROWS // 4)).to(tl.int64)[:, None]


@triton.jit
def tile_cols(tile_col, TILE_COLS: tl.constexpr):
    """Columns of a tile, (TILE_COLS,)."""
    return tile_col * TILE_COLS + tl.arange(0, TILE_COLS)


@triton.jit
def in_row(col, VEC: tl.constexpr):
    """Columns as (1, TILE_COLS) for loads and stores by rows, with VEC of them per thread.

    So whatever the type; else each type had a layout of its own, and values changed threads on the
    way from loads to stores. VEC neighbors are at successive places, from a multiple of VEC on.
    """
    return tl.max_contiguous(tl.multiple_of(col[None, :], (1, VEC)), (1, VEC))


@triton.jit
def load(ptr, inside, EVEN: tl.constexpr):
    """Elements, zeros outside; EVEN says that none is."""
    return tl.load(ptr) if EVEN else tl.load(ptr, mask=inside, other=0.0)


@triton.jit
def load_four(ptr, row, stride, at, R, within, EVEN: tl.constexpr):
    """The four tensors of a tile, at ``at`` in their rows; ``within`` says which columns exist.

    All are loaded before anything is stored: the assembler would not move a load across a store.
    """
    ptr += row * stride + at
    v0 = load(ptr, (row < R) & within, EVEN)
    v1 = load(ptr + stride, (row + 1 < R) & within, EVEN)
    v2 = load(ptr + 2 * stride, (row + 2 < R) & within, EVEN)
    v3 = load(ptr + 3 * stride, (row + 3 < R) & within, EVEN)
    return v0, v1, v2, v3


@triton.jit
def times(v, scale, row, R, EVEN: tl.constexpr):
    """``v s``; 0 in padding, also where s is NaN."""
    scaled = v * scale
    if not EVEN:
        scaled = tl.where(row < R, scaled, 0.0)
    return scaled


@triton.jit
def four_times(v0, v1, v2, v3, scale, row, R, EVEN: tl.constexpr):
    """The four tensors of a tile times the scale; 0 in padding."""
    v0 = times(v0, scale, row, R, EVEN)
    v1 = times(v1, scale, row + 1, R, EVEN)
    v2 = times(v2, scale, row + 2, R, EVEN)
    v3 = times(v3, scale, row + 3, R, EVEN)
    return v0, v1, v2, v3


@triton.jit
def store_row(ptr, row, stride, at, within, v, E5M2: tl.constexpr, EVEN: tl.constexpr):
    """Codes of one of a tile's four tensors, by rows, as :func:`load_four` loads."""
    ptr = ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + row * stride + at
    tl.store(ptr, codes_of(v, E5M2), mask=None if EVEN else (row >= 0) & within)


@triton.jit
def store_rows(
    ptr, row, stride, at, within, v0, v1, v2, v3, E5M2: tl.constexpr, EVEN: tl.constexpr
):
    """Codes of a tile, by rows."""
    store_row(ptr, row, stride, at, within, v0, E5M2, EVEN)
    store_row(ptr, row + 1, stride, at, within, v1, E5M2, EVEN)
    store_row(ptr, row + 2, stride, at, within, v2, E5M2, EVEN)
    store_row(ptr, row + 3, stride, at, within, v3, E5M2, EVEN)


@triton.jit
def store_row_block(ptr, row, stride, at, v, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Codes of one of a tile's four tensors by rows with a scale for each row, which it returns."""
    scale = scale_of(largest_along(tl.abs(v), 1)[:, None], E5M2, POWER_OF_TWO)
    store_row(ptr, row, stride, at, None, v * scale, E5M2, True)
    return scale


@triton.jit
def store_row_scales(
    ptr, row, block, RP, s0, s1, s2, s3, POWER_OF_TWO: tl.constexpr, LANES: tl.constexpr
):
    """1 / s of the rows of a tile to ptr (…, RP); LANES is how many threads share a row.

    Each of four of these threads stores the scale of one of the four rows that they share: so no
    scale changes threads, which would take shared memory and barriers.
    """
    # So one thread has one of them; else Triton would give it as many as fill an aligned access.
    which = tl.multiple_of(tl.arange(0, LANES)[None, :], (1, 1))
    scale = tl.where(which < 2, tl.where(which == 0, s0, s1), tl.where(which == 2, s2, s3))
    ptr += block.to(tl.int64) * RP + row + which
    tl.store(ptr, inverse_of(scale, POWER_OF_TWO), mask=(which < 4) & (row >= 0))


@triton.jit
def store_row_blocks(
    ptr, scale_ptr, row, stride, at, block, RP, v0, v1, v2, v3,
    E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Codes of a tile by rows with a scale for each row, and 1 / s, (…, RP).

    ``block`` says which one of a row the tile's columns are, all of which exist.
    """
    s0 = store_row_block(ptr, row, stride, at, v0, E5M2, POWER_OF_TWO)
    s1 = store_row_block(ptr, row + 1, stride, at, v1, E5M2, POWER_OF_TWO)
    s2 = store_row_block(ptr, row + 2, stride, at, v2, E5M2, POWER_OF_TWO)
    s3 = store_row_block(ptr, row + 3, stride, at, v3, E5M2, POWER_OF_TWO)
    store_row_scales(scale_ptr, row, block, RP, s0, s1, s2, s3, POWER_OF_TWO, LANES)


@triton.jit
def col_scale_of(ptr, sizes, tile_row, stride, at, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale of each column of a tile from absolute values; 1 / s is stored."""
    scale = scale_of(largest_along(sizes, 0)[None, :], E5M2, POWER_OF_TWO)
    ptr += tile_row.to(tl.int64) * stride + at
    # Of the threads that have it one stores it; in a single row it would change threads before.
    first = tl.arange(0, sizes.shape[0])[:, None] == 0
    inverse = tl.broadcast_to(inverse_of(scale, POWER_OF_TWO), sizes.shape)
    tl.store(tl.broadcast_to(ptr, sizes.shape), inverse, mask=tl.broadcast_to(first, sizes.shape))
    return scale


@triton.jit
def square_scale_of(sizes, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale of a whole tile from absolute values."""
    return scale_of(largest_along(largest_along(sizes, 1), 0), E5M2, POWER_OF_TWO)


@triton.jit
def store_square_scale(ptr, scale, down, along, count, POWER_OF_TWO: tl.constexpr):
    """1 / s of a tile to ptr (…, up4(count)), at (down, along)."""
    tl.store(ptr + down * (tl.cdiv(count, 4) * 4) + along, inverse_of(scale, POWER_OF_TWO))


@triton.jit
def store_sums(ptr, tile_row, C, line, within, v):
    """Sums of a tile's columns, to sums (T, C) of T tiles, from the sum of its four tensors."""
    at = ptr + tile_row.to(tl.int64) * C + line
    tl.store(at, tl.sum(v, axis=0).to(ptr.dtype.element_ty), mask=within)


@triton.jit
def store_cols(
    ptr, line, within, tile_row, RP, low, high, EVEN: tl.constexpr, TILE_ROWS: tl.constexpr
):
    """Pairs of codes of a tile, transposed: its columns to the rows ``line`` of ptr (…, RP)."""
    word = tile_row * (TILE_ROWS // 4) + tl.arange(0, TILE_ROWS // 4)
    ptr = ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    ptr += line.to(tl.int64)[:, None] * (RP // 4) + word[None, :]
    inside = None if EVEN else within[:, None] & (word >= 0)[None, :]
    tl.store(ptr, tl.trans(words_of(low, high)), mask=inside)
