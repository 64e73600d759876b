"""Matrix products of consecutive groups of rows, each with a matrix of its own.

Symbols: T rows, G groups, K columns of the left operand, N columns of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError, explain

__all__ = ["RowGroups", "grouped_mm", "grouped_sum", "grouped_wgrad", "row_groups"]

_grouped_mm = getattr(F, "grouped_mm", None)


class RowGroups(NamedTuple):
    """Where the groups of rows lie: on the host if their sizes are known there.

    Attributes:
        bounds: start and end row of each group, or None if only the device knows them.
        lengths: (G,) integer tensor of the numbers of rows.
        ends: (G,) int32 tensor, on the device of the rows; only without ``bounds``.
    """

    bounds: tuple[tuple[int, int], ...] | None
    lengths: Tensor
    ends: Tensor | None

    def group_of_row(self, rows: int) -> Tensor:
        """(T,) the group of each row. Rows past the last group count to it."""
        ends = self.lengths.cumsum(0) if self.ends is None else self.ends
        numbers = torch.arange(rows, device=ends.device, dtype=ends.dtype)
        return torch.searchsorted(ends, numbers, right=True).clamp_(max=ends.numel() - 1)


def row_groups(lengths: Tensor, x: Tensor, out_features: int, where: str) -> RowGroups:
    """Locates the groups that ``lengths`` cuts the rows of ``x`` into.

    Lengths on the host are checked. Lengths on a GPU are read back, which waits for the GPU, only
    if there is no grouped GEMM for the dtype and sizes; if there is one they stay there unchecked.

    Raises:
        InputError: lengths on the host are negative, or do not add up to the rows of ``x``.
    """
    if lengths.is_cuda and _has_grouped_gemm(x, out_features):
        lengths = lengths.to(x.device)
        return RowGroups(None, lengths, lengths.cumsum(0).to(torch.int32))
    sizes = lengths.tolist()
    if sum(sizes) != x.shape[0] or min(sizes) < 0:
        raise InputError(
            explain(
                "The split sizes must not be negative, and add up to the number of rows",
                where=where,
                received=f"split sizes {sizes}, input of {x.shape[0]} rows",
            )
        )
    bounds, start = [], 0
    for size in sizes:
        bounds.append((start, start + size))
        start += size
    return RowGroups(tuple(bounds), lengths.to(x.device), None)


def _has_grouped_gemm(x: Tensor, out_features: int) -> bool:
    """Whether torch has a kernel that reads the sizes on the device; it wants 16-byte rows."""
    return (
        _grouped_mm is not None
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and x.shape[0] > 0
        and x.shape[1] % 8 == 0
        and out_features % 8 == 0
        and min(x.shape[1], out_features) > 0
    )


def grouped_mm(x: Tensor, matrices: Sequence[Tensor], groups: RowGroups) -> Tensor:
    """``y[rows of g] = x[rows of g] @ matrices[g]``: (T, K), G × (K, N) -> (T, N)."""
    if groups.bounds is None:
        assert _grouped_mm is not None
        # Stacking transposes of row-major weights must not lay them out anew.
        columns_first = matrices[0].stride(0) == 1 and matrices[0].stride(1) != 1
        stacked = (
            torch.stack([m.t() for m in matrices]).transpose(1, 2)
            if columns_first
            else torch.stack(list(matrices))
        )
        y: Tensor = _grouped_mm(x.contiguous(), stacked, offs=groups.ends)
        return y
    out = x.new_empty(x.shape[0], matrices[0].shape[1])
    for (start, stop), matrix in zip(groups.bounds, matrices):
        if start < stop:
            torch.mm(x[start:stop], matrix, out=out[start:stop])
    return out


def grouped_wgrad(dy: Tensor, x: Tensor, groups: RowGroups) -> list[Tensor]:
    """``dW[g] = dy[rows of g]ᵀ @ x[rows of g]``: (T, N), (T, K) -> G × (N, K)."""
    if groups.bounds is None:
        assert _grouped_mm is not None
        return list(_grouped_mm(dy.contiguous().t(), x.contiguous(), offs=groups.ends).unbind(0))
    return [torch.mm(dy[start:stop].t(), x[start:stop]) for start, stop in groups.bounds]


def grouped_sum(x: Tensor, groups: RowGroups) -> Tensor:
    """Sums of the rows of each group: (T, K) -> (G, K), in fp32 for fp16 and bf16."""
    if x.itemsize == 2:
        x = x.float()
    if groups.bounds is None:
        return torch.segment_reduce(x, "sum", lengths=groups.lengths, axis=0, unsafe=True)
    return torch.stack([x[start:stop].sum(0) for start, stop in groups.bounds])
