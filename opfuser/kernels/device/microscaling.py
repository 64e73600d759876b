"""Matrices to MXFP8 and NVFP4, by rows, as their transpose or both; a tile per program.

Dimensions: R rows, RP of them with padding, C columns; blocks of B values, 32 or 16; T tiles down
a column. Scales are bytes in the order of ``microscaling_plain.swizzled``. What is None is left
out. With GROUPS, rows are those of G groups as in ``groups``, of R rows each without ``ends``, and
RP are those where each group is padded; codes by rows have no padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import (
    ASSEMBLY,
    HUGE,
    four_times,
    in_row,
    inverse_of,
    largest_of_four,
    load,
    load_four,
    pairs_of,
    place,
    store_cols,
    store_row,
    store_sums,
    tile_cols,
    tile_rows,
)
from .groups import load_rows, rows_of_tile
from .philox import philox

SIXTH = tl.constexpr(0.1666666716337204)


@triton.jit
def _largest_in(sizes, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The largest of absolute values in each of (ROWS, COLS) blocks; NaN if one of them is.

    They are ordered as their bits are as integers, NaN above infinity.
    """
    blocks = tl.reshape(
        sizes.to(tl.int32, bitcast=True),
        (ROWS, sizes.shape[0] // ROWS, COLS, sizes.shape[1] // COLS),
    )
    return tl.max(tl.max(blocks, 3), 1).to(tl.float32, bitcast=True)


@triton.jit
def _spread(of_blocks, ROWS: tl.constexpr, COLS: tl.constexpr):
    """What each block has, for each of its elements."""
    down: tl.constexpr = of_blocks.shape[0]
    across: tl.constexpr = of_blocks.shape[1]
    blocks = tl.broadcast_to(
        of_blocks[:, None, :, None], (down, ROWS // down, across, COLS // across)
    )
    return tl.reshape(blocks, (ROWS, COLS))


@triton.jit
def _load_tile(
    x_ptr, sources_ptr, ends_ptr, tile_row, R, G, x_stride, col, within,
    GROUPS: tl.constexpr, EVEN: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """The four tensors of a tile in fp32, its group, rows of the first one, and where they end.

    Rows are counted with padding; the last result is how much further they are than in memory.
    """
    row = tile_rows(tile_row, TILE_ROWS)
    if GROUPS:
        group, source, end = rows_of_tile(ends_ptr, tile_row, G, R, GROUPS, TILE_ROWS)
        group = tl.minimum(group, G - 1)
        v0, v1, v2, v3 = load_rows(x_ptr, sources_ptr, source, end, x_stride, col, within)
        moved = row - source
        end += moved
    else:
        group, end, moved = 0, R, 0
        v0, v1, v2, v3 = load_four(x_ptr, row, x_stride, col, R, within, EVEN)
        v0, v1 = v0.to(tl.float32), v1.to(tl.float32)
        v2, v3 = v2.to(tl.float32), v3.to(tl.float32)
    return v0, v1, v2, v3, group, row, end, moved


@triton.jit
def _place_of_scales(row, block, tiles):
    """Where scales are: those of some rows and blocks of a matrix with so many tiles in a row."""
    at = ((row // 128).to(tl.int64) * tiles + block // 4) * 512
    return at + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@triton.jit
def _store_scales(ptr, row, block, tiles, codes, within):
    """Bytes of scales, of those rows that are ``within``."""
    ptr = ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + _place_of_scales(row, block, tiles)
    tl.store(ptr, codes, mask=(block // 4 < tiles) & within)


@triton.jit
def _exponents(amax, E5M2: tl.constexpr):
    """E8M0 (uint8) of the least power of two with ``amax / 2^k <= largest``; 1 of 0."""
    top: tl.constexpr = 15 if E5M2 else 8
    bits = amax.to(tl.int32, bitcast=True)
    exponents = tl.maximum(((bits + 0x1FFFFF) >> 23) - top, 0)
    exponents = tl.where(bits == 0, 127, exponents)
    return tl.where(bits < 0x7F800000, exponents, 255)


@triton.jit
def _power(exponents):
    """The inverse of powers of two in E8M0, in fp32."""
    power = ((254 - exponents) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponents == 255, float("nan"), power)


@triton.jit
def _mxfp8_row(
    ptr, scale_ptr, v, row, stop, tile_col, col, C,
    E5M2: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes and scales of one of a tile's four tensors, by rows."""
    rows: tl.constexpr = v.shape[0]
    cols: tl.constexpr = v.shape[1]
    exponents = _exponents(_largest_in(tl.abs(v), rows, cols // 32), E5M2)
    block = tile_col * (cols // 32) + tl.arange(0, cols // 32)[None, :]
    _store_scales(scale_ptr, row, block, tl.cdiv(C, 128), exponents.to(tl.uint8), row < stop)
    scaled = v * _spread(_power(exponents), rows, cols)
    store_row(ptr, row, C, col, (row < stop) & (col < C), scaled, E5M2, EVEN)


@triton.jit
def mxfp8(
    x_ptr, sources_ptr, ends_ptr, rows_ptr, row_scale_ptr, cols_ptr, col_scale_ptr, sums_ptr,
    R, RP, C, x_stride, G,
    E5M2: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Codes with a scale for each 32 neighbors, and sums of the tiles' columns (T, C)."""
    tile_row, tile_col = place(RP, C, TILE_ROWS, TILE_COLS, GROUP)
    line = tile_cols(tile_col, TILE_COLS)
    col = in_row(line, VEC)
    v0, v1, v2, v3, _, row, end, moved = _load_tile(
        x_ptr, sources_ptr, ends_ptr, tile_row, R, G, x_stride, col, col < C,
        GROUPS, EVEN, TILE_ROWS,
    )  # fmt: skip
    if rows_ptr is not None:
        own, stop = row - moved, end - moved if GROUPS else RP
        _mxfp8_row(rows_ptr, row_scale_ptr, v0, own, stop, tile_col, col, C, E5M2, EVEN)
        _mxfp8_row(rows_ptr, row_scale_ptr, v1, own + 1, stop, tile_col, col, C, E5M2, EVEN)
        _mxfp8_row(rows_ptr, row_scale_ptr, v2, own + 2, stop, tile_col, col, C, E5M2, EVEN)
        _mxfp8_row(rows_ptr, row_scale_ptr, v3, own + 3, stop, tile_col, col, C, E5M2, EVEN)
    if sums_ptr is not None:
        store_sums(sums_ptr, tile_row, C, line, line < C, (v0 + v1) + (v2 + v3))
    if cols_ptr is not None:
        blocks: tl.constexpr = TILE_ROWS // 32
        sizes = largest_of_four(v0, v1, v2, v3)
        exponents = _exponents(_largest_in(sizes, blocks, TILE_COLS), E5M2)
        block = tile_row * blocks + tl.arange(0, blocks)[:, None]
        _store_scales(col_scale_ptr, line[None, :], block, RP // 128, exponents.to(tl.uint8), True)
        power = _spread(_power(exponents), TILE_ROWS // 4, TILE_COLS)
        v0, v1, v2, v3 = four_times(v0, v1, v2, v3, power, row, end, EVEN)
        low, high = pairs_of(v0, v1, E5M2), pairs_of(v2, v3, E5M2)
        store_cols(cols_ptr, line, line < C, tile_row, RP, low, high, EVEN, TILE_ROWS)


@triton.jit
def _fp4_code(v):
    """E2M1 (uint8) of fp32 values, to nearest even; 6 of NaN, as GPUs do."""
    bits = v.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(v), 6.0)
    # Codes are 2 apart where the distance of values doubles. Added to 2^23, a value loses what is
    # below 1, and its last bits are the number of steps.
    steps = tl.where(size < 2.0, 2.0, tl.where(size < 4.0, 1.0, 0.5))
    before = tl.where(size < 2.0, 0, tl.where(size < 4.0, 2, 4))
    code = ((size * steps + 8388608.0).to(tl.int32, bitcast=True) & 7) + before
    code |= (bits >> 28) & 8
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 7, code).to(tl.uint8)


@triton.jit
def _fp4_pairs(first, second, CONVERTS: tl.constexpr):
    """Codes of two in a byte, the first one in its lower half."""
    if CONVERTS and ASSEMBLY:
        pairs = tl.inline_asm_elementwise(
            "{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, $5, $1;"
            " cvt.rn.satfinite.e2m1x2.f32 b, $6, $2; cvt.rn.satfinite.e2m1x2.f32 c, $7, $3;"
            " cvt.rn.satfinite.e2m1x2.f32 d, $8, $4; mov.b32 $0, {a, b, c, d}; }",
            "=r,f,f,f,f,f,f,f,f", [first, second], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        pairs = _fp4_code(first) | (_fp4_code(second) << 4)
    return pairs


@triton.jit
def _fp4_fours(v0, v1, v2, v3, CONVERTS: tl.constexpr):
    """Codes of four neighboring rows in one (uint16), the first one in the lowest bits."""
    if CONVERTS and ASSEMBLY:
        fours = tl.inline_asm_elementwise(
            "{ .reg .b8 a, b; cvt.rn.satfinite.e2m1x2.f32 a, $2, $1;"
            " cvt.rn.satfinite.e2m1x2.f32 b, $4, $3; mov.b16 $0, {a, b}; }",
            "=h,f,f,f,f", [v0, v1, v2, v3], dtype=tl.uint16, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = _fp4_code(v0) | (_fp4_code(v1) << 4)
        high = _fp4_code(v2) | (_fp4_code(v3) << 4)
        fours = low.to(tl.uint16) | (high.to(tl.uint16) << 8)
    return fours


@triton.jit
def _dithered(v, bits):
    """Values of E2M1 next to v: the further one from 0 as often as v is near to it."""
    size = tl.minimum(tl.abs(v), 6.0, propagate_nan=tl.PropagateNan.ALL)
    below = size < 2.0
    steps = tl.where(below, 2.0, tl.where(size < 4.0, 1.0, 0.5))
    step = tl.where(below, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    number = tl.floor(size * steps + (bits.to(tl.float32) + 0.5) * 1.52587890625e-05)
    sign = v.to(tl.int32, bitcast=True) & -0x80000000
    return ((number * step).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _encoding(amax):
    """``1 / g`` of a tensor's amax."""
    top = tl.full(amax.shape, 2688.0, tl.float32)
    scale = tl.minimum(tl.div_rn(top, tl.where(amax == 0.0, top, amax)), HUGE)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def _block_scales(amax, inverse):
    """Scales of blocks in E4M3 (uint8), and what their values are multiplied by."""
    scaled = amax * tl.where(amax == 0.0, 0.0, inverse * SIXTH)  # 0 of zeros, whatever g is
    codes = pairs_of(scaled, scaled, False) & 0xFF
    # The fields of E4M3 at their places in fp32, whose bias is larger by 120.
    d = (codes.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    one = tl.full(d.shape, 1.0, tl.float32)
    factor = tl.minimum(tl.div_rn(one * inverse, tl.where(d == 0.0, one, d)), HUGE)
    factor = tl.where(d == 0.0, 0.0, factor)
    return codes.to(tl.uint8), tl.where(inverse <= HUGE, factor, float("nan"))


@triton.jit
def _store_tensor_scale(ptr, RP, blocks, inverse, at, GROUPS: tl.constexpr):
    """The scale g behind those of so many blocks for each row; tiles of a group store the same."""
    ptr = ptr.to(tl.pointer_type(tl.float32), bitcast=True) + RP.to(tl.int64) * blocks // 4
    tl.store(ptr + at, inverse_of(inverse), mask=(GROUPS > 0) | (tl.program_id(0) == 0))


@triton.jit
def _nvfp4_row(
    ptr, scale_ptr, v, squares, bits, inverse, row, end, stop, tile_col, C,
    SQUARES: tl.constexpr, DITHERS: tl.constexpr, CONVERTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes and scales of one of a tile's four tensors, by rows; or those of its squares' amax."""
    rows: tl.constexpr = v.shape[0]
    cols: tl.constexpr = v.shape[1]
    amax = squares if SQUARES else _largest_in(tl.abs(v), rows, cols // 16)
    codes, factor = _block_scales(amax, inverse)
    block = tile_col * (cols // 16) + tl.arange(0, cols // 16)[None, :]
    scales = _spread(codes, rows, cols // 16)
    _store_scales(scale_ptr, row, block, tl.cdiv(C, 64), scales, row < stop)
    v = v * _spread(factor, rows, cols)
    if DITHERS:
        v = _dithered(v, bits >> 16)
    if not EVEN:
        v = tl.where(row < end, v, 0.0)
    first, second = tl.split(tl.reshape(v, (rows, cols // 2, 2)))
    pair = tile_col * (cols // 2) + tl.arange(0, cols // 2)[None, :]
    ptr = ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + row * (C // 2) + pair
    pairs = _fp4_pairs(first, second, CONVERTS)
    tl.store(ptr, pairs, mask=None if EVEN else (row < stop) & (pair < C // 2))


@triton.jit
def _transformed_across(v):
    """The steps between rows that are 8 and then 4 apart, for one of a tile's four tensors."""
    groups: tl.constexpr = v.shape[0] // 4
    cols: tl.constexpr = v.shape[1]
    v = tl.permute(tl.reshape(v, (groups, 2, 2, cols)), (0, 2, 3, 1))
    a, b = tl.split(v)
    s0, s1 = tl.split(tl.permute(a + b, (0, 2, 1)))
    d0, d1 = tl.split(tl.permute(a - b, (0, 2, 1)))
    low, high = tl.join(s0 + s1, s0 - s1), tl.join(d0 + d1, d0 - d1)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 3, 2, 1)), (4 * groups, cols)) * 0.25


@triton.jit
def _flipped(v, n, SIGNS: tl.constexpr):
    """Rows n of every 16 with the signs of their bits."""
    return tl.where((SIGNS >> (n % 16)) & 1 == 1, -v, v)


@triton.jit
def _transformed(v0, v1, v2, v3, row, SIGNS: tl.constexpr):
    """Every 16 rows of a tile times a Hadamard matrix with signs, divided by 4.

    In the order of steps of ``microscaling_plain.transformed``: rows 1, 2, 8 and 4 apart.
    """
    v0, v1 = _flipped(v0, row, SIGNS), _flipped(v1, row + 1, SIGNS)
    v2, v3 = _flipped(v2, row + 2, SIGNS), _flipped(v3, row + 3, SIGNS)
    s0, d0, s1, d1 = v0 + v1, v0 - v1, v2 + v3, v2 - v3
    v0, v1, v2, v3 = s0 + s1, d0 + d1, s0 - s1, d0 - d1
    v0, v1 = _transformed_across(v0), _transformed_across(v1)
    v2, v3 = _transformed_across(v2), _transformed_across(v3)
    return v0, v1, v2, v3


@triton.jit
def _store_fours(ptr, line, C, tile_row, RP, fours, EVEN: tl.constexpr):
    """Codes of a tile in words of four rows, transposed: to (C, RP / 2) bytes."""
    words: tl.constexpr = fours.shape[0]
    word = tile_row * words + tl.arange(0, words)
    ptr = ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    ptr += line.to(tl.int64)[:, None] * (RP // 4) + word[None, :]
    inside = None if EVEN else (line < C)[:, None] & (word >= 0)[None, :]
    tl.store(ptr, tl.trans(fours), mask=inside)


@triton.jit
def nvfp4(
    x_ptr, sources_ptr, ends_ptr, amax_ptr, seed_ptr,
    rows_ptr, row_scale_ptr, cols_ptr, col_scale_ptr, sums_ptr,
    R, ROWS, RP, C, x_stride, G, amax_stride,
    SIGNS: tl.constexpr, SQUARES: tl.constexpr, CONVERTS: tl.constexpr, GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Codes with a scale for each 16 neighbors or 16 x 16, and sums of columns (T, C).

    SIGNS: of the transform of columns, or 0 for none. With a seed, rounding is stochastic. Scales
    by rows are those of ROWS rows. The amax of a group is at its number times amax_stride.
    """
    quarter: tl.constexpr = TILE_ROWS // 4
    blocks: tl.constexpr = TILE_ROWS // 16
    dithers: tl.constexpr = seed_ptr is not None
    tile_row, tile_col = place(RP, C, TILE_ROWS, TILE_COLS, GROUP)
    line = tile_cols(tile_col, TILE_COLS)
    col = in_row(line, VEC)
    v0, v1, v2, v3, group, row, end, moved = _load_tile(
        x_ptr, sources_ptr, ends_ptr, tile_row, R, G, x_stride, col, col < C,
        GROUPS, EVEN, TILE_ROWS,
    )  # fmt: skip
    inverse = _encoding(tl.load(amax_ptr + group * amax_stride))
    b0, b1, b2, b3 = row, row, row, row  # without a seed they are not read
    if dithers:
        zero = tl.zeros((quarter, TILE_COLS), tl.uint32)
        counter = zero + (row // 4).to(tl.uint32)
        b0, b1, b2, b3 = philox(tl.load(seed_ptr), zero + col.to(tl.uint32), counter)
    if sums_ptr is not None:
        store_sums(sums_ptr, tile_row, C, line, line < C, (v0 + v1) + (v2 + v3))
    if rows_ptr is not None:
        own, last = row - moved, end - moved
        stop = last if GROUPS else RP
        at = group * amax_stride
        _store_tensor_scale(row_scale_ptr, ROWS, tl.cdiv(C, 64) * 4, inverse, at, GROUPS)
        squares = _largest_in(largest_of_four(v0, v1, v2, v3), blocks, TILE_COLS // 16)
        _nvfp4_row(
            rows_ptr, row_scale_ptr, v0, squares, b0, inverse, own, last, stop, tile_col, C,
            SQUARES, dithers, CONVERTS, EVEN,
        )  # fmt: skip
        _nvfp4_row(
            rows_ptr, row_scale_ptr, v1, squares, b1, inverse, own + 1, last, stop, tile_col, C,
            SQUARES, dithers, CONVERTS, EVEN,
        )  # fmt: skip
        _nvfp4_row(
            rows_ptr, row_scale_ptr, v2, squares, b2, inverse, own + 2, last, stop, tile_col, C,
            SQUARES, dithers, CONVERTS, EVEN,
        )  # fmt: skip
        _nvfp4_row(
            rows_ptr, row_scale_ptr, v3, squares, b3, inverse, own + 3, last, stop, tile_col, C,
            SQUARES, dithers, CONVERTS, EVEN,
        )  # fmt: skip
    if cols_ptr is not None:
        stop = end
        if SIGNS:
            v0, v1, v2, v3 = _transformed(v0, v1, v2, v3, row, SIGNS)
            inverse = inverse * 0.25
            stop = tl.cdiv(end, 16) * 16
        _store_tensor_scale(
            col_scale_ptr, RP, tl.cdiv(C, 128) * 8, inverse, group * amax_stride, GROUPS
        )
        sizes = largest_of_four(v0, v1, v2, v3)
        if SQUARES:
            amax = _largest_in(sizes, blocks, TILE_COLS // 16)
        else:
            amax = _largest_in(sizes, blocks, TILE_COLS)
        codes, factor = _block_scales(amax, inverse)
        block = tile_row * blocks + tl.arange(0, blocks)[:, None]
        codes = _spread(codes, blocks, TILE_COLS)
        _store_scales(col_scale_ptr, line[None, :], block, RP // 64, codes, True)
        factor = _spread(factor, quarter, TILE_COLS)
        if dithers:
            v0, v1 = _dithered(v0 * factor, b0 & 0xFFFF), _dithered(v1 * factor, b1 & 0xFFFF)
            v2, v3 = _dithered(v2 * factor, b2 & 0xFFFF), _dithered(v3 * factor, b3 & 0xFFFF)
            factor = tl.full((quarter, TILE_COLS), 1.0, tl.float32)
        v0, v1, v2, v3 = four_times(v0, v1, v2, v3, factor, row, stop, EVEN)
        fours = _fp4_fours(v0, v1, v2, v3, CONVERTS)
        _store_fours(cols_ptr, line, C, tile_row, RP, fours, EVEN)


@triton.jit
def _values_of_fp4(codes):
    """What codes of E2M1 in the lower bits of uint8 stand for, in fp32."""
    exponent, mantissa = ((codes >> 1) & 3).to(tl.int32), (codes & 1).to(tl.int32)
    # The fields at their places in fp32, whose bias is larger by 126; codes below 2 are no powers.
    value = ((exponent + 126 << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, value)
    return tl.where((codes & 8) != 0, -value, value)


@triton.jit
def _values_of_fp8(codes, E5M2: tl.constexpr):
    """What codes of FP8 in uint8 stand for, in fp32; casts of the interpreter lose NaN of E4M3."""
    if E5M2:  # the upper half of fp16
        values = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # The fields at their places in fp32, whose bias is larger by 120.
        size = codes & 0x7F
        values = (size.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        values = tl.where(size == 0x7F, float("nan"), values)
        values = tl.where((codes & 0x80) != 0, -values, values)
    return values


@triton.jit
def decode(
    codes_ptr, scale_ptr, y_ptr, M, K, stride,
    FP4: tl.constexpr, E5M2: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr,
):  # fmt: skip
    """Values of codes (M, K), of NVFP4 (M, K / 2) bytes, in bf16; without scales of tensors.

    Rows of codes are ``stride`` bytes apart.
    """
    row = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)[:, None]
    col = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    size: tl.constexpr = 16 if FP4 else 32
    blocks: tl.constexpr = TILE_COLS // size
    block = tl.program_id(1) * blocks + tl.arange(0, blocks)[None, :]
    at = _place_of_scales(row, block, tl.cdiv(K, 4 * size))
    scales = load(scale_ptr + at, (row < M) & (block < K // size), EVEN)
    if FP4:
        pair = tl.program_id(1) * (TILE_COLS // 2) + tl.arange(0, TILE_COLS // 2)[None, :]
        inside = (row < M) & (pair < K // 2)
        pairs = load(codes_ptr + row * stride + pair, inside, EVEN)
        values = tl.join(_values_of_fp4(pairs & 15), _values_of_fp4(pairs >> 4))
        values = tl.reshape(values, (TILE_ROWS, TILE_COLS))
        factors = _values_of_fp8(scales, False)
    else:
        codes = load(codes_ptr + row * stride + col, (row < M) & (col < K), EVEN)
        values = _values_of_fp8(codes, E5M2)
        bits = tl.maximum(scales.to(tl.int32) << 23, 0x00400000)  # 2^-127 has no exponent
        factors = tl.where(scales == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    values *= _spread(factors, TILE_ROWS, TILE_COLS)
    # What is cut off is 0 but for the smallest, of which the interpreter's cast makes others.
    upper = (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(y_ptr + row * K + col, upper, mask=None if EVEN else (row < M) & (col < K))
