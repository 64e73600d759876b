"""Arithmetic on consecutive groups of rows: each has a matrix and a bias of its own.

Symbols: T rows, G groups, K columns of the left operand, N columns of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError, NotSupportedError, explain
from ..kernels.launch import transforms_active
from ._wgrad import add_wgrad

__all__ = [
    "RowGroups",
    "add_grouped_wgrad",
    "check_grouped_inputs",
    "grouped_bias_grad",
    "grouped_mm",
    "grouped_wgrad",
    "groups_on_device",
    "has_grouped_gemm",
    "row_groups",
    "scale_grad",
]

_WHERE = "GroupedLinear"
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class RowGroups(NamedTuple):
    """Where the groups of rows lie: on the host if their sizes are known there.

    With neither ``bounds`` nor ``ends``, the sizes are on the host, but not known yet: the call is
    being traced by ``torch.compile``, and operators that it does not look into read them.

    Attributes:
        bounds: start and end row of each group.
        lengths: (G,) integer tensor of the numbers of rows.
        ends: (G,) int32 tensor, on the device of the rows, if only the device knows the sizes.
    """

    bounds: tuple[tuple[int, int], ...] | None
    lengths: Tensor
    ends: Tensor | None

    def spread(self, table: Tensor, rows: int) -> Tensor:
        """(G, N) -> (T, N): for each row the entry of its group; past the last group, of that."""
        ends = self.lengths.to(table.device).cumsum(0) if self.ends is None else self.ends
        numbers = torch.arange(rows, device=ends.device, dtype=ends.dtype)
        of_row = torch.searchsorted(ends, numbers, right=True).clamp_(max=ends.numel() - 1)
        return table.index_select(0, of_row)

    def sum(self, x: Tensor) -> Tensor:
        """(T, N) -> (G, N): for each group the sum of its rows."""
        if self.ends is not None:
            return torch.segment_reduce(x, "sum", lengths=self.lengths, axis=0, unsafe=True)
        if self.bounds is None:
            total: Tensor = _sum_op(x, self.lengths)
            return total
        return torch.stack([x[start:stop].sum(0) for start, stop in self.bounds])


def row_groups(split_sizes: Tensor, x: Tensor, where: str) -> RowGroups:
    """Locates the groups that ``split_sizes`` cuts the rows of ``x`` into.

    Sizes on the host are checked. Sizes on a GPU stay there unchecked: see ``has_grouped_gemm``.

    Raises:
        InputError: sizes on the host are negative, or do not add up to the rows of ``x``.
        NotSupportedError: under ``torch.vmap``.
    """
    if not torch.compiler.is_compiling() and transforms_active():
        raise NotSupportedError(
            explain(
                "Groups of rows are multiplied for one input at a time",
                where=where,
                received="inputs of torch.vmap",
                remedy="Call it for one after the other",
            )
        )
    if split_sizes.is_cuda:
        return groups_on_device(split_sizes)
    if torch.compiler.is_compiling():
        return RowGroups(None, split_sizes, None)
    return _groups_on_host(split_sizes, x, where)


def _groups_on_host(split_sizes: Tensor, x: Tensor, where: str) -> RowGroups:
    sizes = split_sizes.tolist()
    if sum(sizes) != x.shape[0] or min(sizes) < 0:
        raise InputError(
            explain(
                "The split sizes must not be negative, and add up to the number of rows",
                where=where,
                received=f"split sizes {sizes}, input of {x.shape[0]} rows",
            )
        )
    stops = list(accumulate(sizes))
    return RowGroups(tuple(zip([0, *stops], stops)), split_sizes, None)


def groups_on_device(split_sizes: Tensor) -> RowGroups:
    """The groups of rows, of which the host knows no more than their number."""
    lengths = split_sizes.to(torch.int64)
    return RowGroups(None, lengths, lengths.cumsum(0).to(torch.int32))


def has_grouped_gemm(x: Tensor, out_features: int) -> bool:
    """Whether torch has a kernel that reads the sizes on the device; it wants 16-byte rows."""
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.shape[0] > 0
        and x.shape[1] % 8 == 0
        and out_features % 8 == 0
        and min(x.shape[1], out_features) > 0
    )


def grouped_mm(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    groups: RowGroups,
    *,
    transpose: bool,
    out: Tensor | None = None,
) -> Tensor:
    """``y[rows of g] = x[rows of g] @ weights[g]``, or ``@ weights[g]ᵀ`` if ``transpose``.

    Args:
        x: (T, K).
        weights: G × (K, N), or G × (N, K) to ``transpose``; as one tensor they need no copy.
        groups: of the rows of ``x``.
        transpose: whether the weights are.
        out: where to write the result, (T, N) of x's dtype.

    Returns:
        (T, N), of x's dtype.
    """
    if groups.ends is not None:
        stacked = weights if isinstance(weights, Tensor) else torch.stack(list(weights))
        stacked = stacked.transpose(1, 2) if transpose else stacked
        product = F.grouped_mm(x.contiguous(), stacked, offs=groups.ends)
        return product if out is None else out.copy_(product)
    if groups.bounds is None:
        y: Tensor = _mm_op(x, list(weights), groups.lengths, transpose)
        return y if out is None else out.copy_(y)
    matrices = [w.t() if transpose else w for w in weights]
    if out is None:
        out = x.new_empty(x.shape[0], matrices[0].shape[1])
    for (start, stop), matrix in zip(groups.bounds, matrices):
        if start < stop:
            torch.mm(x[start:stop], matrix, out=out[start:stop])
    return out


def grouped_wgrad(
    dy: Tensor, x: Tensor, groups: RowGroups, *, stacked: bool
) -> Tensor | Sequence[Tensor]:
    """``dW[g] = dy[rows of g]ᵀ @ x[rows of g]``: (T, N), (T, K) -> G × (N, K), or (G, N, K)."""
    if groups.bounds is None:
        dw: Tensor
        if groups.ends is None:
            dw = _wgrad_op(dy, x, groups.lengths)
        else:
            dw = F.grouped_mm(dy.contiguous().t(), x.contiguous(), offs=groups.ends)
        return dw if stacked else dw.unbind(0)
    if not stacked:
        return [torch.mm(dy[start:stop].t(), x[start:stop]) for start, stop in groups.bounds]
    out = x.new_empty(len(groups.bounds), dy.shape[1], x.shape[1])
    for (start, stop), matrix in zip(groups.bounds, out):
        torch.mm(dy[start:stop].t(), x[start:stop], out=matrix)
    return out


def add_grouped_wgrad(
    buffers: Sequence[tuple[Tensor, bool] | None], dy: Tensor, x: Tensor, groups: RowGroups
) -> None:
    """Adds or writes each group's ``dyᵀ x`` to its buffer, as ``add_wgrad``; None takes none."""
    if groups.bounds is None:
        products = grouped_wgrad(dy, x, groups, stacked=False)
        for target, product in zip(buffers, products):
            if target is not None:
                buffer, add = target
                buffer.add_(product) if add else buffer.copy_(product)
        return
    for target, (start, stop) in zip(buffers, groups.bounds):
        if target is not None:
            buffer, add = target
            add_wgrad(buffer, dy[start:stop], x[start:stop], add=add)


