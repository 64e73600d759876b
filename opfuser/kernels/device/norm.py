"""RMSNorm, LayerNorm and L2 normalization of rows.

Dimensions: R rows, D columns, P programs that share the rows. x, residual, dy, residual_grad:
(R, D), rows apart by their stride; y, total, dx: (R, D), contiguous; weight, bias: (D,); mean,
rstd: (R,); partial: (1 or 2, P, D), sums for dw and, with a bias, for db. Pointers may be None.
After a chain of element-wise stages x is contiguous, and operands are as in ``pointwise``.

With ``share`` = 1/D, or 1 for L2 normalization, and mean = 0 where mean_ptr is None:

    rstd = (share Σ (x - mean)² + eps)^-1/2        x̂ = (x - mean) rstd        y = x̂ w + b
    dx = residual_grad + rstd (dy w - x̂ share Σ dy w x̂ - share Σ dy w)       dw = Σ dy x̂, db = Σ dy

with the last sum of dx for LayerNorm alone, and w = weight, weight + 1, or 1 without a weight.
In backward y may have a weight of its own, y_weight.
Forward and backward compute y by the same operations: they give the same bits, or, where the
compiler contracts a product and a sum in one of them only, neighboring numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pointwise import apply, common, place
from .store import store_rows, store_tile


@triton.jit
def load_rows(ptr, row, stride, cols, inside):
    """Elements of rows in fp32, 0 outside."""
    at = ptr + row.to(tl.int64) * stride + cols
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_scale(weight_ptr, cols, within, ZERO_CENTERED: tl.constexpr):
    """What columns are multiplied by, in fp32; 0 outside, but 1 everywhere without a weight."""
    if weight_ptr is None:
        scale = tl.full(cols.shape, 1.0, tl.float32)
    else:
        scale = tl.load(weight_ptr + cols, mask=within, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            scale += 1.0
    return scale


@triton.jit
def load_bias(bias_ptr, cols, within):
    """What is added to columns, in fp32; 0 outside and without a bias."""
    if bias_ptr is None:
        bias = tl.zeros(cols.shape, tl.float32)
    else:
        bias = tl.load(bias_ptr + cols, mask=within, other=0.0).to(tl.float32)
    return bias


@triton.jit
def norm_of(
    x, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, row, cols, rows, columns, eps, share,
    ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """The norm of whole rows x, which are 0 outside; stores their statistics."""
    within = cols < columns
    scale = load_scale(weight_ptr, cols, within, ZERO_CENTERED)
    bias = load_bias(bias_ptr, cols, within)
    if mean_ptr is not None:
        # Not a product after the sum: x - mean would become one operation with it, and its mean not
        # be the rounded one that backward reads.
        mean = tl.sum(x * share, 1, keep_dims=True)
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(within & (row < rows), x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) * share + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    return tl.fma(x * rstd, scale, bias)


@triton.jit
def norm_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr,
    rows, columns, x_stride, residual_stride,
    eps, share,
    ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers: (BLOCK_ROWS, BLOCK_COLS >= D) per program."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (cols < columns) & (row < rows)
    x = load_rows(x_ptr, row, x_stride, cols, inside)
    if residual_ptr is not None:
        x += load_rows(residual_ptr, row, residual_stride, cols, inside)
        total = x.to(total_ptr.dtype.element_ty)
        store_rows(total_ptr, row, columns, cols, inside, total)
        x = total.to(tl.float32)
    y = norm_of(
        x, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, row, cols, rows, columns, eps, share,
        ZERO_CENTERED,
    )  # fmt: skip
    store_rows(y_ptr, row, columns, cols, inside, y)


@triton.jit
def chain_norm_forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr,
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr,
    rows, columns,
    eps, share,
    STAGES: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """``norm_forward`` of what a chain of element-wise stages makes of x, which is total."""
    operands = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr)
    first_row = tl.program_id(0) * BLOCK_ROWS
    tile = place(first_row, 0, rows, columns, BLOCK_ROWS, BLOCK_COLS)
    base, at, inside = tile
    shared = common(operands, 0, columns, STAGES, BLOCK_COLS)
    x = tl.load(x_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
    x, _derivatives = apply(
        x, operands, shared, first_row, 0, tile, STAGES, False, BLOCK_ROWS, BLOCK_COLS
    )
    # Rounded even if it is not stored: y is the same whether a gradient is needed or not.
    total = x.to(y_ptr.dtype.element_ty)
    if total_ptr is not None:
        store_tile(total_ptr, tile, total)
    x = tl.where(inside, total.to(tl.float32), 0.0)  # stages may have made more of zeros
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    y = norm_of(
        x, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, row, cols, rows, columns, eps, share,
        ZERO_CENTERED,
    )  # fmt: skip
    store_tile(y_ptr, tile, y)


@triton.jit
def norm_forward_wide(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr,
    rows, columns, x_stride, residual_stride,
    eps, share,
    ZERO_CENTERED: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """One row per program, BLOCK_COLS columns at a time, and a second time from the cache.

    Each lane keeps mean and sum of squared deviations of its columns, by Welford's recurrence.
    """
    row = tl.program_id(0)
    means = tl.zeros([BLOCK_COLS], tl.float32)
    squares = tl.zeros([BLOCK_COLS], tl.float32)
    count = 0.0
    for start in range(0, columns, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = cols < columns
        x = load_rows(x_ptr, row, x_stride, cols, inside)
        if residual_ptr is not None:
            x += load_rows(residual_ptr, row, residual_stride, cols, inside)
            total = x.to(total_ptr.dtype.element_ty)
            store_rows(total_ptr, row, columns, cols, inside, total)
            x = total.to(tl.float32)
        if mean_ptr is None:
            squares += x * x
        else:
            count += 1.0
            deviation = tl.where(inside, x - means, 0.0)
            means += deviation * (1.0 / count)
            squares += deviation * tl.where(inside, x - means, 0.0)
    mean = 0.0
    if mean_ptr is not None:
        # Lanes beyond the end of the last block have seen one column less.
        seen = tl.cdiv(columns - tl.arange(0, BLOCK_COLS), BLOCK_COLS).to(tl.float32)
        mean = tl.sum(means * (seen * share), 0)
        squares += seen * (means - mean) * (means - mean)
        tl.store(mean_ptr + row, mean)
    rstd = tl.rsqrt(tl.sum(squares, 0) * share + eps)
    tl.store(rstd_ptr + row, rstd)
    if residual_ptr is not None:
        tl.debug_barrier()  # the sum is read again, maybe by other threads than wrote it
    for start in range(0, columns, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = cols < columns
        if residual_ptr is None:
            x = load_rows(x_ptr, row, x_stride, cols, inside)
        else:
            x = load_rows(total_ptr, row, columns, cols, inside)
        if mean_ptr is not None:
            x -= mean
        scale = load_scale(weight_ptr, cols, inside, ZERO_CENTERED)
        bias = load_bias(bias_ptr, cols, inside)
        store_rows(y_ptr, row, columns, cols, inside, tl.fma(x * rstd, scale, bias))


@triton.jit
def norm_backward(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, residual_grad_ptr,
    y_weight_ptr, dx_ptr, y_ptr, partial_ptr,
    rows, columns, dy_stride, x_stride, residual_grad_stride,
    share,
    ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes every P-th block of rows, and sums dw and db over all it takes.

    Without dx, the columns may be shared out along the second axis of the grid.
    """
    program = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    within = cols < columns
    scale = load_scale(weight_ptr, cols, within, ZERO_CENTERED)
    dw = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    db = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    step = tl.num_programs(0) * BLOCK_ROWS
    for start in tl.range(program * BLOCK_ROWS, rows, step, num_stages=NUM_STAGES):
        row = start + tl.arange(0, BLOCK_ROWS)[:, None]
        inside = within & (row < rows)
        xhat = load_rows(x_ptr, row, x_stride, cols, inside)
        dy = load_rows(dy_ptr, row, dy_stride, cols, inside)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        if mean_ptr is not None:
            xhat -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        xhat *= rstd
        if y_ptr is not None:
            y_scale = scale
            if y_weight_ptr is not None:
                y_scale = load_scale(y_weight_ptr, cols, within, ZERO_CENTERED)
            bias = load_bias(bias_ptr, cols, within)
            store_rows(y_ptr, row, columns, cols, inside, tl.fma(xhat, y_scale, bias))
        if partial_ptr is not None:
            dw += dy * xhat
            if bias_ptr is not None:
                db += dy
        if dx_ptr is not None:
            dh = dy * scale
            dx = dh - xhat * (tl.sum(dh * xhat, 1, keep_dims=True) * share)
            if mean_ptr is not None:
                dx -= tl.sum(dh, 1, keep_dims=True) * share
            dx *= rstd
            if residual_grad_ptr is not None:
                dx += load_rows(residual_grad_ptr, row, residual_grad_stride, cols, inside)
            store_rows(dx_ptr, row, columns, cols, inside, dx)
    if partial_ptr is not None:
        at = partial_ptr + program * columns + cols
        tl.store(at, tl.sum(dw, 0, keep_dims=True), mask=within)
        if bias_ptr is not None:
            at += tl.num_programs(0) * columns
            tl.store(at, tl.sum(db, 0, keep_dims=True), mask=within)


