"""Products of codes of groups of rows, each by a matrix of its own; a program for each tile.

Codes are in fp8, or values in bf16. Dimensions: R rows, G groups, P rows where groups are padded
to multiples of 128, N and K features. ``ends`` as in ``groups``. Sums are in fp32; if SPLIT, after
every step along what is summed over.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import ASSEMBLY


@triton.jit
def load_codes(ptr, k, K, EVEN: tl.constexpr):
    """Codes at ``ptr + k``, zeros from K on."""
    return tl.load(ptr + k) if EVEN else tl.load(ptr + k, mask=k < K, other=0.0)


@triton.jit
def add_product(total, a, b, SPLIT: tl.constexpr):
    """``total + a b``."""
    if not ASSEMBLY and a.dtype == tl.bfloat16:  # which the interpreter multiplies as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    if SPLIT:
        total += tl.dot(a, b)
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def rows_by_matrices(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, ends_ptr, y_ptr,
    R, N, K, G, b_group, b_stride, scale_group, scale_stride, scale_step,
    BLOCKS: tl.constexpr, SPLIT: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """``y[r] = a[r] b_gᵀ`` (R, N), for a (R, K) and b_g (N, K), whose rows are b_stride apart.

    BLOCKS: a_scale (K / TILE_K, R), and b_scale for each TILE_COLS × TILE_K, whose rows are
    scale_stride apart and columns scale_step. Otherwise a_scale (R,) and b_scale (G, N).
    """
    tiles_n = tl.cdiv(N, TILE_COLS)
    tiles_m = tl.num_programs(0) // tiles_n
    at = tl.program_id(0)
    first = at // (GROUP * tiles_n) * GROUP
    width = tl.minimum(GROUP, tiles_m - first)
    at %= GROUP * tiles_n
    tile, tile_n = first + at % width, at // width

    g = tl.arange(0, GROUPS)
    stops = tl.load(ends_ptr + g, mask=g < G, other=0)
    starts = tl.load(ends_ptr + g - 1, mask=(g > 0) & (g < G), other=0)
    counts = tl.where(g < G, tl.cdiv(stops - starts, TILE_ROWS), 0)
    tiles = tl.cumsum(counts, 0)
    group = tl.sum(((tiles <= tile) & (g < G)).to(tl.int32), 0)
    if group >= G:
        return
    own = g == group
    stop = tl.sum(tl.where(own, stops, 0), 0)
    start = tl.sum(tl.where(own, starts, 0), 0)
    start += (tile - tl.sum(tl.where(own, tiles - counts, 0), 0)) * TILE_ROWS

    row = start + tl.arange(0, TILE_ROWS)
    col = tile_n * TILE_COLS + tl.arange(0, TILE_COLS)
    # What is beyond an edge is computed from its last row or column, and not stored.
    last_row, last_col = tl.minimum(row, stop - 1).to(tl.int64), tl.minimum(col, N - 1)
    k = tl.arange(0, TILE_K)
    a_ptr += last_row[:, None] * K
    b_ptr += group.to(tl.int64) * b_group + last_col.to(tl.int64)[None, :] * b_stride
    total = tl.zeros((TILE_ROWS, TILE_COLS), tl.float32)
    if BLOCKS:
        a_scale_ptr += last_row
        b_scale_ptr += group.to(tl.int64) * scale_group + tile_n * scale_stride
    for step in range(tl.cdiv(K, TILE_K)):
        here = step * TILE_K + k
        a = load_codes(a_ptr, here[None, :], K, EVEN)
        b = load_codes(b_ptr, here[:, None], K, EVEN)
        if BLOCKS:
            factor = tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
            total += tl.dot(a, b) * factor[:, None]
            a_scale_ptr += R
            b_scale_ptr += scale_step
        else:
            total = add_product(total, a, b, SPLIT)
    if not BLOCKS:
        of_cols = tl.load(b_scale_ptr + group.to(tl.int64) * N + last_col)
        total = total * tl.load(a_scale_ptr + last_row)[:, None] * of_cols[None, :]
    y_ptr += row.to(tl.int64)[:, None] * N + col[None, :]
    inside = (row < stop)[:, None] & (col < N)[None, :]
    tl.store(y_ptr, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def columns_by_columns(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, ends_ptr, y_ptr,
    N, K, P, G,
    BLOCKS: tl.constexpr, SQUARES: tl.constexpr, SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """``y_g = a_g b_gᵀ`` (G, N, K), for the columns of g of a (N, P) and b (K, P).

    BLOCKS: a_scale (P / TILE_K, N), b_scale (P / TILE_K, K), or, if SQUARES, for each TILE_COLS ×
    TILE_K, (K / TILE_COLS, up4(P / TILE_K)). Otherwise a_scale (G, N), b_scale (G, K).
    """
    tiles_n, tiles_k = tl.cdiv(N, TILE_ROWS), tl.cdiv(K, TILE_COLS)
    at = tl.program_id(0)
    group = at // (tiles_n * tiles_k)
    at %= tiles_n * tiles_k
    first = at // (GROUP * tiles_k) * GROUP
    width = tl.minimum(GROUP, tiles_n - first)
    at %= GROUP * tiles_k
    tile_n, tile_k = first + at % width, at // width

    start = tl.load(ends_ptr + G + group - 1, mask=group > 0, other=0) // TILE_K
    stop = tl.load(ends_ptr + G + group) // TILE_K
    n = tile_n * TILE_ROWS + tl.arange(0, TILE_ROWS)
    c = tile_k * TILE_COLS + tl.arange(0, TILE_COLS)
    last_n, last_c = tl.minimum(n, N - 1).to(tl.int64), tl.minimum(c, K - 1).to(tl.int64)
    row = tl.arange(0, TILE_K)
    a_ptr += last_n[:, None] * P + row[None, :]
    b_ptr += last_c[None, :] * P + row[:, None]
    total = tl.zeros((TILE_ROWS, TILE_COLS), tl.float32)
    for step in range(start, stop):
        a, b = tl.load(a_ptr + step * TILE_K), tl.load(b_ptr + step * TILE_K)
        if BLOCKS:
            block = tl.cast(step, tl.int64)
            of_rows = tl.load(a_scale_ptr + block * N + last_n)
            if SQUARES:
                across = tl.cdiv(P // TILE_K, 4) * 4
                of_rows *= tl.load(b_scale_ptr + tile_k * across + block)
                total += tl.dot(a, b) * of_rows[:, None]
            else:
                of_cols = tl.load(b_scale_ptr + block * K + last_c)
                total += tl.dot(a, b) * of_rows[:, None] * of_cols[None, :]
        else:
            total = add_product(total, a, b, SPLIT)
    if not BLOCKS:
        of_rows = tl.load(a_scale_ptr + group.to(tl.int64) * N + last_n)
        of_cols = tl.load(b_scale_ptr + group.to(tl.int64) * K + last_c)
        total = total * of_rows[:, None] * of_cols[None, :]
    y_ptr += group.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + c[None, :]
    inside = (n < N)[:, None] & (c < K)[None, :]
    tl.store(y_ptr, total.to(y_ptr.dtype.element_ty), mask=inside)
