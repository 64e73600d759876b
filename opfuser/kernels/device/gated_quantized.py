"""Gated products ``h = g(a) u(b)`` to fp8, and gradients; a tile per program.

Dimensions: R rows, RP of them with padding, F columns of output; x has 2F, gates a and linear units
b, as in ``gated``: halves, or blocks of INTERLEAVE columns by turns. Where UP is None there are no
linear units, and x has F columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import (
    four_times,
    in_row,
    inverse_of,
    larger,
    largest_of_four,
    load_four,
    pairs_of,
    place,
    raise_amax,
    store_cols,
    store_row,
    store_rows,
    tile_cols,
    tile_rows,
    times,
)
from .scalar import chain


@triton.jit
def _gates(line, F, INTERLEAVE: tl.constexpr):
    """Where in a row of x the gates of columns are, and how far behind them the linear units."""
    gates = line
    apart = F
    if INTERLEAVE > 0:
        gates = line // INTERLEAVE * (2 * INTERLEAVE) + line % INTERLEAVE
        apart = INTERLEAVE
    return gates, apart


@triton.jit
def _load_units(x_ptr, row, stride, gates, apart, R, within, UP: tl.constexpr, EVEN: tl.constexpr):
    """The four tensors of a tile of linear units; None without UP."""
    b0, b1, b2, b3 = None, None, None, None
    if UP is not None:
        b0, b1, b2, b3 = load_four(x_ptr + apart, row, stride, gates, R, within, EVEN)
    return b0, b1, b2, b3


@triton.jit
def _product(
    a, b, inside,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """``g(a) u(b)``; 0 in padding, as of functions that are not 0 at 0."""
    h, _ = GATE(a.to(tl.float32), GATE_P)
    if UP is not None:
        units, _ = UP(b.to(tl.float32), UP_P)
        h *= units
    if not EVEN:
        h = tl.where(inside, h, 0.0)
    return h


@triton.jit
def forward(
    x_ptr, scale_ptr, rows_ptr, inverse_ptr, amax_ptr,
    R, RP, F, x_stride,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    INTERLEAVE: tl.constexpr, E5M2: tl.constexpr,
    EVEN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Codes of ``h s`` by rows, 1 / s, and ``max |h|``."""
    scale = tl.load(scale_ptr)
    tile_row, tile_col = place(RP, F, TILE_ROWS, TILE_COLS, GROUP)
    row = tile_rows(tile_row, TILE_ROWS)
    line = tile_cols(tile_col, TILE_COLS)
    gate_line, apart = _gates(line, F, INTERLEAVE)
    col, gates = in_row(line, VEC), in_row(gate_line, VEC)
    within = col < F
    a0, a1, a2, a3 = load_four(x_ptr, row, x_stride, gates, R, within, EVEN)
    b0, b1, b2, b3 = _load_units(x_ptr, row, x_stride, gates, apart, R, within, UP, EVEN)
    tl.store(inverse_ptr, inverse_of(scale), mask=tl.program_id(0) == 0)
    h0 = _product(a0, b0, (row < R) & within, GATE, GATE_P, UP, UP_P, EVEN)
    h1 = _product(a1, b1, (row + 1 < R) & within, GATE, GATE_P, UP, UP_P, EVEN)
    h2 = _product(a2, b2, (row + 2 < R) & within, GATE, GATE_P, UP, UP_P, EVEN)
    h3 = _product(a3, b3, (row + 3 < R) & within, GATE, GATE_P, UP, UP_P, EVEN)
    if amax_ptr is not None:
        raise_amax(amax_ptr, largest_of_four(h0, h1, h2, h3))
    h0, h1, h2, h3 = four_times(h0, h1, h2, h3, scale, row, R, EVEN)
    store_rows(rows_ptr, row, F, col, within, h0, h1, h2, h3, E5M2, EVEN)


