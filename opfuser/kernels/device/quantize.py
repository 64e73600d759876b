"""Matrices to fp8, by rows, by columns or both from one read; a tile per program.

Dimensions: R rows, RP of them with padding, C columns; T tiles down a column. What is None is left
out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import (
    col_scale_of,
    four_times,
    in_row,
    inverse_of,
    larger,
    largest_of_four,
    load_four,
    pairs_of,
    place,
    raise_amax,
    scale_from,
    square_scale_of,
    store_cols,
    store_row_blocks,
    store_rows,
    store_square_scale,
    store_sums,
    tile_cols,
    tile_rows,
)


@triton.jit
def amax(x_ptr, amax_ptr, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """``max |x|`` of n elements to amax, which is not negative and raised."""
    at = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    sizes = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(STEPS):
        here = at + step * BLOCK
        x = tl.load(x_ptr + here, mask=here < n, other=0.0)
        sizes = larger(sizes, tl.abs(x.to(tl.float32)))
    raise_amax(amax_ptr, sizes[None, :])


@triton.jit
def by_tensor(
    x_ptr, scale_ptr, rows_ptr, cols_ptr, inverse_ptr, amax_ptr, sums_ptr,
    R, RP, C, x_stride,
    E5M2: tl.constexpr, MEASURED: tl.constexpr, POWER_OF_TWO: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Codes of ``x s``, 1 / s, ``max |x|``, and sums of the tiles' columns (T, C).

    If MEASURED, scale_ptr has the amax that s comes from.
    """
    scale = tl.load(scale_ptr)
    tile_row, tile_col = place(RP, C, TILE_ROWS, TILE_COLS, GROUP)
    row = tile_rows(tile_row, TILE_ROWS)
    line = tile_cols(tile_col, TILE_COLS)
    col = in_row(line, VEC)
    v0, v1, v2, v3 = load_four(x_ptr, row, x_stride, col, R, col < C, EVEN)
    v0, v1, v2, v3 = v0.to(tl.float32), v1.to(tl.float32), v2.to(tl.float32), v3.to(tl.float32)
    scale = scale_from(scale, E5M2, MEASURED, POWER_OF_TWO)
    tl.store(inverse_ptr, inverse_of(scale), mask=tl.program_id(0) == 0)
    if amax_ptr is not None:
        raise_amax(amax_ptr, largest_of_four(v0, v1, v2, v3))
    if sums_ptr is not None:
        store_sums(sums_ptr, tile_row, C, line, line < C, (v0 + v1) + (v2 + v3))
    v0, v1, v2, v3 = four_times(v0, v1, v2, v3, scale, row, R, EVEN)
    if rows_ptr is not None:
        store_rows(rows_ptr, row, C, col, col < C, v0, v1, v2, v3, E5M2, EVEN)
    if cols_ptr is not None:
        low, high = pairs_of(v0, v1, E5M2), pairs_of(v2, v3, E5M2)
        store_cols(cols_ptr, line, line < C, tile_row, RP, low, high, EVEN, TILE_ROWS)


