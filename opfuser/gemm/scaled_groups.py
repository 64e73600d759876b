"""Products of groups of consecutive rows whose operands are fp8 codes with scales.

Symbols as in :mod:`.grouped`. Groups are quantised together, each padded to a multiple of 128 rows:
so it begins where a block does, in both layouts, and is multiplied where it lies. The host must
know the bounds of the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..kernels.quantize import BLOCK, Codes, in_fours
from ..kernels.tiling import cdiv
from .row_groups import RowGroups
from .scaled import Accumulation, scaled_dgrads, scaled_forwards

__all__ = ["codes_of_groups", "padded_groups", "scaled_grouped_dgrad", "scaled_grouped_forward"]


def padded_groups(x: Tensor, groups: RowGroups) -> Tensor:
    """``x`` (T, C) with rows of zeros between groups; itself where nothing is missing there."""
    assert groups.bounds is not None
    present = [(start, stop) for start, stop in groups.bounds if start < stop]
    if all(start % BLOCK == 0 for start, _ in present):
        return x
    zeros = x.new_zeros(BLOCK - 1, x.shape[1])
    pieces = [
        p for start, stop in present for p in (x[start:stop], zeros[: (start - stop) % BLOCK])
    ]
    return torch.cat(pieces)


def codes_of_groups(codes: Codes, groups: RowGroups) -> list[Codes]:
    """Those of each group; what lies between two is the padding of the first.

    Args:
        codes: of :func:`padded_groups`.
        groups: of the rows before they were padded.
    """
    assert groups.bounds is not None
    found, start = [], 0
    for first, last in groups.bounds:
        stop = start + cdiv(last - first, BLOCK) * BLOCK
        found.append(_cut(codes, start, stop))
        start = stop
    return found


def _cut(codes: Codes, start: int, stop: int) -> Codes:
    """Rows from ``start`` to ``stop``, multiples of 128."""
    rows, row_scale, cols, col_scale, _ = codes
    if row_scale is not None and row_scale.dim() == 2:
        # GEMMs look at the strides, also at that of a single row, which contiguous() may leave.
        row_scale = row_scale[:, start:stop].clone(memory_format=torch.contiguous_format)
    if col_scale is not None and col_scale.dim() == 2:
        blocks = slice(start // BLOCK, stop // BLOCK)
        squares = codes.has_square_cols
        col_scale = in_fours(col_scale[:, blocks]) if squares else col_scale[blocks]
    return Codes(
        None if rows is None else rows[start:stop],
        row_scale,
        None if cols is None else cols[:, start:stop],
        col_scale,
        None,
    )


def scaled_grouped_forward(
    x: Codes, weights: Sequence[Codes], groups: RowGroups, out: Tensor, how: Accumulation
) -> Tensor:
    """``y[rows of g] = x[rows of g] W[g]ᵀ``, written to ``out`` (T, N), which is returned.

    Args:
        x: of :func:`padded_groups`, by rows.
        weights: G × (N, K), by rows.
        groups: of the rows before they were padded.
        out: memory, which gets its values from products of ``how.dtype``.
        how: see there.
    """
    pairs, bounds = _present(x, weights, groups)
    return _written(scaled_forwards(pairs, out.shape[1], how), bounds, out)


def scaled_grouped_dgrad(
    dy: Codes, weights: Sequence[Codes], groups: RowGroups, out: Tensor, how: Accumulation
) -> Tensor:
    """``dx[rows of g] = dy[rows of g] W[g]``, written to ``out`` (T, K), which is returned.

    Args as in :func:`scaled_grouped_forward`, but for weights by columns.
    """
    pairs, bounds = _present(dy, weights, groups)
    return _written(scaled_dgrads(pairs, how), bounds, out)


_Bounds = list[tuple[int, int]]


def _present(
    x: Codes, weights: Sequence[Codes], groups: RowGroups
) -> tuple[list[tuple[Codes, Codes]], _Bounds]:
    """Codes and weight of each group that has rows, and where it lies."""
    assert groups.bounds is not None
    every = zip(codes_of_groups(x, groups), weights, groups.bounds)
    present = [(codes, w, bounds) for codes, w, bounds in every if bounds[0] < bounds[1]]
    return [(codes, w) for codes, w, _ in present], [bounds for _, _, bounds in present]


def _written(products: Iterable[Tensor], bounds: _Bounds, out: Tensor) -> Tensor:
    for product, (start, stop) in zip(products, bounds):
        out[start:stop] = product[: stop - start]
    return out