@triton.jit
def _gradients(
    dy, a, b, inside,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """da, db and h; without UP, da again for db. In padding dy is 0, and so is h."""
    dy = dy.to(tl.float32)
    h, gate_slope = GATE(a.to(tl.float32), GATE_P)
    if UP is None:
        da = chain(dy, gate_slope)
        db = da
    else:
        units, up_slope = UP(b.to(tl.float32), UP_P)
        da = chain(dy * units, gate_slope)
        db = chain(dy * h, up_slope)
        h *= units
    if not EVEN:
        h = tl.where(inside, h, 0.0)
    return da, db, h


@triton.jit
def _two_rows(
    rows_ptr, scale, h_scale, row, R, width, gates, apart, within,
    dy0, dy1, a0, a1, b0, b1,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    E5M2: tl.constexpr, H_E5M2: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Stores dx by rows; returns pairs of codes of da, db and h, and sizes of dx and of h."""
    da0, db0, h0 = _gradients(dy0, a0, b0, (row < R) & within, GATE, GATE_P, UP, UP_P, EVEN)
    da1, db1, h1 = _gradients(dy1, a1, b1, (row + 1 < R) & within, GATE, GATE_P, UP, UP_P, EVEN)
    dx_sizes = larger(tl.abs(da0), tl.abs(da1))
    if UP is not None:
        dx_sizes = larger(dx_sizes, larger(tl.abs(db0), tl.abs(db1)))
    h_sizes = larger(tl.abs(h0), tl.abs(h1))
    da0, da1 = times(da0, scale, row, R, EVEN), times(da1, scale, row + 1, R, EVEN)
    store_row(rows_ptr, row, width, gates, within, da0, E5M2, EVEN)
    store_row(rows_ptr, row + 1, width, gates, within, da1, E5M2, EVEN)
    if UP is not None:
        db0, db1 = times(db0, scale, row, R, EVEN), times(db1, scale, row + 1, R, EVEN)
        store_row(rows_ptr + apart, row, width, gates, within, db0, E5M2, EVEN)
        store_row(rows_ptr + apart, row + 1, width, gates, within, db1, E5M2, EVEN)
    h0, h1 = times(h0, h_scale, row, R, EVEN), times(h1, h_scale, row + 1, R, EVEN)
    pairs = pairs_of(da0, da1, E5M2), pairs_of(db0, db1, E5M2), pairs_of(h0, h1, H_E5M2)
    return pairs[0], pairs[1], pairs[2], dx_sizes, h_sizes


@triton.jit
def backward(
    dy_ptr, x_ptr, rows_ptr, cols_ptr, h_ptr, dx_scale_ptr, h_scale_ptr, dx_inverse_ptr,
    h_inverse_ptr, dx_amax_ptr, h_amax_ptr,
    R, RP, F, dy_stride, x_stride,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    INTERLEAVE: tl.constexpr, E5M2: tl.constexpr, H_E5M2: tl.constexpr,
    EVEN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Codes of dx by rows (RP, 2F) and by columns (2F, RP), of h by columns (F, RP); maxima.

    Two rows of four at a time, as codes take a quarter of the registers that values do.
    """
    # Loaded first, while nothing else waits for memory.
    scale = tl.load(dx_scale_ptr)
    h_scale = tl.load(h_scale_ptr)
    tile_row, tile_col = place(RP, F, TILE_ROWS, TILE_COLS, GROUP)
    row = tile_rows(tile_row, TILE_ROWS)
    line = tile_cols(tile_col, TILE_COLS)
    gate_line, apart = _gates(line, F, INTERLEAVE)
    col, gates = in_row(line, VEC), in_row(gate_line, VEC)
    within = col < F
    dy0, dy1, dy2, dy3 = load_four(dy_ptr, row, dy_stride, col, R, within, EVEN)
    a0, a1, a2, a3 = load_four(x_ptr, row, x_stride, gates, R, within, EVEN)
    b0, b1, b2, b3 = _load_units(x_ptr, row, x_stride, gates, apart, R, within, UP, EVEN)
    tl.store(dx_inverse_ptr, inverse_of(scale), mask=tl.program_id(0) == 0)
    tl.store(h_inverse_ptr, inverse_of(h_scale), mask=tl.program_id(0) == 0)
    width = F if UP is None else 2 * F
    da_low, db_low, h_low, dx_sizes, h_sizes = _two_rows(
        rows_ptr, scale, h_scale, row, R, width, gates, apart, within,
        dy0, dy1, a0, a1, b0, b1, GATE, GATE_P, UP, UP_P, E5M2, H_E5M2, EVEN,
    )  # fmt: skip
    da_high, db_high, h_high, more_dx, more_h = _two_rows(
        rows_ptr, scale, h_scale, row + 2, R, width, gates, apart, within,
        dy2, dy3, a2, a3, b2, b3, GATE, GATE_P, UP, UP_P, E5M2, H_E5M2, EVEN,
    )  # fmt: skip
    if dx_amax_ptr is not None:
        raise_amax(dx_amax_ptr, larger(dx_sizes, more_dx))
    if h_amax_ptr is not None:
        raise_amax(h_amax_ptr, larger(h_sizes, more_h))
    below = line < F
    store_cols(cols_ptr, gate_line, below, tile_row, RP, da_low, da_high, EVEN, TILE_ROWS)
    if UP is not None:
        units = gate_line + apart
        store_cols(cols_ptr, units, below, tile_row, RP, db_low, db_high, EVEN, TILE_ROWS)
    store_cols(h_ptr, line, below, tile_row, RP, h_low, h_high, EVEN, TILE_ROWS)
