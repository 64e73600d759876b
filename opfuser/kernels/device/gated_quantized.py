"""Gated products ``h = g(a) u(b)`` to fp8, and gradients; a tile per program.

Dimensions: R rows, RP of them with padding, F columns of output; x has 2F, gates a and linear units
b, as in ``gated``: halves, or blocks of INTERLEAVE columns by turns. Where UP is None there are no
linear units, and x has F columns.
"""

# Longer than 500 lines: kernels that share their tiles' loads and
# encodings, which Triton compiles as functions of one module.

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
    load,
    load_four,
    pairs_of,
    place,
    raise_amax,
    scale_from,
    square_scale_of,
    store_cols,
    store_row,
    store_row_block,
    store_row_blocks,
    store_row_scales,
    store_rows,
    store_square_scale,
    store_sums,
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
def _load_units(
    x_ptr, row, stride, gates, apart, R, within, a0, a1, a2, a3,
    UP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The four tensors of a tile of linear units; without UP those of gates, which no one reads."""
    if UP is not None:
        a0, a1, a2, a3 = load_four(x_ptr + apart, row, stride, gates, R, within, EVEN)
    return a0, a1, a2, a3


@triton.jit
def _load_bias(bias_ptr, gates, within, EVEN: tl.constexpr, TILE_ROWS: tl.constexpr):
    """The bias in fp32, for each row of one of a tile's four tensors.

    A single row would have a layout of its own, and change threads on the way to the sum.
    """
    gates = tl.broadcast_to(gates, TILE_ROWS // 4, gates.shape[1])
    return load(bias_ptr + gates, within, EVEN).to(tl.float32)


@triton.jit
def _biased(a, bias):
    """The argument of the gates' function, in fp32."""
    a = a.to(tl.float32)
    if bias is not None:
        a += bias
    return a


@triton.jit
def _product(
    a, b, bias, inside,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """``g(a) u(b)``; 0 in padding, as of functions that are not 0 at 0."""
    h, _ = GATE(_biased(a, bias), GATE_P)
    if UP is not None:
        units, _ = UP(b.to(tl.float32), UP_P)
        h *= units
    if not EVEN:
        h = tl.where(inside, h, 0.0)
    return h


@triton.jit
def _four_products(
    a0, a1, a2, a3, b0, b1, b2, b3, bias, row, R, within,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The four tensors of a tile of h."""
    h0 = _product(a0, b0, bias, (row < R) & within, GATE, GATE_P, UP, UP_P, EVEN)
    h1 = _product(a1, b1, bias, (row + 1 < R) & within, GATE, GATE_P, UP, UP_P, EVEN)
    h2 = _product(a2, b2, bias, (row + 2 < R) & within, GATE, GATE_P, UP, UP_P, EVEN)
    h3 = _product(a3, b3, bias, (row + 3 < R) & within, GATE, GATE_P, UP, UP_P, EVEN)
    return h0, h1, h2, h3


@triton.jit
def _store_input(
    rows_ptr, scale_ptr, row, width, gates, apart, tile_col, F, RP,
    a0, a1, a2, a3, b0, b1, b2, b3,
    UP: tl.constexpr, INTERLEAVE: tl.constexpr, TILE_COLS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Codes of x in E4M3 by rows with a scale for each row of a tile, (width / TILE_COLS, RP)."""
    first_gate, _ = _gates(tile_col * TILE_COLS, F, INTERLEAVE)
    block = first_gate // TILE_COLS
    a0, a1, a2, a3 = a0.to(tl.float32), a1.to(tl.float32), a2.to(tl.float32), a3.to(tl.float32)
    store_row_blocks(
        rows_ptr, scale_ptr, row, width, gates, block, RP, a0, a1, a2, a3, False, False, LANES
    )
    if UP is not None:
        b0, b1, b2, b3 = b0.to(tl.float32), b1.to(tl.float32), b2.to(tl.float32), b3.to(tl.float32)
        block += apart // TILE_COLS
        store_row_blocks(
            rows_ptr + apart, scale_ptr, row, width, gates, block, RP, b0, b1, b2, b3, False, False,
            LANES,
        )  # fmt: skip


@triton.jit
def forward(
    x_ptr, bias_ptr, scale_ptr, rows_ptr, inverse_ptr, amax_ptr, x_rows_ptr, x_scale_ptr,
    R, RP, F, x_stride,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    INTERLEAVE: tl.constexpr, E5M2: tl.constexpr, MEASURED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    EVEN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Codes of ``h s`` by rows and 1 / s, unless there is no s; ``max |h|``; codes of x by rows.

    If MEASURED, scale_ptr has the amax that s comes from. For codes of x F and INTERLEAVE are
    multiples of TILE_COLS.
    """
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    tile_row, tile_col = place(RP, F, TILE_ROWS, TILE_COLS, GROUP)
    row = tile_rows(tile_row, TILE_ROWS)
    line = tile_cols(tile_col, TILE_COLS)
    gate_line, apart = _gates(line, F, INTERLEAVE)
    col, gates = in_row(line, VEC), in_row(gate_line, VEC)
    within = col < F
    a0, a1, a2, a3 = load_four(x_ptr, row, x_stride, gates, R, within, EVEN)
    b0, b1, b2, b3 = _load_units(
        x_ptr, row, x_stride, gates, apart, R, within, a0, a1, a2, a3, UP, EVEN
    )
    bias = None
    if bias_ptr is not None:
        bias = _load_bias(bias_ptr, gates, within, EVEN, TILE_ROWS)
    if scale_ptr is not None:
        scale = scale_from(scale, E5M2, MEASURED, POWER_OF_TWO)
        tl.store(inverse_ptr, inverse_of(scale), mask=tl.program_id(0) == 0)
    if x_rows_ptr is not None:
        _store_input(
            x_rows_ptr, x_scale_ptr, row, F if UP is None else 2 * F, gates, apart, tile_col, F, RP,
            a0, a1, a2, a3, b0, b1, b2, b3, UP, INTERLEAVE, TILE_COLS, TILE_COLS // VEC,
        )  # fmt: skip
    h0, h1, h2, h3 = _four_products(
        a0, a1, a2, a3, b0, b1, b2, b3, bias, row, R, within, GATE, GATE_P, UP, UP_P, EVEN
    )
    if amax_ptr is not None:
        raise_amax(amax_ptr, largest_of_four(h0, h1, h2, h3))
    if scale_ptr is not None:
        h0, h1, h2, h3 = four_times(h0, h1, h2, h3, scale, row, R, EVEN)
        store_rows(rows_ptr, row, F, col, within, h0, h1, h2, h3, E5M2, EVEN)


@triton.jit
def forward_by_blocks(
    x_ptr, bias_ptr, rows_ptr, row_scale_ptr,
    R, RP, F, x_stride,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    INTERLEAVE: tl.constexpr, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EVEN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Codes of h by rows with a scale for each row of a tile; F is a multiple of TILE_COLS.

    row_scale (F / TILE_COLS, RP).
    """
    tile_row, tile_col = place(RP, F, TILE_ROWS, TILE_COLS, GROUP)
    row = tile_rows(tile_row, TILE_ROWS)
    line = tile_cols(tile_col, TILE_COLS)
    gate_line, apart = _gates(line, F, INTERLEAVE)
    col, gates = in_row(line, VEC), in_row(gate_line, VEC)
    within = col < F
    a0, a1, a2, a3 = load_four(x_ptr, row, x_stride, gates, R, within, EVEN)
    b0, b1, b2, b3 = _load_units(
        x_ptr, row, x_stride, gates, apart, R, within, a0, a1, a2, a3, UP, EVEN
    )
    bias = None
    if bias_ptr is not None:
        bias = _load_bias(bias_ptr, gates, within, EVEN, TILE_ROWS)
    h0, h1, h2, h3 = _four_products(
        a0, a1, a2, a3, b0, b1, b2, b3, bias, row, R, within, GATE, GATE_P, UP, UP_P, EVEN
    )
    store_row_blocks(
        rows_ptr, row_scale_ptr, row, F, col, tile_col, RP, h0, h1, h2, h3,
        E5M2, POWER_OF_TWO, TILE_COLS // VEC,
    )  # fmt: skip


@triton.jit
def _gradients(
    dy, a, b, bias, inside,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """da, db and h; without UP, da again for db. In padding dy is 0, and so is all of them."""
    dy = dy.to(tl.float32)
    h, gate_slope = GATE(_biased(a, bias), GATE_P)
    if UP is None:
        da = chain(dy, gate_slope)
        if not EVEN:
            da = tl.where(inside, da, 0.0)  # a bias may have a slope that is not finite
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
    rows_ptr, scale, h_scale, row, R, width, gates, apart, within, da0, da1, db0, db1, h0, h1,
    UP: tl.constexpr, E5M2: tl.constexpr, H_E5M2: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Stores dx by rows; returns pairs of codes of da, db and h."""
    da0, da1 = times(da0, scale, row, R, EVEN), times(da1, scale, row + 1, R, EVEN)
    store_row(rows_ptr, row, width, gates, within, da0, E5M2, EVEN)
    store_row(rows_ptr, row + 1, width, gates, within, da1, E5M2, EVEN)
    if UP is not None:
        db0, db1 = times(db0, scale, row, R, EVEN), times(db1, scale, row + 1, R, EVEN)
        store_row(rows_ptr + apart, row, width, gates, within, db0, E5M2, EVEN)
        store_row(rows_ptr + apart, row + 1, width, gates, within, db1, E5M2, EVEN)
    h0, h1 = times(h0, h_scale, row, R, EVEN), times(h1, h_scale, row + 1, R, EVEN)
    return pairs_of(da0, da1, E5M2), pairs_of(db0, db1, E5M2), pairs_of(h0, h1, H_E5M2)


@triton.jit
def _sizes(da0, da1, db0, db1, h0, h1, UP: tl.constexpr):
    """Largest magnitudes of dx and of h, over two rows."""
    dx_sizes = larger(tl.abs(da0), tl.abs(da1))
    if UP is not None:
        dx_sizes = larger(dx_sizes, larger(tl.abs(db0), tl.abs(db1)))
    return dx_sizes, larger(tl.abs(h0), tl.abs(h1))


@triton.jit
def _load_scales(scale_ptr, block, RP, tile_row, TILE_ROWS: tl.constexpr):
    """Inverse scales of codes, of a block of columns and the rows of a tile's four tensors.

    Of (TILE_ROWS / 4, 1) a thread would load one for each of its columns.
    """
    ptr = scale_ptr + block.to(tl.int64) * RP
    ptr += tile_row * TILE_ROWS + 4 * tl.arange(0, TILE_ROWS // 4)
    s0, s1, s2, s3 = tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3)
    return s0[:, None], s1[:, None], s2[:, None], s3[:, None]


@triton.jit
def _input_scales(
    scale_ptr, tile_row, tile_col, apart, F, RP, row,
    UP: tl.constexpr, INTERLEAVE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr,
):  # fmt: skip
    """Scales of a tile's gates and of its linear units; unused rows where x is no codes."""
    a0, a1, a2, a3 = row, row, row, row
    b0, b1, b2, b3 = row, row, row, row
    if scale_ptr is not None:
        first_gate, _ = _gates(tile_col * TILE_COLS, F, INTERLEAVE)
        block = first_gate // TILE_COLS
        a0, a1, a2, a3 = _load_scales(scale_ptr, block, RP, tile_row, TILE_ROWS)
        if UP is not None:
            block += apart // TILE_COLS
            b0, b1, b2, b3 = _load_scales(scale_ptr, block, RP, tile_row, TILE_ROWS)
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def _decoded(v, scale, scale_ptr):
    """``v``; of codes their values, in fp32."""
    if scale_ptr is not None:
        v = v.to(tl.float32) * scale
    return v


@triton.jit
def backward(
    dy_ptr, x_ptr, bias_ptr, rows_ptr, cols_ptr, h_ptr, x_scale_ptr,
    dx_scale_ptr, h_scale_ptr, dx_inverse_ptr, h_inverse_ptr, dx_amax_ptr, h_amax_ptr, sums_ptr,
    R, RP, F, dy_stride, x_stride,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    INTERLEAVE: tl.constexpr, E5M2: tl.constexpr, MEASURED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, H_E5M2: tl.constexpr, H_POWER_OF_TWO: tl.constexpr,
    EVEN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Codes of dx by rows (RP, 2F) and by columns (2F, RP), of h by columns (F, RP); maxima.

    Without scales there are no codes; MEASURED as in :func:`forward`. Sums of the tiles' columns
    of dx (T, 2F). Two rows of four at a time, as codes take a quarter of the registers that values
    do.

    With x_scale (2F / TILE_COLS, RP), x is codes by rows, padding included; F and INTERLEAVE are
    multiples of TILE_COLS.
    """
    ENCODES: tl.constexpr = dx_scale_ptr is not None
    X_EVEN: tl.constexpr = EVEN if x_scale_ptr is None else True
    # Loaded first, while nothing else waits for memory.
    if ENCODES:
        scale = tl.load(dx_scale_ptr)
        h_scale = tl.load(h_scale_ptr)
    tile_row, tile_col = place(RP, F, TILE_ROWS, TILE_COLS, GROUP)
    row = tile_rows(tile_row, TILE_ROWS)
    line = tile_cols(tile_col, TILE_COLS)
    gate_line, apart = _gates(line, F, INTERLEAVE)
    col, gates = in_row(line, VEC), in_row(gate_line, VEC)
    within = col < F
    dy0, dy1, dy2, dy3 = load_four(dy_ptr, row, dy_stride, col, R, within, EVEN)
    a0, a1, a2, a3 = load_four(x_ptr, row, x_stride, gates, R, within, X_EVEN)
    b0, b1, b2, b3 = _load_units(
        x_ptr, row, x_stride, gates, apart, R, within, a0, a1, a2, a3, UP, X_EVEN
    )
    a_scale0, a_scale1, a_scale2, a_scale3, b_scale0, b_scale1, b_scale2, b_scale3 = _input_scales(
        x_scale_ptr, tile_row, tile_col, apart, F, RP, row, UP, INTERLEAVE, TILE_ROWS, TILE_COLS
    )
    bias = None
    if bias_ptr is not None:
        bias = _load_bias(bias_ptr, gates, within, EVEN, TILE_ROWS)
    if ENCODES:
        scale = scale_from(scale, E5M2, MEASURED, POWER_OF_TWO)
        h_scale = scale_from(h_scale, H_E5M2, MEASURED, H_POWER_OF_TWO)
        tl.store(dx_inverse_ptr, inverse_of(scale), mask=tl.program_id(0) == 0)
        tl.store(h_inverse_ptr, inverse_of(h_scale), mask=tl.program_id(0) == 0)
    width = F if UP is None else 2 * F
    within0, within1 = (row < R) & within, (row + 1 < R) & within
    a0, b0 = _decoded(a0, a_scale0, x_scale_ptr), _decoded(b0, b_scale0, x_scale_ptr)
    a1, b1 = _decoded(a1, a_scale1, x_scale_ptr), _decoded(b1, b_scale1, x_scale_ptr)
    da0, db0, h0 = _gradients(dy0, a0, b0, bias, within0, GATE, GATE_P, UP, UP_P, EVEN)
    da1, db1, h1 = _gradients(dy1, a1, b1, bias, within1, GATE, GATE_P, UP, UP_P, EVEN)
    dx_sizes, h_sizes = _sizes(da0, da1, db0, db1, h0, h1, UP)
    da_sum, db_sum = da0 + da1, db0 + db1
    if ENCODES:
        da_low, db_low, h_low = _two_rows(
            rows_ptr, scale, h_scale, row, R, width, gates, apart, within,
            da0, da1, db0, db1, h0, h1, UP, E5M2, H_E5M2, EVEN,
        )  # fmt: skip
    within2, within3 = (row + 2 < R) & within, (row + 3 < R) & within
    a2, b2 = _decoded(a2, a_scale2, x_scale_ptr), _decoded(b2, b_scale2, x_scale_ptr)
    a3, b3 = _decoded(a3, a_scale3, x_scale_ptr), _decoded(b3, b_scale3, x_scale_ptr)
    da2, db2, h2 = _gradients(dy2, a2, b2, bias, within2, GATE, GATE_P, UP, UP_P, EVEN)
    da3, db3, h3 = _gradients(dy3, a3, b3, bias, within3, GATE, GATE_P, UP, UP_P, EVEN)
    more_dx, more_h = _sizes(da2, da3, db2, db3, h2, h3, UP)
    if ENCODES:
        da_high, db_high, h_high = _two_rows(
            rows_ptr, scale, h_scale, row + 2, R, width, gates, apart, within,
            da2, da3, db2, db3, h2, h3, UP, E5M2, H_E5M2, EVEN,
        )  # fmt: skip
    if dx_amax_ptr is not None:
        raise_amax(dx_amax_ptr, larger(dx_sizes, more_dx))
    if h_amax_ptr is not None:
        raise_amax(h_amax_ptr, larger(h_sizes, more_h))
    below = line < F
    units = gate_line + apart
    if sums_ptr is not None:
        store_sums(sums_ptr, tile_row, width, gate_line, below, da_sum + (da2 + da3))
        if UP is not None:
            store_sums(sums_ptr, tile_row, width, units, below, db_sum + (db2 + db3))
    if ENCODES:
        store_cols(cols_ptr, gate_line, below, tile_row, RP, da_low, da_high, EVEN, TILE_ROWS)
        if UP is not None:
            store_cols(cols_ptr, units, below, tile_row, RP, db_low, db_high, EVEN, TILE_ROWS)
        store_cols(h_ptr, line, below, tile_row, RP, h_low, h_high, EVEN, TILE_ROWS)


@triton.jit
def _load_operands(
    dy_ptr, x_ptr, row, R, dy_stride, x_stride, col, gates, apart, within,
    UP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The four tensors of a tile of dy, of gates and of linear units."""
    dy0, dy1, dy2, dy3 = load_four(dy_ptr, row, dy_stride, col, R, within, EVEN)
    a0, a1, a2, a3 = load_four(x_ptr, row, x_stride, gates, R, within, EVEN)
    b0, b1, b2, b3 = _load_units(
        x_ptr, row, x_stride, gates, apart, R, within, a0, a1, a2, a3, UP, EVEN
    )
    return dy0, dy1, dy2, dy3, a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def _two_row_blocks(
    rows_ptr, row, R, width, gates, apart, dy0, dy1, a0, a1, b0, b1, bias,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Stores two of a tile's four tensors of dx by rows.

    Returns their scales, those of da first, and of da, db and h the larger sizes and the sums.
    """
    da0, db0, h0 = _gradients(dy0, a0, b0, bias, row < R, GATE, GATE_P, UP, UP_P, EVEN)
    da1, db1, h1 = _gradients(dy1, a1, b1, bias, row + 1 < R, GATE, GATE_P, UP, UP_P, EVEN)
    s0 = store_row_block(rows_ptr, row, width, gates, da0, E5M2, POWER_OF_TWO)
    s1 = store_row_block(rows_ptr, row + 1, width, gates, da1, E5M2, POWER_OF_TWO)
    t0, t1 = s0, s1
    if UP is not None:
        t0 = store_row_block(rows_ptr + apart, row, width, gates, db0, E5M2, POWER_OF_TWO)
        t1 = store_row_block(rows_ptr + apart, row + 1, width, gates, db1, E5M2, POWER_OF_TWO)
    da, db = larger(tl.abs(da0), tl.abs(da1)), larger(tl.abs(db0), tl.abs(db1))
    return s0, s1, t0, t1, da, db, larger(tl.abs(h0), tl.abs(h1)), da0 + da1, db0 + db1


@triton.jit
def _two_in_cols(
    scale, units_scale, h_scale, row, R, dy0, dy1, a0, a1, b0, b1, bias,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    E5M2: tl.constexpr, H_E5M2: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pairs of codes of two of a tile's four tensors of da, db and h with scales of columns."""
    da0, db0, h0 = _gradients(dy0, a0, b0, bias, row < R, GATE, GATE_P, UP, UP_P, EVEN)
    da1, db1, h1 = _gradients(dy1, a1, b1, bias, row + 1 < R, GATE, GATE_P, UP, UP_P, EVEN)
    da0, da1 = times(da0, scale, row, R, EVEN), times(da1, scale, row + 1, R, EVEN)
    db0, db1 = times(db0, units_scale, row, R, EVEN), times(db1, units_scale, row + 1, R, EVEN)
    h0, h1 = times(h0, h_scale, row, R, EVEN), times(h1, h_scale, row + 1, R, EVEN)
    return pairs_of(da0, da1, E5M2), pairs_of(db0, db1, E5M2), pairs_of(h0, h1, H_E5M2)


@triton.jit
def backward_by_blocks(
    dy_ptr, x_ptr, bias_ptr, rows_ptr, cols_ptr, h_ptr,
    row_scale_ptr, col_scale_ptr, h_scale_ptr, sums_ptr,
    R, RP, F, dy_stride, x_stride,
    GATE: tl.constexpr, GATE_P: tl.constexpr, UP: tl.constexpr, UP_P: tl.constexpr,
    INTERLEAVE: tl.constexpr, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    H_E5M2: tl.constexpr, H_POWER_OF_TWO: tl.constexpr, H_SQUARE_COLS: tl.constexpr,
    STEP: tl.constexpr, COL_STEP: tl.constexpr, STAGES: tl.constexpr, COL_STAGES: tl.constexpr,
    EVEN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, VEC: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """As :func:`backward`, with a scale for each row and each column of a tile of da, db and h.

    row_scale (2F / TILE_COLS, RP), col_scale (RP / TILE_ROWS, 2F), h_scale (RP / TILE_ROWS, F) or,
    with one for all columns of a tile, (F / TILE_COLS, up4(RP / TILE_ROWS)); F and INTERLEAVE are
    multiples of TILE_COLS.

    Values of a tile in fp32 would take more registers than there are. So they are computed twice:
    STEP rows at a time for codes by rows and the largest sizes in columns, then COL_STEP rows at a
    time for codes by columns. The second time operands come from a cache. Two rows of four at a
    time, as codes take a quarter of the registers that values do. Of two STAGES the next step is
    loaded, to shared memory, while one is computed.
    """
    tile_row, tile_col = place(RP, F, TILE_ROWS, TILE_COLS, GROUP)
    line = tile_cols(tile_col, TILE_COLS)
    gate_line, apart = _gates(line, F, INTERLEAVE)
    first_gate, _ = _gates(tile_col * TILE_COLS, F, INTERLEAVE)
    block = first_gate // TILE_COLS
    units, units_block = gate_line + apart, block + apart // TILE_COLS
    col, gates = in_row(line, VEC), in_row(gate_line, VEC)
    within = col < F
    width = F if UP is None else 2 * F
    bias = None
    if bias_ptr is not None:
        bias = _load_bias(bias_ptr, gates, within, True, STEP)
    da_sizes = tl.zeros((STEP // 4, TILE_COLS), tl.float32)
    db_sizes, h_sizes, da_sum, db_sum = da_sizes, da_sizes, da_sizes, da_sizes
    for step in tl.range(0, TILE_ROWS // STEP, num_stages=STAGES):
        row = tile_rows(tile_row * (TILE_ROWS // STEP) + step, STEP)
        dy0, dy1, dy2, dy3, a0, a1, a2, a3, b0, b1, b2, b3 = _load_operands(
            dy_ptr, x_ptr, row, R, dy_stride, x_stride, col, gates, apart, within, UP, EVEN
        )
        s0, s1, t0, t1, da, db, h, da_low, db_low = _two_row_blocks(
            rows_ptr, row, R, width, gates, apart, dy0, dy1, a0, a1, b0, b1, bias,
            GATE, GATE_P, UP, UP_P, E5M2, POWER_OF_TWO, EVEN,
        )  # fmt: skip
        da_sizes, db_sizes, h_sizes = larger(da_sizes, da), larger(db_sizes, db), larger(h_sizes, h)
        s2, s3, t2, t3, da, db, h, da_high, db_high = _two_row_blocks(
            rows_ptr, row + 2, R, width, gates, apart, dy2, dy3, a2, a3, b2, b3, bias,
            GATE, GATE_P, UP, UP_P, E5M2, POWER_OF_TWO, EVEN,
        )  # fmt: skip
        da_sizes, db_sizes, h_sizes = larger(da_sizes, da), larger(db_sizes, db), larger(h_sizes, h)
        store_row_scales(
            row_scale_ptr, row, block, RP, s0, s1, s2, s3, POWER_OF_TWO, TILE_COLS // VEC
        )
        if UP is not None:
            store_row_scales(
                row_scale_ptr, row, units_block, RP, t0, t1, t2, t3, POWER_OF_TWO, TILE_COLS // VEC
            )
        if sums_ptr is not None:
            da_sum += da_low + da_high
            db_sum += db_low + db_high
    if sums_ptr is not None:
        store_sums(sums_ptr, tile_row, width, gate_line, line < F, da_sum)
        if UP is not None:
            store_sums(sums_ptr, tile_row, width, units, line < F, db_sum)
    scale = col_scale_of(col_scale_ptr, da_sizes, tile_row, width, gates, E5M2, POWER_OF_TWO)
    units_scale = scale
    if UP is not None:
        units_scale = col_scale_of(
            col_scale_ptr + apart, db_sizes, tile_row, width, gates, E5M2, POWER_OF_TWO
        )
    if H_SQUARE_COLS:
        h_scale = square_scale_of(h_sizes, H_E5M2, H_POWER_OF_TWO)
        down = RP // TILE_ROWS
        store_square_scale(h_scale_ptr, h_scale, tile_col, tile_row, down, H_POWER_OF_TWO)
    else:
        h_scale = col_scale_of(h_scale_ptr, h_sizes, tile_row, F, col, H_E5M2, H_POWER_OF_TWO)
    if bias_ptr is not None:
        bias = _load_bias(bias_ptr, gates, within, True, COL_STEP)
    below = line < F
    for step in tl.range(0, TILE_ROWS // COL_STEP, num_stages=COL_STAGES):
        at = tile_row * (TILE_ROWS // COL_STEP) + step
        row = tile_rows(at, COL_STEP)
        dy0, dy1, dy2, dy3, a0, a1, a2, a3, b0, b1, b2, b3 = _load_operands(
            dy_ptr, x_ptr, row, R, dy_stride, x_stride, col, gates, apart, within, UP, EVEN
        )
        da_low, db_low, h_low = _two_in_cols(
            scale, units_scale, h_scale, row, R, dy0, dy1, a0, a1, b0, b1, bias,
            GATE, GATE_P, UP, UP_P, E5M2, H_E5M2, EVEN,
        )  # fmt: skip
        da_high, db_high, h_high = _two_in_cols(
            scale, units_scale, h_scale, row + 2, R, dy2, dy3, a2, a3, b2, b3, bias,
            GATE, GATE_P, UP, UP_P, E5M2, H_E5M2, EVEN,
        )  # fmt: skip
        store_cols(cols_ptr, gate_line, below, at, RP, da_low, da_high, True, COL_STEP)
        if UP is not None:
            store_cols(cols_ptr, units, below, at, RP, db_low, db_high, True, COL_STEP)
        store_cols(h_ptr, line, below, at, RP, h_low, h_high, True, COL_STEP)
