"""Products of groups of consecutive rows whose operands are codes with scales.

Symbols as in :mod:`.grouped`. Groups are quantised together, each padded to a multiple of 128 rows:
so it begins where a block does, in both layouts, and is multiplied where it lies. The host must
know the bounds of the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import NotSupportedError, explain
from ..kernels.microscaling_plain import FP4, scales_of_part
from ..kernels.quantize import BLOCK, Codes, in_fours
from ..kernels.tiling import cdiv
from .row_groups import RowGroups
from .scaled import Accumulation, scaled_dgrads, scaled_forwards

__all__ = ["codes_of_groups", "padded_groups", "scaled_grouped_dgrad", "scaled_grouped_forward"]


def padded_groups(x: Tensor, groups: RowGroups) -> Tensor:
    """``x`` (T, C) with rows of zeros between groups; itself where nothing is missing there.

    Raises:
        NotSupportedError: the host does not know the bounds of the groups.
    """
    if groups.bounds is None:
        raise NotSupportedError(
            explain(
                "The host reads the sizes of groups of rows that are quantised",
                where="GroupedLinear",
                received=f"split sizes on {groups.lengths.device.type}",
                remedy="Pass split sizes on the CPU",
            )
        )
    present = [(start, stop) for start, stop in groups.bounds if start < stop]
    if all(start % BLOCK == 0 for start, _ in present):
        return x
    zeros = x.new_zeros(BLOCK - 1, x.shape[1])
    pieces = [
        p for start, stop in present for p in (x[start:stop], zeros[: (start - stop) % BLOCK])
    ]
    return torch.cat(pieces)


def codes_of_groups(codes: Codes, groups: RowGroups) -> list[Codes]:
    """The codes of each group; what lies between two groups is the padding of the first.

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
    if rows is not None and row_scale is not None:
        row_scale = _scales_of_rows(rows, row_scale, start, stop)
        rows = rows[start:stop]
    if cols is not None and col_scale is not None:
        col_scale = _scales_of_cols(codes, cols, col_scale, start, stop)
        packed = _packed(cols)
        cols = cols[:, start // packed : stop // packed]
    return Codes(rows, row_scale, cols, col_scale, None)


def _scales_of_rows(rows: Tensor, scale: Tensor, start: int, stop: int) -> Tensor:
    if scale.dim() == 2:
        # GEMMs look at the strides, also at that of a single row, which contiguous() may leave.
        return scale[:, start:stop].clone(memory_format=torch.contiguous_format)
    if scale.dtype == torch.float32:
        return scale  # of the whole tensor
    count, features = rows.shape[0], rows.shape[1] * _packed(rows)
    return scales_of_part(scale, (count, features), (start, stop), (0, features))


def _scales_of_cols(codes: Codes, cols: Tensor, scale: Tensor, start: int, stop: int) -> Tensor:
    if scale.dim() == 2:
        blocks = slice(start // BLOCK, stop // BLOCK)
        return in_fours(scale[:, blocks]) if codes.has_square_cols else scale[blocks]
    if scale.dtype == torch.float32:
        return scale  # of the whole tensor
    features, count = cols.shape[0], cols.shape[1] * _packed(cols)
    return scales_of_part(scale, (features, count), (0, features), (start, stop))


def _packed(codes: Tensor) -> int:
    """How many codes a byte holds."""
    return 2 if codes.dtype == FP4 else 1


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
