"""Norm and rotation of the queries and keys in packed rows of heads, and their gradients.

Dimensions: R rows (tokens); H heads of a row: queries, keys, values. Queries and keys are active:
they are normalized and rotated; values are copied. D entries per head: P pairs, and a tail of
D - 2P entries that never turn. The two halves of the paired part hold one entry of each pair, or,
interleaved, the entries of a pair are neighbors.

A tile is some heads of one kind: all have the same weight, and no entry is computed to be dropped.
Where a row has fewer heads of a kind, a tile takes them of some rows.
Where norm or rotation is left out the pointers to its operands are None, and no code is made.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .heads import copy_values, heads, load, scale, store, turn


@triton.jit
def forward(
    x_ptr, y_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, rstd_ptr,
    rows, x_stride, period, eps,
    QUERIES: tl.constexpr, ACTIVE: tl.constexpr, HEADS: tl.constexpr,
    Q_TILES: tl.constexpr, K_TILES: tl.constexpr, BACK: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr, V_ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # x (R, H D), y as x and contiguous, cos and sin (period or more, P) in fp32, weights (D,); rstd
    # (R, active) in fp32 is written. Row r turns by the angles in row r % period of the tables.
    """Each program takes one tile of every n-th row, or few rows.

    Without norm there are no weights to tell apart, and all heads count as queries.
    """
    tile = tl.program_id(1)
    A_TILES: tl.constexpr = Q_TILES + K_TILES
    if tile >= A_TILES:
        copy_values(
            x_ptr, y_ptr, tile - A_TILES, rows, x_stride,
            ACTIVE * HEAD_DIM, HEADS * HEAD_DIM, V_ROWS, BLOCK_V,
        )  # fmt: skip
    else:
        is_key = tile >= Q_TILES
        head, below, exists, step = heads(
            tile, is_key, QUERIES, ACTIVE, Q_TILES, BLOCK_H, Q_ROWS, K_ROWS
        )
        if rstd_ptr is not None:
            wa, wb, wt = scale(
                q_weight_ptr, k_weight_ptr, is_key, ZERO_CENTERED,
                HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T,
            )  # fmt: skip
        start, stride = tl.program_id(0) * step, tl.num_programs(0) * step
        for first in tl.range(start, rows, stride, num_stages=AHEAD):
            row = (first + below).to(tl.int64)
            here = exists & (row < rows)
            mask = here[:, None]
            at = (row * x_stride + head * HEAD_DIM)[:, None]
            a, b, t = load(x_ptr, at, mask, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
            if rstd_ptr is not None:
                square = tl.sum(a * a + b * b, 1) + tl.sum(t * t, 1)
                rstd = tl.rsqrt(square * (1.0 / HEAD_DIM) + eps)
                tl.store(rstd_ptr + row * ACTIVE + head, rstd, mask=here)
                r = rstd[:, None]
                a, b, t = a * r * wa, b * r * wb, t * r * wt
            if cos_ptr is not None:
                place = ((first + below) % period)[:, None]
                c, d = turn(a, b, cos_ptr, sin_ptr, place, PAIRS, BLOCK_P, BACK)
                if QUERIES > ACTIVE:
                    turns = (head < ACTIVE)[:, None]
                    c, d = tl.where(turns, c, a), tl.where(turns, d, b)
                a, b = c, d
            at = ((row * HEADS + head) * HEAD_DIM)[:, None]
            store(y_ptr, at, a, b, t, mask, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)


@triton.jit
def norm_backward(
    dy_ptr, x_ptr, dx_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, rstd_ptr, partial_ptr,
    rows, dy_stride, x_stride, period,
    QUERIES: tl.constexpr, ACTIVE: tl.constexpr, HEADS: tl.constexpr,
    Q_TILES: tl.constexpr, K_TILES: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr, V_ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # dy, x (R, H D), of x no values are read; dx as x and contiguous, or None; partial (tiles of
    # active heads, programs, D) in fp32, sums for the weights, or None.
    """Each program takes one tile of every n-th row, or few rows.

    With g the gradient turned back and ``dh = g w``: ``dw = Σ g x rstd`` and
    ``dx = rstd (dh - x rstd² mean(dh x))``.
    """
    tile = tl.program_id(1)
    A_TILES: tl.constexpr = Q_TILES + K_TILES
    if tile >= A_TILES:
        if dx_ptr is not None:
            copy_values(
                dy_ptr, dx_ptr, tile - A_TILES, rows, dy_stride,
                ACTIVE * HEAD_DIM, HEADS * HEAD_DIM, V_ROWS, BLOCK_V,
            )  # fmt: skip
    else:
        is_key = tile >= Q_TILES
        head, below, exists, step = heads(
            tile, is_key, QUERIES, ACTIVE, Q_TILES, BLOCK_H, Q_ROWS, K_ROWS
        )
        wa, wb, wt = scale(
            q_weight_ptr, k_weight_ptr, is_key, ZERO_CENTERED,
            HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T,
        )  # fmt: skip
        sum_a = tl.zeros((BLOCK_H, BLOCK_P), tl.float32)
        sum_b = tl.zeros((BLOCK_H, BLOCK_P), tl.float32)
        sum_t = tl.zeros((BLOCK_H, BLOCK_T), tl.float32)
        start, stride = tl.program_id(0) * step, tl.num_programs(0) * step
        for first in tl.range(start, rows, stride, num_stages=AHEAD):
            row = (first + below).to(tl.int64)
            here = exists & (row < rows)
            mask = here[:, None]
            at = (row * dy_stride + head * HEAD_DIM)[:, None]
            ga, gb, gt = load(dy_ptr, at, mask, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
            at = (row * x_stride + head * HEAD_DIM)[:, None]
            xa, xb, xt = load(x_ptr, at, mask, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
            rstd = tl.load(rstd_ptr + row * ACTIVE + head, mask=here, other=0.0)[:, None]
            if cos_ptr is not None:
                place = ((first + below) % period)[:, None]
                ga, gb = turn(ga, gb, cos_ptr, sin_ptr, place, PAIRS, BLOCK_P, True)
            if partial_ptr is not None:
                sum_a += ga * xa * rstd
                sum_b += gb * xb * rstd
                sum_t += gt * xt * rstd
            if dx_ptr is not None:
                ga, gb, gt = ga * wa, gb * wb, gt * wt
                total = tl.sum(ga * xa + gb * xb, 1, keep_dims=True)
                total += tl.sum(gt * xt, 1, keep_dims=True)
                share = total * rstd * rstd * (1.0 / HEAD_DIM)
                ga, gb, gt = ga - xa * share, gb - xb * share, gt - xt * share
                at = ((row * HEADS + head) * HEAD_DIM)[:, None]
                store(
                    dx_ptr, at, ga * rstd, gb * rstd, gt * rstd, mask,
                    HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T,
                )  # fmt: skip
        if partial_ptr is not None:
            a = tl.sum(sum_a, 0, keep_dims=True)
            b = tl.sum(sum_b, 0, keep_dims=True)
            t = tl.sum(sum_t, 0, keep_dims=True)
            at = tl.zeros((1, 1), tl.int32)
            at += (tile * tl.num_programs(0) + tl.program_id(0)) * HEAD_DIM
            some = tl.full((1, 1), 1, tl.int1)
            store(partial_ptr, at, a, b, t, some, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
