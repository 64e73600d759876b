"""Gated products ``y = g(a) u(b)`` of gates a and linear units b packed in x, and gradients.

Dimensions: R rows, F columns of output; x has 2F. Gates are its first half; or, with INTERLEAVE,
gates and linear units alternate in blocks of so many columns: NARROW says that a block is narrower
than a wide access, so that both are loaded together and parted in registers. Where UP is None there
are no linear units: x has F columns, all gates. Scales, one per row, multiply y.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scalar import chain
from .store import store_rows


@triton.jit
def _columns(first, cols, INTERLEAVE: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Where in a row of x the gates of a tile are, and how far behind them the linear units."""
    gates = first + tl.arange(0, BLOCK_COLS)
    apart = cols
    if INTERLEAVE > 0:
        gates = gates // INTERLEAVE * (2 * INTERLEAVE) + gates % INTERLEAVE
        apart = INTERLEAVE
    return gates, apart


@triton.jit
def _load(
    x_ptr, below, first, cols,
    UP: tl.constexpr, INTERLEAVE: tl.constexpr, NARROW: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Gates and linear units of a tile, in fp32: without UP both are the gates.

    ``x_ptr`` points to its rows, ``below`` says which of them there are: (BLOCK_ROWS, 1).
    """
    if NARROW:
        col = 2 * first + tl.arange(0, 2 * BLOCK_COLS)
        both = tl.load(x_ptr + col[None, :], mask=below & (col < 2 * cols)[None, :], other=0.0)
        parts = both.reshape(BLOCK_ROWS, BLOCK_COLS // INTERLEAVE, 2, INTERLEAVE)
        a, b = tl.split(parts.permute(0, 1, 3, 2))
        a = a.reshape(BLOCK_ROWS, BLOCK_COLS)
        b = b.reshape(BLOCK_ROWS, BLOCK_COLS)
    else:
        mask = below & (first + tl.arange(0, BLOCK_COLS) < cols)[None, :]
        col, apart = _columns(first, cols, INTERLEAVE, BLOCK_COLS)
        a = tl.load(x_ptr + col[None, :], mask=mask, other=0.0)
        b = a
        if UP is not None:
            b = tl.load(x_ptr + (col + apart)[None, :], mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store(
    dx_ptr, row, stride, da, db, below, first, cols,
    UP: tl.constexpr, INTERLEAVE: tl.constexpr, NARROW: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Writes a tile of the gradient of x, as :func:`_load` reads x."""
    if NARROW:
        dtype = dx_ptr.dtype.element_ty
        da = da.to(dtype).reshape(BLOCK_ROWS, BLOCK_COLS // INTERLEAVE, INTERLEAVE)
        db = db.to(dtype).reshape(BLOCK_ROWS, BLOCK_COLS // INTERLEAVE, INTERLEAVE)
        both = tl.join(da, db).permute(0, 1, 3, 2).reshape(BLOCK_ROWS, 2 * BLOCK_COLS)
        col = 2 * first + tl.arange(0, 2 * BLOCK_COLS)
        inside = below & (col < 2 * cols)[None, :]
        store_rows(dx_ptr, row[:, None], stride, col[None, :], inside, both)
    else:
        mask = below & (first + tl.arange(0, BLOCK_COLS) < cols)[None, :]
        col, apart = _columns(first, cols, INTERLEAVE, BLOCK_COLS)
        store_rows(dx_ptr, row[:, None], stride, col[None, :], mask, da)
        if UP is not None:
            store_rows(dx_ptr, row[:, None], stride, (col + apart)[None, :], mask, db)


@triton.jit
def forward(
    x_ptr, scales_ptr, y_ptr,
    rows, cols, x_stride,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    INTERLEAVE: tl.constexpr, NARROW: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    # x (R, 2F), scales (R,) or None, y (R, F)
    """``y = g(a) u(b) s``, a tile per program; tiles along a row are neighbors."""
    blocks = tl.cdiv(cols, BLOCK_COLS)
    row = (tl.program_id(0) // blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = (tl.program_id(0) % blocks) * BLOCK_COLS
    col = first + tl.arange(0, BLOCK_COLS)
    below = (row < rows)[:, None]
    at_row = row.to(tl.int64)[:, None]
    x_at = x_ptr + at_row * x_stride
    a, b = _load(x_at, below, first, cols, UP, INTERLEAVE, NARROW, BLOCK_ROWS, BLOCK_COLS)
    y, _ = GATE(a, GATE_P)
    if UP is not None:
        units, _ = UP(b, UP_P)
        y *= units
    if scales_ptr is not None:
        y *= tl.load(scales_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    mask = below & (col < cols)[None, :]
    store_rows(y_ptr, row[:, None], cols, col[None, :], mask, y)


@triton.jit
def _backward_tile(
    dy_ptr, x_ptr, dx_ptr, y_ptr,
    scales, row, first, rows, cols, dy_stride, x_stride, dx_stride,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    INTERLEAVE: tl.constexpr, NARROW: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile; returns ``dy g(a) u(b)``, whose row sums are those of the scales.

    Reads all of the tile before it writes, so that dx may be x.
    """
    col = first + tl.arange(0, BLOCK_COLS)
    below = (row < rows)[:, None]
    mask = below & (col < cols)[None, :]
    at_row = row.to(tl.int64)[:, None]
    dy_at = dy_ptr + at_row * dy_stride + col[None, :]
    dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
    x_at = x_ptr + at_row * x_stride
    a, b = _load(x_at, below, first, cols, UP, INTERLEAVE, NARROW, BLOCK_ROWS, BLOCK_COLS)
    gates, gates_slope = GATE(a, GATE_P)
    if UP is None:
        y = gates
        da = chain(dy * scales, gates_slope)
        db = da
    else:
        units, units_slope = UP(b, UP_P)
        y = gates * units
        da = chain(dy * scales * units, gates_slope)
        db = chain(dy * scales * gates, units_slope)
    if y_ptr is not None:
        store_rows(y_ptr, row[:, None], cols, col[None, :], mask, y * scales)
    if dx_ptr is not None:
        _store(
            dx_ptr, row, dx_stride, da, db, below, first, cols,
            UP, INTERLEAVE, NARROW, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
    return dy * y


@triton.jit
def backward(
    dy_ptr, x_ptr, scales_ptr, dx_ptr, dscales_ptr, y_ptr,
    rows, cols, dy_stride, x_stride, dx_stride,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    INTERLEAVE: tl.constexpr, NARROW: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    # dy, y (R, F), x, dx (R, 2F), scales, dscales (R,)
    """Gradients of x and of the scales, and ``y``; what is None is left out.

    A tile per program, as in forward; whole rows per program if there are row sums to make.
    """
    if dscales_ptr is None:
        blocks = tl.cdiv(cols, BLOCK_COLS)
        row = (tl.program_id(0) // blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        start = (tl.program_id(0) % blocks) * BLOCK_COLS
    else:
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        start = 0
    if scales_ptr is None:
        scales = 1.0
    else:
        scales = tl.load(scales_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    if dscales_ptr is None:
        _backward_tile(
            dy_ptr, x_ptr, dx_ptr, y_ptr, scales, row, start, rows, cols, dy_stride, x_stride,
            dx_stride, GATE, GATE_P, UP, UP_P, INTERLEAVE, NARROW, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        for first in range(0, cols, BLOCK_COLS):
            total += _backward_tile(
                dy_ptr, x_ptr, dx_ptr, y_ptr, scales, row, first, rows, cols, dy_stride, x_stride,
                dx_stride, GATE, GATE_P, UP, UP_P, INTERLEAVE, NARROW, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
        tl.store(dscales_ptr + row, tl.sum(total, axis=1), mask=row < rows)
