"""Matrices whose rows are those of groups to fp8; a program for each tile of 128 rows of a group.

Dimensions: R rows, G groups, P rows where each group has a multiple of 128 of them and at least
128; C columns. ``ends`` (2, G) holds where groups end among R rows, and among P. Without ``ends``
groups have SIZE rows each. Codes by rows are (R, C), without padding; by columns (C, P). With
``sources`` (R,), row r of x is in memory row ``sources[r]``: a gather costs no pass of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import (
    four_times,
    in_row,
    inverse_of,
    largest_along,
    largest_of_four,
    pairs_of,
    place,
    raise_amax,
    scale_of,
    square_scale_of,
    store_cols,
    store_row,
    store_square_scale,
    tile_cols,
)


@triton.jit
def ends(sizes_ptr, ends_ptr, G, R, GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Where groups of these sizes end; none ends behind row R, and no size is below 0."""
    g = tl.arange(0, GROUPS)
    size = tl.maximum(tl.load(sizes_ptr + g, mask=g < G, other=0).to(tl.int32), 0)
    total = tl.cumsum(size, 0)
    end = tl.minimum(total, R)
    tiles = tl.maximum(tl.cdiv(end - tl.minimum(total - size, R), TILE_ROWS), 1)
    tl.store(ends_ptr + g, end, mask=g < G)
    tl.store(ends_ptr + G + g, tl.cumsum(tiles, 0) * TILE_ROWS, mask=g < G)


