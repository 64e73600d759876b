"""Groups of consecutive rows, of which each has a matrix of its own.

Symbols: T rows, G groups, N columns.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, NotSupportedError, counted
from ..kernels.groups import group_ends
from ..runtime import operators
from ..runtime.tracing import stands_in, transforms_active

__all__ = ["RowGroups", "groups_on_device", "groups_on_host", "row_groups"]


class RowGroups(NamedTuple):
    """Where the groups of rows lie: on the host if their sizes are known there.

    With neither ``bounds`` nor ``ends``, the sizes are not known yet: the call is being traced by
    ``torch.compile``, or has no data, and operators that it does not look into read them.

    Attributes:
        bounds: start and end row of each group.
        sizes: (G,) integers, the numbers of rows; or :attr:`ends`, from which forward locates the
            groups for all products of both passes.
    """

    bounds: tuple[tuple[int, int], ...] | None
    sizes: Tensor

    @property
    def ends(self) -> Tensor | None:
        """The ``kernels.groups.group_ends``, (2, G), if only the device knows the sizes."""
        return self.sizes if self.sizes.dim() == 2 else None

    def spread(self, table: Tensor, rows: int) -> Tensor:
        """(G, N) -> (T, N): for each row the entry of its group; past the last group, of that."""
        ends = self.sizes.to(table.device).cumsum(0) if self.ends is None else self.ends[0]
        numbers = torch.arange(rows, device=ends.device, dtype=ends.dtype)
        of_row = torch.searchsorted(ends, numbers, right=True).clamp_(max=ends.numel() - 1)
        return table.index_select(0, of_row)

    def sum(self, x: Tensor) -> Tensor:
        """(T, N) -> (G, N): for each group the sum of its rows."""
        if self.ends is not None:
            ends = self.ends[0].to(torch.int64)
            lengths = ends.diff(prepend=ends.new_zeros(1))
            return torch.segment_reduce(x, "sum", lengths=lengths, axis=0, unsafe=True)
        if self.bounds is None:
            total: Tensor = operators.grouped_sum(x, self.sizes)
            return total
        return torch.stack([x[start:stop].sum(0) for start, stop in self.bounds])


def row_groups(split_sizes: Tensor, x: Tensor, where: str) -> RowGroups:
    """Locates the groups that ``split_sizes`` cuts the rows of ``x`` into.

    Sizes on the host are checked. Sizes on a GPU stay there unchecked: see ``has_grouped_gemm``.
    ``sizes`` of groups that were located before are taken as well.

    Raises:
        InputError: sizes on the host are negative, or do not add up to the rows of ``x``.
        NotSupportedError: under ``torch.vmap``.
    """
    if split_sizes.dim() == 2:
        return RowGroups(None, split_sizes)
    if transforms_active() and not stands_in(split_sizes):
        raise NotSupportedError.explained(
            "Groups of rows are multiplied for one input at a time",
            where=where,
            received="inputs of torch.vmap",
            remedy="Call it for one after the other",
        )
    # Without data torch's grouped GEMM takes bf16 alone.
    other = split_sizes.is_meta and x.dtype != torch.bfloat16
    if (split_sizes.is_cuda or split_sizes.is_meta) and not other:  # which counts as a GPU does
        return groups_on_device(split_sizes, x.shape[0])
    if other or stands_in(split_sizes):
        return RowGroups(None, split_sizes)
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
        raise InputError.explained(
            "The split sizes must not be negative, and add up to the number of rows",
            where=where,
            received=f"split sizes {sizes}, input of {counted(x.shape[0], 'row')}",
        )
    stops = list(accumulate(sizes))
    return RowGroups(tuple(zip([0, *stops], stops)), split_sizes)


def groups_on_device(split_sizes: Tensor, rows: int) -> RowGroups:
    """The groups of so many rows, of which the host knows no more than their number."""
    return RowGroups(None, group_ends(split_sizes, rows))
