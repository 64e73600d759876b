"""What kernels of heads in packed rows share: loads, stores, weights, rotation, tiles.

Dimensions: R rows (tokens); H heads of a row: queries, keys, values; D entries per head: P pairs,
and a tail; N heads of a tile. See ``rotary``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .store import store_flat


@triton.jit
def load(
    ptr, offsets, mask,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
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
def store(
    ptr, offsets, a, b, t, mask,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Puts back what ``load`` has loaded."""
    if INTERLEAVED:
        i = tl.arange(0, 2 * BLOCK_P)[None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * BLOCK_P))
        store_flat(ptr, offsets + i, mask & (i < 2 * PAIRS), both)
    else:
        i = tl.arange(0, BLOCK_P)[None, :]
        inside = mask & (i < PAIRS)
        store_flat(ptr, offsets + i, inside, a)
        store_flat(ptr, offsets + PAIRS + i, inside, b)
    if 2 * PAIRS < HEAD_DIM:
        i = 2 * PAIRS + tl.arange(0, BLOCK_T)[None, :]
        store_flat(ptr, offsets + i, mask & (i < HEAD_DIM), t)


@triton.jit
def scale(
    q_weight_ptr, k_weight_ptr,
    is_key,
    ZERO_CENTERED: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """What the entries of a head are multiplied by, laid out as ``load`` does."""
    at, all_ = tl.zeros((1, 1), tl.int32), tl.full((1, 1), 1, tl.int1)
    if is_key:
        a, b, t = load(k_weight_ptr, at, all_, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
    else:
        a, b, t = load(q_weight_ptr, at, all_, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
    if ZERO_CENTERED:
        a, b, t = a + 1.0, b + 1.0, t + 1.0
    return a, b, t


@triton.jit
def turn(a, b, cos_ptr, sin_ptr, place, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, BACK):
    """The pairs turned by the angles in row ``place`` of the tables, or back by them."""
    i = tl.arange(0, BLOCK_P)[None, :]
    cos = tl.load(cos_ptr + place * PAIRS + i, mask=i < PAIRS, other=0.0)
    sin = tl.load(sin_ptr + place * PAIRS + i, mask=i < PAIRS, other=0.0)
    if BACK:
        sin = -sin
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def heads(
    tile, is_key,
    QUERIES: tl.constexpr, ACTIVE: tl.constexpr, Q_TILES: tl.constexpr, BLOCK_H: tl.constexpr,
    Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr,
):  # fmt: skip
    """The heads of a tile, in which row each is, which of them exist, and the number of rows."""
    i = tl.arange(0, BLOCK_H)
    q_heads: tl.constexpr = BLOCK_H // Q_ROWS
    k_heads: tl.constexpr = BLOCK_H // K_ROWS
    if is_key:
        head = QUERIES + (tile - Q_TILES) * k_heads + i % k_heads
        below, exists, step = i // k_heads, head < ACTIVE, K_ROWS
    else:
        head = tile * q_heads + i % q_heads
        below, exists, step = i // q_heads, head < QUERIES, Q_ROWS
    return head, below, exists, step


@triton.jit
def copy_values(
    source_ptr, target_ptr, tile, rows, stride, START, END,
    V_ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Entries START to END of each n-th few rows; the target is contiguous, and END wide."""
    i = START + tile * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    for first in range(tl.program_id(0) * V_ROWS, rows, tl.num_programs(0) * V_ROWS):
        row = (first + tl.arange(0, V_ROWS)[:, None]).to(tl.int64)
        inside = (i < END) & (row < rows)
        values = tl.load(source_ptr + row * stride + i, mask=inside)
        store_flat(target_ptr, row * END + i, inside, values)
