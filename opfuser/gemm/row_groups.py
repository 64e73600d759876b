"""Groups of consecutive rows, of which each has a matrix of its own.

Symbols: T rows, G groups, N columns.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, NotSupportedError, counted, explain
from ..tracing import stands_in, transforms_active

__all__ = ["RowGroups", "groups_on_device", "groups_on_host", "row_groups"]


class RowGroups(NamedTuple):
    """Where the groups of rows lie: on the host if their sizes are known there.

    With neither ``bounds`` nor ``ends``, the sizes are not known yet: the call is being traced by
    ``torch.compile``, or has no data, and operators that it does not look into read them.

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
    if transforms_active() and not stands_in(split_sizes):
        raise NotSupportedError(
            explain(
                "Groups of rows are multiplied for one input at a time",
                where=where,
                received="inputs of torch.vmap",
                remedy="Call it for one after the other",
            )
        )
    # Without data torch's grouped GEMM takes bf16 alone.
    other = split_sizes.is_meta and x.dtype != torch.bfloat16
    if (split_sizes.is_cuda or split_sizes.is_meta) and not other:  # which counts as a GPU does
        return groups_on_device(split_sizes)
    if other or stands_in(split_sizes):
        return RowGroups(None, split_sizes, None)
    return groups_on_host(split_sizes, x, where)


def groups_on_host(split_sizes: Tensor, x: Tensor, where: str = "GroupedLinear") -> RowGroups:
    """The groups of rows, with their bounds.

    Args:
        split_sizes: (G,), read here.
        x: (T, ...).
        where: names the operation in the error; in traced calls only one has groups.

    Raises:
        InputError: sizes are negative, or do not add up to the rows of ``x``.
    """
    sizes = split_sizes.tolist()
    if sum(sizes) != x.shape[0] or min(sizes) < 0:
        raise InputError(
            explain(
                "The split sizes must not be negative, and add up to the number of rows",
                where=where,
                received=f"split sizes {sizes}, input of {counted(x.shape[0], 'row')}",
            )
        )
    stops = list(accumulate(sizes))
    return RowGroups(tuple(zip([0, *stops], stops)), split_sizes, None)


def groups_on_device(split_sizes: Tensor) -> RowGroups:
    """The groups of rows, of which the host knows no more than their number."""
    lengths = split_sizes.to(torch.int64)
    return RowGroups(None, lengths, lengths.cumsum(0).to(torch.int32))


@torch.library.custom_op(
    "opfuser::grouped_sum", mutates_args=(), schema="(Tensor x, Tensor split_sizes) -> Tensor"
)
def _sum_op(x: Tensor, split_sizes: Tensor) -> Tensor:
    return groups_on_host(split_sizes, x).sum(x)


@_sum_op.register_fake
def _(x: Tensor, split_sizes: Tensor) -> Tensor:
    return x.new_empty(split_sizes.shape[0], x.shape[1])
