"""What several families of kernels share: rows, tiles and blocks of them, sums of partial sums."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .launch import Launch
from .scalar import BLOCK

__all__ = ["add_up", "at_once", "cdiv", "empty_rows", "row_blocks", "rows_of", "tile"]

# Tiles of partial sums, and their warps: many programs, few steps. On an H200, 264 rows of 4096
# columns take 3.4 us, with tiles of 32 columns 3.6. Of few columns there are few programs: 4224
# rows of 128 take 5.8 us with tall tiles and 14.5 us with the others, 528 of 1024 take 3.3 and 3.8.
_TILE, _TALL_TILE, _FEW_COLS = (128, 16, 4), (512, 8, 8), 2**10


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """``x`` with adjacent columns, and the distance between rows; copied only if it has to be."""
    if x.is_contiguous():
        return x, x.shape[-1] if x.dim() else 1
    if x.dim() > 2:
        x = x.flatten(0, -2)
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
        return x, x.shape[-1]
    return x, x.stride(0)


def empty_rows(x: Tensor) -> Tensor:
    """Memory for a contiguous result in the shape and dtype of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def at_once(x: Tensor) -> bool:
    """Whether plain torch works on all rows of ``x`` at a time."""
    # While torch.compile traces, its size is not to be asked: the graph would hold for it alone.
    return torch.compiler.is_compiling() or not x.is_cpu or x.numel() <= 2 * BLOCK


def row_blocks(x: Tensor, *others: Tensor | None) -> Iterator[Sequence[Any]]:
    """Blocks of rows of ``x`` and of tensors with as many rows, and None of None.

    On a CPU what one step leaves for the next then stays in the cache, and takes no new memory.
    """
    count = math.prod(x.shape[:-1])  # a tracer would take numel() of a torch.Size to be fixed
    tensors = [None if t is None else t.reshape(count, t.shape[-1]) for t in (x, *others)]
    if at_once(x):
        yield tensors
        return
    rows = max(1, 2 * BLOCK * torch.get_num_threads() // x.shape[-1])
    yield from zip(*[itertools.repeat(None) if t is None else t.split(rows) for t in tensors])


def tile(cols: int, elements: int) -> tuple[int, int]:
    """Rows and columns of a tile of that many elements.

    The columns are the largest power of two that divides ``cols``, so that no lane is idle at the
    end of a row: 512 for 3584; but at least 128, or all.
    """
    most = max(128, min(elements, cols & -cols))
    block_cols = min(most, 1 << (max(cols, 1) - 1).bit_length())
    return max(1, elements // block_cols), block_cols


def add_up(parts: Tensor, totals: Sequence[Tensor], counts: Sequence[int]) -> None:
    """Fills in sums of columns.

    Args:
        parts: partial sums in fp32, C columns in the last dimension, rows in all others.
        totals: (C,), one or two.
        counts: how many of the rows, in order, belong to each.
    """
    cols = parts.shape[-1]
    launch, block_cols = _column_sums(cols)
    first, second = (*totals, None)[:2]
    assert first is not None
    rows = (*counts, 0)[:2]
    launch((cdiv(cols, block_cols), len(totals), 1), (parts, first, second), (*rows, cols))


@functools.cache
def _column_sums(cols: int) -> tuple[Launch, int]:
    """The launch, and the columns of a program."""
    block_rows, block_cols, warps = _TALL_TILE if cols <= _FEW_COLS else _TILE
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}
    return Launch("sums:column_sums", sizes, num_warps=warps), block_cols