@triton.jit
def norm_backward_wide(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, residual_grad_ptr,
    y_weight_ptr, dx_ptr, y_ptr,
    rows, columns, dy_stride, x_stride, residual_grad_stride,
    share,
    ZERO_CENTERED: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Writes dx and y of one row per program, BLOCK_COLS columns at a time, twice."""
    row = tl.program_id(0)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
    slopes = tl.zeros([BLOCK_COLS], tl.float32)
    shifts = tl.zeros([BLOCK_COLS], tl.float32)
    for start in range(0, columns, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = cols < columns
        dh = load_rows(dy_ptr, row, dy_stride, cols, inside)
        dh *= load_scale(weight_ptr, cols, inside, ZERO_CENTERED)
        slopes += dh * ((load_rows(x_ptr, row, x_stride, cols, inside) - mean) * rstd)
        shifts += dh
    slope = tl.sum(slopes, 0) * share
    shift = 0.0
    if mean_ptr is not None:
        shift = tl.sum(shifts, 0) * share
    for start in range(0, columns, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = cols < columns
        scale = load_scale(weight_ptr, cols, inside, ZERO_CENTERED)
        xhat = (load_rows(x_ptr, row, x_stride, cols, inside) - mean) * rstd
        if y_ptr is not None:
            y_scale = scale
            if y_weight_ptr is not None:
                y_scale = load_scale(y_weight_ptr, cols, inside, ZERO_CENTERED)
            bias = load_bias(bias_ptr, cols, inside)
            store_rows(y_ptr, row, columns, cols, inside, tl.fma(xhat, y_scale, bias))
        dh = load_rows(dy_ptr, row, dy_stride, cols, inside) * scale
        dx = (dh - xhat * slope - shift) * rstd
        if residual_grad_ptr is not None:
            dx += load_rows(residual_grad_ptr, row, residual_grad_stride, cols, inside)
        store_rows(dx_ptr, row, columns, cols, inside, dx)
