"""Norms of rows to fp8: by rows in forward, and again by columns from what forward left.

Dimensions: R rows, RP of them with padding, D columns. x, residual: (R, D), rows apart by their
stride; total: (R, D), contiguous; weight, bias: (D,); mean, rstd: (R,). What is None is left out:
without a scale, which is (1,), every 128 neighbors of a layout have one; without codes, amax alone
is raised. If MEASURED, scale_ptr has the amax that the scale comes from. Formulas are those of
``norm``. Both kernels compute y by the same operations on the same numbers, so that its codes are
the same in both layouts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import (
    codes_of,
    col_scale_of,
    four_times,
    in_row,
    inverse_of,
    largest_along,
    largest_of_four,
    load,
    load_four,
    pairs_of,
    place,
    raise_amax,
    scale_from,
    scale_of,
    square_scale_of,
    store_cols,
    store_square_scale,
    tile_cols,
    tile_rows,
)
from .norm import load_bias, load_rows, load_scale, norm_of
from .store import store_rows


@triton.jit
def _by_blocks(
    y, inverse_ptr, row, first, RP, D,
    E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Whole rows times a scale for every BLOCK columns; stores 1 / s to (D / BLOCK, RP)."""
    count: tl.constexpr = BLOCK_COLS // BLOCK
    blocks = tl.reshape(y, (BLOCK_ROWS, count, BLOCK))
    scale = scale_of(largest_along(tl.abs(blocks), 2), E5M2, POWER_OF_TWO)
    block = tl.arange(0, count)[None, :]
    rows = (first + tl.arange(0, BLOCK_ROWS))[:, None]
    inside = (rows < RP) & (block < D // BLOCK)
    tl.store(
        inverse_ptr + block.to(tl.int64) * RP + rows, inverse_of(scale, POWER_OF_TWO), mask=inside
    )
    return tl.reshape(blocks * scale[:, :, None], (BLOCK_ROWS, BLOCK_COLS))


@triton.jit
def forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, total_ptr, mean_ptr, rstd_ptr,
    scale_ptr, codes_ptr, inverse_ptr, amax_ptr,
    R, RP, D, x_stride, residual_stride,
    eps, share,
    ZERO_CENTERED: tl.constexpr, E5M2: tl.constexpr, MEASURED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """``norm.norm_forward`` with codes (RP, D) of y: (BLOCK_ROWS, BLOCK_COLS >= D) per program."""
    # Loaded first, while nothing else waits for memory.
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    first = tl.program_id(0) * BLOCK_ROWS
    row = first + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    # VEC columns per thread, whatever the type: else codes had a layout of their own. Not in a
    # function of its own, of whose parameters Triton drops such hints.
    cols = tl.max_contiguous(tl.multiple_of(cols, (1, VEC)), (1, VEC))
    inside = (cols < D) & (row < R)
    x = load_rows(x_ptr, row, x_stride, cols, inside)
    if residual_ptr is not None:
        x += load_rows(residual_ptr, row, residual_stride, cols, inside)
        total = x.to(total_ptr.dtype.element_ty)
        store_rows(total_ptr, row, D, cols, inside, total)
        x = total.to(tl.float32)
    y = norm_of(
        x, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, row, cols, R, D, eps, share, ZERO_CENTERED
    )
    y = tl.where(inside, y, 0.0)  # in padding it is the bias
    if amax_ptr is not None:
        raise_amax(amax_ptr, tl.abs(y))
    if codes_ptr is not None:
        if scale_ptr is None:
            y = _by_blocks(
                y, inverse_ptr, row, first, RP, D, E5M2, POWER_OF_TWO,
                BLOCK, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
        else:
            scale = scale_from(scale, E5M2, MEASURED, POWER_OF_TWO)
            tl.store(inverse_ptr, inverse_of(scale), mask=first == 0)
            y = tl.where(row < R, y * scale, 0.0)  # also where s is NaN
        codes = codes_of(y, E5M2)
        codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        store_rows(codes_ptr, row, D, cols, (cols < D) & (row < RP), codes)


@triton.jit
def _again(x, scale, bias, mean_ptr, rstd_ptr, row, R, within, EVEN: tl.constexpr):
    """The norm of one of a tile's four tensors; 0 in padding."""
    x = x.to(tl.float32)
    if mean_ptr is not None:
        x -= load(mean_ptr + row, row < R, EVEN)
    y = tl.fma(x * load(rstd_ptr + row, row < R, EVEN), scale, bias)
    if not EVEN:
        y = tl.where((row < R) & within, y, 0.0)
    return y


@triton.jit
def columns(
    x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, scale_ptr, codes_ptr, inverse_ptr, amax_ptr,
    R, RP, D, x_stride,
    ZERO_CENTERED: tl.constexpr, E5M2: tl.constexpr, MEASURED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, SQUARE_COLS: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Codes (D, RP) of y, a tile per program.

    inverse: (1,); or (RP / TILE_ROWS, D) of blocks; or (D / TILE_COLS, up4(RP / TILE_ROWS)) of
    squares.
    """
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    tile_row, tile_col = place(RP, D, TILE_ROWS, TILE_COLS, GROUP)
    row = tile_rows(tile_row, TILE_ROWS)
    line = tile_cols(tile_col, TILE_COLS)
    col = in_row(line, VEC)
    within = col < D
    x0, x1, x2, x3 = load_four(x_ptr, row, x_stride, col, R, within, EVEN)
    gain = load_scale(weight_ptr, col, within, ZERO_CENTERED)
    bias = load_bias(bias_ptr, col, within)
    y0 = _again(x0, gain, bias, mean_ptr, rstd_ptr, row, R, within, EVEN)
    y1 = _again(x1, gain, bias, mean_ptr, rstd_ptr, row + 1, R, within, EVEN)
    y2 = _again(x2, gain, bias, mean_ptr, rstd_ptr, row + 2, R, within, EVEN)
    y3 = _again(x3, gain, bias, mean_ptr, rstd_ptr, row + 3, R, within, EVEN)
    if amax_ptr is not None:
        raise_amax(amax_ptr, largest_of_four(y0, y1, y2, y3))
    if codes_ptr is not None:
        if scale_ptr is None:
            sizes = largest_of_four(y0, y1, y2, y3)
            if SQUARE_COLS:
                down = RP // TILE_ROWS
                scale = square_scale_of(sizes, E5M2, POWER_OF_TWO)
                store_square_scale(inverse_ptr, scale, tile_col, tile_row, down, POWER_OF_TWO)
            else:
                scale = col_scale_of(inverse_ptr, sizes, tile_row, D, col, E5M2, POWER_OF_TWO)
        else:
            scale = scale_from(scale, E5M2, MEASURED, POWER_OF_TWO)
            tl.store(inverse_ptr, inverse_of(scale), mask=tl.program_id(0) == 0)
        y0, y1, y2, y3 = four_times(y0, y1, y2, y3, scale, row, R, EVEN)
        low, high = pairs_of(y0, y1, E5M2), pairs_of(y2, y3, E5M2)
        store_cols(codes_ptr, line, line < D, tile_row, RP, low, high, EVEN, TILE_ROWS)
