"""What launchers of several families share: rows, tiles of them, and sums of partial sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .launch import Launch

__all__ = ["add_up", "cdiv", "empty_rows", "rows_of", "tile"]

# Elements of a tile of partial sums, and its columns: many programs, few steps. 20.0 us for db of
# 8192 x 1024 in bf16 on an H200, adding up included; with tiles of 16 x 64 it is 21.3. The few
# columns of a head are split further.
_ELEMENTS, _COLS, _FEW_COLS = 2048, 16, 512


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
    block_cols = _COLS // 2 if cols <= _FEW_COLS else _COLS
    sizes = {"BLOCK_ROWS": _ELEMENTS // block_cols, "BLOCK_COLS": block_cols}
    return Launch("sums:column_sums", sizes), block_cols
