"""Norm and rotation of the queries and keys in packed rows of heads, and their gradients.

Dimensions: R rows (tokens); H heads of a row: queries, keys, values. Queries and keys are active:
they are normalised and rotated; values are copied. D entries per head: P pairs, and a tail of
D - 2P entries that never turn. The two halves of the paired part hold one entry of each pair, or,
interleaved, the entries of a pair are neighbours.

A tile is some heads of one kind: all have the same weight, and no entry is computed to be dropped.
Where norm or rotation is left out the pointers to its operands are None, and no code is made.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(
    ptr,
    offsets,
    mask,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Pairs a, b (N, BLOCK_P) and tail (N, BLOCK_T) of the heads at ``offsets`` (N, 1), in fp32."""
    if INTERLEAVED:
        i = tl.arange(0, 2 * BLOCK_P)[None, :]
        both = tl.load(ptr + offsets + i, mask=mask & (i < 2 * PAIRS), other=0.0)
        a, b = tl.split(tl.reshape(both.to(tl.float32), (offsets.shape[0], BLOCK_P, 2)))
    else:
        i = tl.arange(0, BLOCK_P)[None, :]
        inside = mask & (i < PAIRS)
        a = tl.load(ptr + offsets + i, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(ptr + offsets + PAIRS + i, mask=inside, other=0.0).to(tl.float32)
    if 2 * PAIRS < HEAD_DIM:
        i = 2 * PAIRS + tl.arange(0, BLOCK_T)[None, :]
        t = tl.load(ptr + offsets + i, mask=mask & (i < HEAD_DIM), other=0.0).to(tl.float32)
    else:
        t = tl.zeros((offsets.shape[0], BLOCK_T), tl.float32)
    return a, b, t


@triton.jit
def _store(
    ptr,
    offsets,
    a,
    b,
    t,
    mask,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    if INTERLEAVED:
        i = tl.arange(0, 2 * BLOCK_P)[None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * BLOCK_P))
        tl.store(ptr + offsets + i, both, mask=mask & (i < 2 * PAIRS))
    else:
        i = tl.arange(0, BLOCK_P)[None, :]
        inside = mask & (i < PAIRS)
        tl.store(ptr + offsets + i, a, mask=inside)
        tl.store(ptr + offsets + PAIRS + i, b, mask=inside)
    if 2 * PAIRS < HEAD_DIM:
        i = 2 * PAIRS + tl.arange(0, BLOCK_T)[None, :]
        tl.store(ptr + offsets + i, t, mask=mask & (i < HEAD_DIM))


@triton.jit
def _scale(
    q_weight_ptr,
    k_weight_ptr,
    is_key,
    ZERO_CENTERED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """What the entries of a head are multiplied by, laid out as ``_load`` does."""
    at, all_ = tl.zeros((1, 1), tl.int32), tl.full((1, 1), 1, tl.int1)
    if is_key:
        a, b, t = _load(k_weight_ptr, at, all_, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
    else:
        a, b, t = _load(q_weight_ptr, at, all_, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
    if ZERO_CENTERED:
        a, b, t = a + 1.0, b + 1.0, t + 1.0
    return a, b, t


@triton.jit
def _turn(a, b, cos_ptr, sin_ptr, place, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, BACK):
    """The pairs turned by the angles in row ``place`` of the tables, or back by them."""
    i = tl.arange(0, BLOCK_P)[None, :]
    cos = tl.load(cos_ptr + place * PAIRS + i, mask=i < PAIRS, other=0.0)
    sin = tl.load(sin_ptr + place * PAIRS + i, mask=i < PAIRS, other=0.0)
    if BACK:
        sin = -sin
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _copy_values(source_ptr, target_ptr, tile, rows, stride, START, END, BLOCK_V: tl.constexpr):
    """Entries START to END of each n-th row; the target is contiguous, and END wide."""
    i = START + tile * BLOCK_V + tl.arange(0, BLOCK_V)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        values = tl.load(source_ptr + row * stride + i, mask=i < END)
        tl.store(target_ptr + row * END + i, values, mask=i < END)


@triton.jit
def forward(
    x_ptr,  # (R, H D)
    y_ptr,  # (R, H D), contiguous
    cos_ptr,  # (period or more, P) in fp32
    sin_ptr,
    q_weight_ptr,  # (D,)
    k_weight_ptr,
    rstd_ptr,  # (R, active) in fp32: written
    rows,
    x_stride,
    period,  # row r turns by the angles in row r % period of the tables
    eps,
    QUERIES: tl.constexpr,
    ACTIVE: tl.constexpr,
    HEADS: tl.constexpr,
    Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr,
    BACK: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Each program takes one tile of every n-th row.

    Without norm there are no weights to tell apart, and all heads count as queries.
    """
    tile = tl.program_id(1)
    A_TILES: tl.constexpr = Q_TILES + K_TILES
    if tile >= A_TILES:
        _copy_values(
            x_ptr, y_ptr, tile - A_TILES, rows, x_stride,
            ACTIVE * HEAD_DIM, HEADS * HEAD_DIM, BLOCK_V,
        )  # fmt: skip
    else:
        is_key = tile >= Q_TILES
        first = tl.where(is_key, QUERIES + (tile - Q_TILES) * BLOCK_H, tile * BLOCK_H)
        head = first + tl.arange(0, BLOCK_H)[:, None]
        mask = head < tl.where(is_key, ACTIVE, QUERIES)
        if rstd_ptr is not None:
            wa, wb, wt = _scale(
                q_weight_ptr, k_weight_ptr, is_key, ZERO_CENTERED,
                HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T,
            )  # fmt: skip
        for index in range(tl.program_id(0), rows, tl.num_programs(0)):
            row = tl.cast(index, tl.int64)
            at = row * x_stride + head * HEAD_DIM
            a, b, t = _load(x_ptr, at, mask, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
            if rstd_ptr is not None:
                square = tl.sum(a * a + b * b, 1, keep_dims=True) + tl.sum(t * t, 1, keep_dims=True)
                rstd = tl.rsqrt(square * (1.0 / HEAD_DIM) + eps)
                tl.store(rstd_ptr + row * ACTIVE + head, rstd, mask=mask)
                a, b, t = a * rstd * wa, b * rstd * wb, t * rstd * wt
            if cos_ptr is not None:
                c, d = _turn(a, b, cos_ptr, sin_ptr, index % period, PAIRS, BLOCK_P, BACK)
                if QUERIES > ACTIVE:
                    c, d = tl.where(head < ACTIVE, c, a), tl.where(head < ACTIVE, d, b)
                a, b = c, d
            at = (row * HEADS + head) * HEAD_DIM
            _store(y_ptr, at, a, b, t, mask, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)


@triton.jit
def norm_backward(
    dy_ptr,  # (R, H D)
    x_ptr,  # (R, H D): the values are not read
    dx_ptr,  # (R, H D), contiguous; or None
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    rstd_ptr,
    partial_ptr,  # (tiles of active heads, programs, D) in fp32: sums for the weights; or None
    rows,
    dy_stride,
    x_stride,
    period,
    QUERIES: tl.constexpr,
    ACTIVE: tl.constexpr,
    HEADS: tl.constexpr,
    Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Each program takes one tile of every n-th row.

    With g the gradient turned back and ``dh = g w``: ``dw = Σ g x rstd`` and
    ``dx = rstd (dh - x rstd² mean(dh x))``.
    """
    tile = tl.program_id(1)
    A_TILES: tl.constexpr = Q_TILES + K_TILES
    if tile >= A_TILES:
        if dx_ptr is not None:
            _copy_values(
                dy_ptr, dx_ptr, tile - A_TILES, rows, dy_stride,
                ACTIVE * HEAD_DIM, HEADS * HEAD_DIM, BLOCK_V,
            )  # fmt: skip
    else:
        is_key = tile >= Q_TILES
        first = tl.where(is_key, QUERIES + (tile - Q_TILES) * BLOCK_H, tile * BLOCK_H)
        head = first + tl.arange(0, BLOCK_H)[:, None]
        mask = head < tl.where(is_key, ACTIVE, QUERIES)
        wa, wb, wt = _scale(
            q_weight_ptr, k_weight_ptr, is_key, ZERO_CENTERED,
            HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T,
        )  # fmt: skip
        sum_a = tl.zeros((BLOCK_H, BLOCK_P), tl.float32)
        sum_b = tl.zeros((BLOCK_H, BLOCK_P), tl.float32)
        sum_t = tl.zeros((BLOCK_H, BLOCK_T), tl.float32)
        for index in range(tl.program_id(0), rows, tl.num_programs(0)):
            row = tl.cast(index, tl.int64)
            at = row * dy_stride + head * HEAD_DIM
            ga, gb, gt = _load(dy_ptr, at, mask, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
            at = row * x_stride + head * HEAD_DIM
            xa, xb, xt = _load(x_ptr, at, mask, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
            rstd = tl.load(rstd_ptr + row * ACTIVE + head, mask=mask, other=0.0)
            if cos_ptr is not None:
                ga, gb = _turn(ga, gb, cos_ptr, sin_ptr, index % period, PAIRS, BLOCK_P, True)
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
                at = (row * HEADS + head) * HEAD_DIM
                _store(
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
            _store(partial_ptr, at, a, b, t, some, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)


@triton.jit
def sum_partials(
    partial_ptr,  # (queries' and keys', D): first those of the queries
    dq_weight_ptr,  # (D,)
    dk_weight_ptr,
    q_count,
    k_count,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sums up what programs found, in one order."""
    i = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_key = tl.program_id(1) == 1
    start = tl.where(is_key, q_count, 0)
    stop = tl.where(is_key, q_count + k_count, q_count)
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for first in range(start, stop, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)[:, None]
        inside = (r < stop) & (i[None, :] < HEAD_DIM)
        total += tl.load(partial_ptr + r * HEAD_DIM + i[None, :], mask=inside, other=0.0)
    dw = tl.sum(total, 0)
    if is_key:
        tl.store(dk_weight_ptr + i, dw, mask=i < HEAD_DIM)
    else:
        tl.store(dq_weight_ptr + i, dw, mask=i < HEAD_DIM)
