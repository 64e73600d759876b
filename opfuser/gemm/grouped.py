"""The three products of groups of consecutive rows, of which each has a matrix of its own.

Symbols: T rows, G groups, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..runtime import operators
from .operands import Operand
from .products import wgrad_into
from .row_groups import RowGroups

__all__ = [
    "grouped_dgrad",
    "grouped_forward",
    "grouped_wgrad",
    "grouped_wgrad_into",
    "has_grouped_gemm",
    "reads_groups_on_device",
]


def has_grouped_gemm(x: Operand, out_features: int) -> bool:
    """Whether torch has a kernel that reads the sizes on the device; it wants 16-byte rows."""
    on_device = x.is_cuda or x.is_meta
    return (
        x.shape[0] > 0 and on_device and reads_groups_on_device(x.dtype, x.shape[1], out_features)
    )


def reads_groups_on_device(dtype: torch.dtype, in_features: int, out_features: int) -> bool:
    """As :func:`has_grouped_gemm`, for rows on a GPU."""
    sizes = in_features, out_features
    return dtype == torch.bfloat16 and min(sizes) > 0 and not any(size % 8 for size in sizes)


def grouped_forward(
    x: Operand,
    weights: Operand | Sequence[Operand],
    groups: RowGroups,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``y[rows of g] = x[rows of g] W[g]ᵀ``, (T, N), of x's dtype.

    Args:
        x: (T, K).
        weights: G × (N, K); as one tensor torch's grouped GEMM needs no copy of them.
        groups: of the rows of ``x``.
        out: where to write the result, (T, N) of x's dtype.
    """
    return _rows_by_matrices(x, weights, groups, transpose=True, out=out)


def grouped_dgrad(
    dy: Operand,
    weights: Operand | Sequence[Operand],
    groups: RowGroups,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``dx[rows of g] = dy[rows of g] W[g]``, (T, K), of dy's dtype.

    Args:
        dy: (T, N).
        weights: G × (N, K), as in :func:`grouped_forward`.
        groups: of the rows of ``dy``.
        out: where to write the result, (T, K), cast to the dtype that this has.
    """
    if out is not None and out.dtype != dy.dtype:
        return out.copy_(_rows_by_matrices(dy, weights, groups, transpose=False))
    return _rows_by_matrices(dy, weights, groups, transpose=False, out=out)


def _rows_by_matrices(
    rows: Operand,
    weights: Operand | Sequence[Operand],
    groups: RowGroups,
    *,
    transpose: bool,
    out: Tensor | None = None,
) -> Tensor:
    """The rows of g times ``weights[g]``, or its transpose."""
    if groups.ends is not None:
        stacked = weights if isinstance(weights, Tensor) else torch.stack(list(weights))
        stacked = stacked.transpose(1, 2) if transpose else stacked
        product = F.grouped_mm(rows.contiguous(), stacked, offs=groups.ends[0])
        return product if out is None else out.copy_(product)
    if groups.bounds is None:
        y: Tensor = operators.grouped_mm(rows, list(weights), groups.sizes, transpose)
        return y if out is None else out.copy_(y)
    matrices = [w.t() if transpose else w for w in weights]
    if out is None:
        out = rows.new_empty(rows.shape[0], matrices[0].shape[1])
    for (start, stop), matrix in zip(groups.bounds, matrices):
        if start < stop:
            torch.mm(rows[start:stop], matrix, out=out[start:stop])
    return out


def grouped_wgrad(
    dy: Operand, x: Operand, groups: RowGroups, *, stacked: bool
) -> Tensor | Sequence[Tensor]:
    """``dW[g] = dy[rows of g]ᵀ x[rows of g]``: G × (N, K), or (G, N, K) if ``stacked``.

    Args:
        dy: (T, N).
        x: (T, K), of dy's dtype.
        groups: of the rows of both.
        stacked: whether the weights are one tensor.
    """
    if groups.bounds is None:
        dw: Tensor
        if groups.ends is None:
            dw = operators.grouped_wgrad(dy, x, groups.sizes)
        else:
            dw = F.grouped_mm(dy.contiguous().t(), x.contiguous(), offs=groups.ends[0])
        return dw if stacked else dw.unbind(0)
    if not stacked:
        return [torch.mm(dy[start:stop].t(), x[start:stop]) for start, stop in groups.bounds]
    out = x.new_empty(len(groups.bounds), dy.shape[1], x.shape[1])
    for (start, stop), matrix in zip(groups.bounds, out):
        torch.mm(dy[start:stop].t(), x[start:stop], out=matrix)
    return out


def grouped_wgrad_into(
    outs: Sequence[tuple[Tensor, bool] | None], dy: Operand, x: Operand, groups: RowGroups
) -> None:
    """Each group's ``dyᵀ x``, written to memory that is given for it or added to what is there.

    Args:
        outs: for each group the memory, (N, K), and whether to accumulate; None: not wanted.
        dy: (T, N).
        x: (T, K), of dy's dtype.
        groups: of the rows of both.
    """
    if groups.bounds is None:
        products = grouped_wgrad(dy, x, groups, stacked=False)
        for target, product in zip(outs, products):
            if target is not None:
                out, accumulate = target
                out.add_(product) if accumulate else out.copy_(product)
        return
    for target, (start, stop) in zip(outs, groups.bounds):
        if target is not None:
            out, accumulate = target
            wgrad_into(out, dy[start:stop], x[start:stop], accumulate=accumulate)