def grouped_bias_grad(dy: Tensor, scales: Tensor | None, groups: RowGroups) -> Tensor:
    """``db[g] = Σ s dy`` over the rows of g: (T, N) -> (G, N), in fp32 for fp16 and bf16."""
    dy = _wide(dy)
    return groups.sum(dy if scales is None else dy * scales.reshape(-1, 1))


def scale_grad(dy: Tensor, table: Tensor, scales: Tensor, groups: RowGroups) -> Tensor:
    """``ds = b[group] · dy`` for each row: (T, N), (G, N) -> like ``scales``."""
    per_row = _wide(dy) * groups.spread(table, dy.shape[0])
    return per_row.sum(-1).to(scales.dtype).view(scales.shape)


@torch.library.custom_op(
    "opfuser::grouped_mm",
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, Tensor split_sizes, bool transpose) -> Tensor",
)
def _mm_op(x: Tensor, weights: list[Tensor], split_sizes: Tensor, transpose: bool) -> Tensor:
    groups = _groups_on_host(split_sizes, x, _WHERE)
    return grouped_mm(x, weights, groups, transpose=transpose)


@_mm_op.register_fake
def _(x: Tensor, weights: list[Tensor], split_sizes: Tensor, transpose: bool) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0 if transpose else 1])


@torch.library.custom_op(
    "opfuser::grouped_wgrad",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor split_sizes) -> Tensor",
)
def _wgrad_op(dy: Tensor, x: Tensor, split_sizes: Tensor) -> Tensor:
    dw = grouped_wgrad(dy, x, _groups_on_host(split_sizes, x, _WHERE), stacked=True)
    assert isinstance(dw, Tensor)
    return dw


@_wgrad_op.register_fake
def _(dy: Tensor, x: Tensor, split_sizes: Tensor) -> Tensor:
    return x.new_empty(split_sizes.shape[0], dy.shape[1], x.shape[1])


@torch.library.custom_op(
    "opfuser::grouped_sum", mutates_args=(), schema="(Tensor x, Tensor split_sizes) -> Tensor"
)
def _sum_op(x: Tensor, split_sizes: Tensor) -> Tensor:
    return _groups_on_host(split_sizes, x, _WHERE).sum(x)


@_sum_op.register_fake
def _(x: Tensor, split_sizes: Tensor) -> Tensor:
    return x.new_empty(split_sizes.shape[0], x.shape[1])


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.itemsize == 2 else x


def check_grouped_inputs(
    x: Tensor,
    split_sizes: Tensor,
    scales: Tensor | None,
    *,
    num_groups: int,
    in_features: int,
    where: str,
) -> None:
    """Checks shapes and dtypes.

    Raises:
        InputError: one of them is wrong.
    """
    rows = x.numel() // in_features
    if not x.dim() or x.shape[-1] != in_features:
        wrong = f"input of shape {tuple(x.shape)}, expected (..., {in_features})"
    elif split_sizes.shape != (num_groups,) or split_sizes.dtype not in _INTEGERS:
        wrong = (
            f"split sizes of shape {tuple(split_sizes.shape)} and dtype {split_sizes.dtype}, "
            f"expected ({num_groups},) integers"
        )
    elif scales is not None and scales.numel() != rows:
        wrong = f"scales of shape {tuple(scales.shape)}, expected ({rows},)"
    else:
        return
    raise InputError(
        explain(
            "GroupedLinear takes rows, a split size per group and, with scale_bias, a scale per "
            "row",
            where=where,
            received=wrong,
        )
    )
