"""Rows in the order of their experts: where each goes, copies of tokens there, and sums back.

Dimensions: T tokens, k experts of each, R = T k rows, D columns, E experts. A row map holds for
each token and choice, in flat order, the row that belongs to it: a permutation of the rows. Every
kernel reads the map alone, never its inverse, so that a token is read or written once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .store import store_rows


@triton.jit
def _share(count, share):
    """Which of the indices a program takes: from the first to the last, both in int64."""
    start = tl.program_id(0).to(tl.int64) * share
    return start, tl.minimum(start + share, tl.cast(count, tl.int64))


@triton.jit
def _matches(indices_ptr, first, stop, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Positions of a block of indices, and of which expert each is: (BLOCK, WIDTH)."""
    at = first + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + at, mask=at < stop, other=-1)
    return at, index[:, None] == tl.arange(0, WIDTH)[None, :]


@triton.jit
def histograms(
    indices_ptr, parts_ptr, count, share, experts,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How often each expert occurs in the share of each program: indices (R,), parts (P, E)."""
    expert = tl.arange(0, WIDTH)
    start, stop = _share(count, share)
    total = tl.zeros((WIDTH,), tl.int32)
    for first in range(start, stop, BLOCK):
        _, matches = _matches(indices_ptr, first, stop, WIDTH, BLOCK)
        total += tl.sum(matches.to(tl.int32), axis=0)
    at = parts_ptr + tl.program_id(0) * experts + expert
    tl.store(at, total, mask=expert < experts)


@triton.jit
def places(
    indices_ptr, parts_ptr, map_ptr, sizes_ptr, valid_ptr, count, share, experts,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The row map (R,), the rows of each expert (E,), and whether all indices are experts' (1,).

    Each program adds up all histograms (P, E) anew, which are few: so it knows where its share of
    each expert begins. The sort is stable. An index that is not an expert's gets row 0.
    """
    expert = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int64)
    before = tl.zeros((WIDTH,), tl.int64)
    for first in range(0, tl.num_programs(0), PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < tl.num_programs(0))[:, None] & (expert < experts)[None, :]
        at = parts_ptr + part[:, None] * experts + expert[None, :]
        counts = tl.load(at, mask=inside, other=0).to(tl.int64)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((part < tl.program_id(0))[:, None], counts, 0), axis=0)
    if tl.program_id(0) == 0:
        tl.store(sizes_ptr + expert, total, mask=expert < experts)
        tl.store(valid_ptr, (tl.sum(total, axis=0) == count).to(tl.uint8))
    following = tl.cumsum(total, axis=0) - total + before
    start, stop = _share(count, share)
    for first in range(start, stop, BLOCK):
        at, matches = _matches(indices_ptr, first, stop, WIDTH, BLOCK)
        one = matches.to(tl.int32)
        earlier = tl.sum(tl.where(matches, tl.cumsum(one, axis=0) - 1, 0), axis=1)
        row = tl.sum(tl.where(matches, following[None, :], 0), axis=1) + earlier
        tl.store(map_ptr + at, row, mask=at < stop)
        following += tl.sum(one, axis=0)


@triton.jit
def _tile(cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Tokens and first column of a program's tile; tiles along a row are neighbors."""
    blocks = tl.cdiv(cols, BLOCK_COLS)
    token = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return token, (tl.program_id(0) % blocks) * BLOCK_COLS


@triton.jit
def copies(
    x_ptr, map_ptr, rows_ptr, weights_ptr, row_weights_ptr, tokens, cols, x_stride,
    K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """``rows[map[t, j]] = x[t]`` and ``row_weights[map[t, j]] = weights[t, j]``.

    x (T, D), rows (R, D), weights (T, k) and row_weights (R,) or None.
    """
    token, first = _tile(cols, BLOCK_ROWS, BLOCK_COLS)
    col = first + tl.arange(0, BLOCK_COLS)
    below = token < tokens
    mask = below[:, None] & (col < cols)[None, :]
    x = tl.load(x_ptr + token[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
    for j in tl.range(0, K, loop_unroll_factor=4):
        row = tl.load(map_ptr + token * K + j, mask=below, other=0)
        store_rows(rows_ptr, row[:, None], cols, col[None, :], mask, x)
        if weights_ptr is not None:
            of_row = below & (first == 0)
            weight = tl.load(weights_ptr + token * K + j, mask=of_row, other=0.0)
            tl.store(row_weights_ptr + row, weight, mask=of_row)


@triton.jit
def sums(
    rows_ptr, map_ptr, y_ptr, weights_ptr, row_values_ptr, values_ptr, tokens, cols, rows_stride,
    K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """``y[t] = Σ_j weights[t, j] rows[map[t, j]]`` and ``values[t, j] = row_values[map[t, j]]``.

    rows (R, D), y (T, D); weights (T, k) or None: ones, else rounded to the rows' format;
    row_values (R,) and values (T, k), or None.
    """
    token, first = _tile(cols, BLOCK_ROWS, BLOCK_COLS)
    col = first + tl.arange(0, BLOCK_COLS)
    below = token < tokens
    mask = below[:, None] & (col < cols)[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for j in tl.range(0, K, loop_unroll_factor=4):
        row = tl.load(map_ptr + token * K + j, mask=below, other=0).to(tl.int64)
        at = rows_ptr + row[:, None] * rows_stride + col[None, :]
        term = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + token * K + j, mask=below, other=0.0)
            term *= weight.to(rows_ptr.dtype.element_ty).to(tl.float32)[:, None]
        total += term
        if values_ptr is not None:
            of_row = below & (first == 0)
            value = tl.load(row_values_ptr + row, mask=of_row, other=0.0)
            tl.store(values_ptr + token * K + j, value, mask=of_row)
    store_rows(y_ptr, token[:, None], cols, col[None, :], mask, total)


@triton.jit
def weighted_backward(
    dy_ptr, map_ptr, weights_ptr, rows_ptr, drows_ptr, dweights_ptr,
    slots, cols, dy_stride, rows_stride,
    K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """``drows[map[t, j]] = weights[t, j] dy[t]``, ``dweights[t, j] = dy[t] · rows[map[t, j]]``.

    A program takes whole rows, for as many choices of tokens: those of one token are neighbors,
    and find its gradient in the cache. What is None is left out.
    """
    slot = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    below = slot < slots
    row = tl.load(map_ptr + slot, mask=below, other=0).to(tl.int64)
    weight = tl.load(weights_ptr + slot, mask=below, other=0.0)
    weight = weight.to(dy_ptr.dtype.element_ty).to(tl.float32)[:, None]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for first in range(0, cols, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)
        mask = below[:, None] & (col < cols)[None, :]
        at = dy_ptr + (slot // K)[:, None] * dy_stride + col[None, :]
        dy = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if drows_ptr is not None:
            store_rows(drows_ptr, row[:, None], cols, col[None, :], mask, dy * weight)
        if dweights_ptr is not None:
            at = rows_ptr + row[:, None] * rows_stride + col[None, :]
            total += dy * tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if dweights_ptr is not None:
        tl.store(dweights_ptr + slot, tl.sum(total, axis=1), mask=below)
