"""How kernels write their outputs: rounded to the output's format here, and nowhere else.

One function per shape of tile. ``value`` is a tile in fp32, or already in the output's dtype.
Statistics and sums over rows are no outputs in this sense: they are stored where they are made.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_flat(ptr, offsets, inside, value):
    """Elements at any ``offsets``; of a contiguous tensor, a block of neighbors."""
    tl.store(ptr + offsets, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_rows(ptr, row, stride, cols, inside, value):
    """Columns ``cols`` of the rows ``row``, which are ``stride`` elements apart.

    ``row`` is (BLOCK_ROWS, 1) and ``cols`` (1, BLOCK_COLS), or ``row`` is one row and ``cols``
    (BLOCK_COLS,).
    """
    store_flat(ptr + row.to(tl.int64) * stride, cols, inside, value)


@triton.jit
def store_tile(ptr, tile, value):
    """A tile of a contiguous matrix, as ``pointwise.place`` returns it."""
    base, at, inside = tile
    store_flat(ptr + base, at, inside, value)