@triton.jit
def by_blocks(
    x_ptr, rows_ptr, row_scale_ptr, cols_ptr, col_scale_ptr, sums_ptr,
    R, RP, C, x_stride,
    E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr, SQUARE_COLS: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Codes with a scale for each row and each column of a tile, and sums of its columns (T, C).

    row_scale (C / TILE_COLS, RP), col_scale (RP / TILE_ROWS, C), or, with one for all columns of
    the tile, (C / TILE_COLS, up4(RP / TILE_ROWS)); C is a multiple of TILE_COLS.
    """
    tile_row, tile_col = place(RP, C, TILE_ROWS, TILE_COLS, GROUP)
    row = tile_rows(tile_row, TILE_ROWS)
    line = tile_cols(tile_col, TILE_COLS)
    col = in_row(line, VEC)
    v0, v1, v2, v3 = load_four(x_ptr, row, x_stride, col, R, col < C, EVEN)
    v0, v1, v2, v3 = v0.to(tl.float32), v1.to(tl.float32), v2.to(tl.float32), v3.to(tl.float32)
    if rows_ptr is not None:
        store_row_blocks(
            rows_ptr, row_scale_ptr, row, C, col, tile_col, RP, v0, v1, v2, v3,
            E5M2, POWER_OF_TWO, TILE_COLS // VEC,
        )  # fmt: skip
    if sums_ptr is not None:
        store_sums(sums_ptr, tile_row, C, line, line < C, (v0 + v1) + (v2 + v3))
    if cols_ptr is not None:
        sizes = largest_of_four(v0, v1, v2, v3)
        if SQUARE_COLS:
            scale = square_scale_of(sizes, E5M2, POWER_OF_TWO)
            store_square_scale(
                col_scale_ptr, scale, tile_col, tile_row, RP // TILE_ROWS, POWER_OF_TWO
            )
        else:
            scale = col_scale_of(col_scale_ptr, sizes, tile_row, C, col, E5M2, POWER_OF_TWO)
        v0, v1, v2, v3 = four_times(v0, v1, v2, v3, scale, row, R, EVEN)
        low, high = pairs_of(v0, v1, E5M2), pairs_of(v2, v3, E5M2)
        store_cols(cols_ptr, line, line < C, tile_row, RP, low, high, True, TILE_ROWS)


@triton.jit
def by_squares(
    x_ptr, rows_ptr, row_scale_ptr, cols_ptr, col_scale_ptr,
    R, RP, C, x_stride,
    E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Codes with a scale for each tile; C is a multiple of TILE_COLS."""
    tile_row, tile_col = place(RP, C, TILE_ROWS, TILE_COLS, GROUP)
    row = tile_rows(tile_row, TILE_ROWS)
    line = tile_cols(tile_col, TILE_COLS)
    col = in_row(line, VEC)
    v0, v1, v2, v3 = load_four(x_ptr, row, x_stride, col, R, col < C, EVEN)
    v0, v1, v2, v3 = v0.to(tl.float32), v1.to(tl.float32), v2.to(tl.float32), v3.to(tl.float32)
    scale = square_scale_of(largest_of_four(v0, v1, v2, v3), E5M2, POWER_OF_TWO)
    v0, v1, v2, v3 = four_times(v0, v1, v2, v3, scale, row, R, EVEN)
    if rows_ptr is not None:
        across = C // TILE_COLS
        store_square_scale(row_scale_ptr, scale, tile_row, tile_col, across, POWER_OF_TWO)
        store_rows(rows_ptr, row, C, col, col < C, v0, v1, v2, v3, E5M2, True)
    if cols_ptr is not None:
        down = RP // TILE_ROWS
        store_square_scale(col_scale_ptr, scale, tile_col, tile_row, down, POWER_OF_TWO)
        low, high = pairs_of(v0, v1, E5M2), pairs_of(v2, v3, E5M2)
        store_cols(cols_ptr, line, line < C, tile_row, RP, low, high, True, TILE_ROWS)


@triton.jit
def transpose(
    codes_ptr, out_ptr,
    R, RP, C,
    EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Bytes (R, C) as (C, R), four rows to a word; R is a multiple of 4, RP of TILE_ROWS."""
    tile_row, tile_col = place(RP, C, TILE_ROWS, TILE_COLS, GROUP)
    row = tile_rows(tile_row, TILE_ROWS)
    line = tile_cols(tile_col, TILE_COLS)
    col = in_row(line, VEC)
    v0, v1, v2, v3 = load_four(codes_ptr, row, C, col, R, col < C, EVEN)
    v0, v1, v2, v3 = v0.to(tl.uint32), v1.to(tl.uint32), v2.to(tl.uint32), v3.to(tl.uint32)
    words = tl.trans(v0 | (v1 << 8) | (v2 << 16) | (v3 << 24))
    word = tile_row * (TILE_ROWS // 4) + tl.arange(0, TILE_ROWS // 4)
    at = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    at += line.to(tl.int64)[:, None] * (R // 4) + word[None, :]
    inside = None if EVEN else (line < C)[:, None] & (word < R // 4)[None, :]
    tl.store(at, words, mask=inside)
