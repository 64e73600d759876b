"""Element-wise activation, with a bias before it, and its gradients.

Dimensions: R rows, C columns, N = R C elements, S slices of the rows, for partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scalar import chain
from .store import store_flat, store_rows


@triton.jit
def forward_flat(
    x_ptr, y_ptr, size, F: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr
):  # x, y (N,)
    """``y = f(x)`` of contiguous tensors."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    value, _ = F(x, P)
    store_flat(y_ptr, at, mask, value)


@triton.jit
def backward_flat(
    dy_ptr, x_ptr, dx_ptr, y_ptr, size, F: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr
):  # all (N,)
    """``dx = dy f'(x)`` and, unless ``y_ptr`` is None, ``y = f(x)`` of contiguous tensors."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    value, derivative = F(x, P)
    store_flat(dx_ptr, at, mask, chain(dy, derivative))
    if y_ptr is not None:
        store_flat(y_ptr, at, mask, value)


@triton.jit
def forward_rows(
    x_ptr, bias_ptr, y_ptr,
    rows, cols, x_stride,
    F: tl.constexpr, P: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    # x, y (R, C), bias (C,) or None
    """``y = f(x + b)``, a tile per program; tiles along a row are neighbors."""
    blocks = tl.cdiv(cols, BLOCK_COLS)
    row = (tl.program_id(0) // blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (tl.program_id(0) % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    at_row = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + at_row * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    value, _ = F(x, P)
    store_rows(y_ptr, row[:, None], cols, col[None, :], mask, value)


@triton.jit
def backward_rows(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, y_ptr, db_ptr,
    rows, cols, dy_stride, x_stride, slices,
    F: tl.constexpr, P: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    # dy, x, dx, y (R, C), bias (C,), db (S, C)
    """``dx = dy f'(x + b)``, ``y = f(x + b)`` and sums of dx over rows; what is None is left out.

    A program takes one block of columns, and in it slice s of the rows: every S-th tile from the
    s-th, so that all programs together move along the tensors.
    """
    blocks = tl.cdiv(cols, BLOCK_COLS)
    part = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    step = slices * BLOCK_ROWS
    for first in tl.range(part * BLOCK_ROWS, rows, step, num_stages=AHEAD):
        row = first + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        at_row = row.to(tl.int64)[:, None]
        x_at = x_ptr + at_row * x_stride + col[None, :]
        dy_at = dy_ptr + at_row * dy_stride + col[None, :]
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x += bias
        value, derivative = F(x, P)
        dx = chain(dy, derivative)
        if dx_ptr is not None:
            store_rows(dx_ptr, row[:, None], cols, col[None, :], mask, dx)
        if y_ptr is not None:
            store_rows(y_ptr, row[:, None], cols, col[None, :], mask, value)
        if db_ptr is not None:
            total += dx
    if db_ptr is not None:
        db = tl.sum(total, axis=0)
        tl.store(db_ptr + part.to(tl.int64) * cols + col, db, mask=col < cols)