@triton.jit
def rows_of_tile(ends_ptr, tile_row, G, SIZE, GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """A tile's group, G for none, rows of the first of its four tensors, and where they end."""
    if ends_ptr is None:
        tiles = tl.cdiv(SIZE, 128) * (128 // TILE_ROWS)
        group = tile_row // tiles
        first = group.to(tl.int64) * SIZE + (tile_row % tiles) * TILE_ROWS
        end = (group + 1).to(tl.int64) * SIZE
    else:
        g = tl.arange(0, GROUPS)
        padded = tl.load(ends_ptr + G + g, mask=g < G, other=0x7FFFFFFF)
        group = tl.sum((padded <= tile_row * TILE_ROWS).to(tl.int32), 0)
        exists, later = group < G, (group > 0) & (group < G)
        start = tl.load(ends_ptr + group - 1, mask=later, other=0)
        before = tl.load(ends_ptr + G + group - 1, mask=later, other=0)
        first = (start + tile_row * TILE_ROWS - before).to(tl.int64)
        end = tl.load(ends_ptr + group, mask=exists, other=0).to(tl.int64)
    return group, first + 4 * tl.arange(0, TILE_ROWS // 4).to(tl.int64)[:, None], end


@triton.jit
def load_row(x_ptr, sources_ptr, row, end, stride, col, within):
    """One of a tile's four tensors in fp32, zeros where the group has ended."""
    source = row
    if sources_ptr is not None:
        source = tl.load(sources_ptr + row, mask=row < end, other=0).to(tl.int64)
    v = tl.load(x_ptr + source * stride + col, mask=(row < end) & within, other=0.0)
    return v.to(tl.float32)


@triton.jit
def load_rows(x_ptr, sources_ptr, row, end, stride, col, within):
    """The four tensors of a tile; all are loaded before anything is stored."""
    v0 = load_row(x_ptr, sources_ptr, row, end, stride, col, within)
    v1 = load_row(x_ptr, sources_ptr, row + 1, end, stride, col, within)
    v2 = load_row(x_ptr, sources_ptr, row + 2, end, stride, col, within)
    v3 = load_row(x_ptr, sources_ptr, row + 3, end, stride, col, within)
    return v0, v1, v2, v3


@triton.jit
def maxima(
    x_ptr, sources_ptr, ends_ptr, row_amax_ptr, col_amax_ptr,
    G, P, C, x_stride, SIZE,
    GROUPS: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """``max |x|`` of each row, (R,), and of each column of each group, (G, C), which are raised."""
    tile_row, tile_col = place(P, C, TILE_ROWS, TILE_COLS, GROUP)
    group, row, end = rows_of_tile(ends_ptr, tile_row, G, SIZE, GROUPS, TILE_ROWS)
    if group >= G:
        return
    line = tile_cols(tile_col, TILE_COLS)
    col = in_row(line, VEC)
    within = True if EVEN else col < C
    v0, v1, v2, v3 = load_rows(x_ptr, sources_ptr, row, end, x_stride, col, within)
    if row_amax_ptr is not None:
        raise_rows(row_amax_ptr, row, end, v0)
        raise_rows(row_amax_ptr, row + 1, end, v1)
        raise_rows(row_amax_ptr, row + 2, end, v2)
        raise_rows(row_amax_ptr, row + 3, end, v3)
    if col_amax_ptr is not None:
        most = largest_along(largest_of_four(v0, v1, v2, v3), 0).to(tl.int32, bitcast=True)
        at = col_amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + group.to(tl.int64) * C
        tl.atomic_max(at + line, most, mask=line < C, sem="relaxed")


@triton.jit
def raise_rows(ptr, row, end, v):
    """The largest values of rows become those of a tile where these are larger; NaN wins."""
    most = largest_along(tl.abs(v), 1)[:, None].to(tl.int32, bitcast=True)
    ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(ptr + row, most, mask=row < end, sem="relaxed")


@triton.jit
def store_scaled(ptr, scale_ptr, row, end, C, col, within, v, scale, is_first, E5M2: tl.constexpr):
    """Codes of ``v s`` of one of a tile's four tensors by rows, and 1 / s if it is the first."""
    store_row(ptr, row, C, col, (row < end) & within, v * scale, E5M2, False)
    inverse = inverse_of(scale) + tl.zeros(row.shape, tl.float32)
    tl.store(scale_ptr + row, inverse, mask=(row < end) & is_first)


@triton.jit
def by_vectors(
    x_ptr, sources_ptr, ends_ptr, row_amax_ptr, col_amax_ptr, scale_ptr,
    rows_ptr, row_scale_ptr, cols_ptr, col_scale_ptr, amax_ptr,
    G, P, C, x_stride, SIZE, scale_stride,
    E5M2: tl.constexpr, MEASURED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    GROUPS: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Codes with a scale for each row, and by columns for each column of a group; 1 / s of these.

    With scale_ptr a group has one scale, at its number times scale_stride; if MEASURED it is the
    amax that s comes from, as row_amax and col_amax are without scale_ptr. ``amax`` is raised.
    """
    tile_row, tile_col = place(P, C, TILE_ROWS, TILE_COLS, GROUP)
    group, row, end = rows_of_tile(ends_ptr, tile_row, G, SIZE, GROUPS, TILE_ROWS)
    if group >= G:
        return
    line = tile_cols(tile_col, TILE_COLS)
    col = in_row(line, VEC)
    within = True if EVEN else col < C
    v0, v1, v2, v3 = load_rows(x_ptr, sources_ptr, row, end, x_stride, col, within)
    if amax_ptr is not None:
        raise_amax(amax_ptr, largest_of_four(v0, v1, v2, v3))
    if scale_ptr is not None:
        one = tl.load(scale_ptr + group * scale_stride)
        if MEASURED:
            one = scale_of(one, E5M2, POWER_OF_TWO)
    if rows_ptr is not None:
        s0, s1, s2, s3 = 1.0, 1.0, 1.0, 1.0
        if scale_ptr is not None:
            s0, s1, s2, s3 = one, one, one, one
        else:
            s0 = scale_of(tl.load(row_amax_ptr + row, row < end, 0.0), E5M2, POWER_OF_TWO)
            s1 = scale_of(tl.load(row_amax_ptr + row + 1, row + 1 < end, 0.0), E5M2, POWER_OF_TWO)
            s2 = scale_of(tl.load(row_amax_ptr + row + 2, row + 2 < end, 0.0), E5M2, POWER_OF_TWO)
            s3 = scale_of(tl.load(row_amax_ptr + row + 3, row + 3 < end, 0.0), E5M2, POWER_OF_TWO)
        first = tile_col == 0
        store_scaled(rows_ptr, row_scale_ptr, row, end, C, col, within, v0, s0, first, E5M2)
        store_scaled(rows_ptr, row_scale_ptr, row + 1, end, C, col, within, v1, s1, first, E5M2)
        store_scaled(rows_ptr, row_scale_ptr, row + 2, end, C, col, within, v2, s2, first, E5M2)
        store_scaled(rows_ptr, row_scale_ptr, row + 3, end, C, col, within, v3, s3, first, E5M2)
    if cols_ptr is not None:
        at = group.to(tl.int64) * C + col
        if scale_ptr is not None:
            scale = one + tl.zeros(col.shape, tl.float32)
        else:
            scale = scale_of(tl.load(col_amax_ptr + at, col < C, 0.0), E5M2, POWER_OF_TWO)
        # All tiles of a group store the same.
        tl.store(col_scale_ptr + at, inverse_of(scale), mask=col < C)
        v0, v1, v2, v3 = four_times(v0, v1, v2, v3, scale, row, end, False)
        low, high = pairs_of(v0, v1, E5M2), pairs_of(v2, v3, E5M2)
        store_cols(cols_ptr, line, line < C, tile_row, P, low, high, EVEN, TILE_ROWS)


@triton.jit
def store_block(
    ptr, scale_ptr, row, end, C, col, v, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """Codes of one of a tile's four tensors by rows with a scale for each row, and 1 / s."""
    scale = scale_of(largest_along(tl.abs(v), 1)[:, None], E5M2, POWER_OF_TWO)
    store_row(ptr, row, C, col, row < end, v * scale, E5M2, False)
    tl.store(scale_ptr + row, inverse_of(scale, POWER_OF_TWO), mask=row < end)


@triton.jit
def by_blocks(
    x_ptr, sources_ptr, ends_ptr, rows_ptr, row_scale_ptr, cols_ptr, col_scale_ptr,
    R, G, P, C, x_stride,
    E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr, SQUARE_COLS: tl.constexpr,
    GROUPS: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Codes with a scale for each row and each column of a tile; C is a multiple of TILE_COLS.

    row_scale (C / TILE_COLS, R), col_scale (P / TILE_ROWS, C), or, with one for all columns of the
    tile, (C / TILE_COLS, up4(P / TILE_ROWS)).
    """
    tile_row, tile_col = place(P, C, TILE_ROWS, TILE_COLS, GROUP)
    group, row, end = rows_of_tile(ends_ptr, tile_row, G, 0, GROUPS, TILE_ROWS)
    if group >= G:
        return
    line = tile_cols(tile_col, TILE_COLS)
    col = in_row(line, VEC)
    v0, v1, v2, v3 = load_rows(x_ptr, sources_ptr, row, end, x_stride, col, True)
    if rows_ptr is not None:
        scales = row_scale_ptr + tile_col.to(tl.int64) * R
        store_block(rows_ptr, scales, row, end, C, col, v0, E5M2, POWER_OF_TWO)
        store_block(rows_ptr, scales, row + 1, end, C, col, v1, E5M2, POWER_OF_TWO)
        store_block(rows_ptr, scales, row + 2, end, C, col, v2, E5M2, POWER_OF_TWO)
        store_block(rows_ptr, scales, row + 3, end, C, col, v3, E5M2, POWER_OF_TWO)
    if cols_ptr is not None:
        sizes = largest_of_four(v0, v1, v2, v3)
        if SQUARE_COLS:
            scale = square_scale_of(sizes, E5M2, POWER_OF_TWO)
            down = P // TILE_ROWS
            store_square_scale(col_scale_ptr, scale, tile_col, tile_row, down, POWER_OF_TWO)
        else:
            scale = scale_of(largest_along(sizes, 0)[None, :], E5M2, POWER_OF_TWO)
            at = tile_row.to(tl.int64) * C + col
            tl.store(col_scale_ptr + at, inverse_of(scale, POWER_OF_TWO))
        v0, v1, v2, v3 = four_times(v0, v1, v2, v3, scale, row, end, False)
        low, high = pairs_of(v0, v1, E5M2), pairs_of(v2, v3, E5M2)
        store_cols(cols_ptr, line, line < C, tile_row, P, low, high, True, TILE_ROWS)
