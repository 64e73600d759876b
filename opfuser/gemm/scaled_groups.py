"""Products of groups of consecutive rows whose operands are codes with scales.

Symbols as in :mod:`.grouped`. Those of FP8 find the groups on the device, with codes as
``kernels.groups`` lays them out. Those of MXFP8 and NVFP4 are computed group by group: groups are
quantized together, each padded to a multiple of 128 rows, so that it begins where a block does, in
both layouts, and is multiplied where it lies. The host must know the bounds of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import NotSupportedError
from ..kernels.grouped_products import columns_by_columns, rows_by_matrices
from ..kernels.microscaling_plain import FP4, scales_of_part
from ..kernels.quantize import BLOCK, Codes
from ..kernels.tiling import cdiv
from .row_groups import RowGroups
from .scaled import Accumulation, scaled_dgrad, scaled_forward


def grouped_scaled_forward(
    x: Codes, w: Codes, ends: Tensor, how: Accumulation, out: Tensor | None = None
) -> Tensor:
    """``y[rows of g] = x[rows of g] W[g]ᵀ``, (T, N), from FP8 codes by rows.

    Args:
        x: (T, K).
        w: of all groups, (G N, K), without padding.
        ends: of ``kernels.groups.group_ends``.
        how: see there.
        out: where to write the result.
    """
    groups = ends.shape[1]
    assert x.rows is not None
    assert x.row_scale is not None
    assert w.rows is not None
    assert w.row_scale is not None
    matrices = w.rows.unflatten(0, (groups, -1))
    scale = w.row_scale.unflatten(0, (groups, -1))
    if scale.dim() == 3:
        scale = scale[..., : w.rows.shape[1] // BLOCK]
    return _written((x.rows, matrices, x.row_scale, scale, ends), how, out)


def grouped_scaled_dgrad(
    dy: Codes, w: Codes, ends: Tensor, how: Accumulation, out: Tensor | None = None
) -> Tensor:
    """``dx[rows of g] = dy[rows of g] W[g]``, (T, K), from FP8 codes of dy by rows, W by columns.

    Args as in :func:`grouped_scaled_forward`, but for dy (T, N).
    """
    groups = ends.shape[1]
    assert dy.rows is not None
    assert dy.row_scale is not None
    assert w.cols is not None
    assert w.col_scale is not None
    features = dy.rows.shape[1]
    matrices = w.cols.unflatten(1, (groups, -1))[..., :features].transpose(0, 1)
    if w.col_scale.dim() == 1:
        scale = w.col_scale.unflatten(0, (groups, -1))
    else:
        blocks = features // BLOCK
        scale = w.col_scale[:, : groups * blocks].unflatten(1, (groups, blocks)).transpose(0, 1)
    return _written((dy.rows, matrices, dy.row_scale, scale, ends), how, out)


def grouped_scaled_wgrad(dy: Codes, x: Codes, ends: Tensor, how: Accumulation) -> Tensor:
    """``dW[g] = dy[rows of g]ᵀ x[rows of g]``, (G, N, K), from FP8 codes by columns.

    Args:
        dy: (T, N).
        x: (T, K).
        ends: as in :func:`grouped_scaled_forward`.
        how: see there.
    """
    assert dy.cols is not None
    assert dy.col_scale is not None
    assert x.cols is not None
    assert x.col_scale is not None
    given = dy.cols, x.cols, dy.col_scale, x.col_scale, ends
    return columns_by_columns(*given, how.dtype, split=how.split)


def _written(
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], how: Accumulation, out: Tensor | None
) -> Tensor:
    """The product of rows by matrices in ``how.dtype``, and from there in ``out``."""
    same = out is not None and out.dtype == how.dtype
    y = rows_by_matrices(*given, how.dtype, split=how.split, out=out if same else None)
    return y if same or out is None else out.copy_(y)


def padded_groups(x: Tensor, groups: RowGroups) -> Tensor:
    """``x`` (T, C) with rows of zeros between groups; itself where nothing is missing there.

    Raises:
        NotSupportedError: the host does not know the bounds of the groups.
    """
    if groups.bounds is None:
        raise NotSupportedError.explained(
            "The host reads the sizes of groups of rows that are quantized",
            where="GroupedLinear",
            received=f"split sizes on {groups.sizes.device.type}",
            remedy="Pass split sizes on the CPU",
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
        count, features = rows.shape[0], rows.shape[1] * _packed(rows)
        part = (count, features), (start, stop), (0, features)
        row_scale = scales_of_part(row_scale, *part)
        rows = rows[start:stop]
    if cols is not None and col_scale is not None:
        packed = _packed(cols)
        features, count = cols.shape[0], cols.shape[1] * packed
        col_scale = scales_of_part(col_scale, (features, count), (0, features), (start, stop))
        cols = cols[:, start // packed : stop // packed]
    return Codes(rows, row_scale, cols, col_scale, None)


def _packed(codes: Tensor) -> int:
    """How many codes a byte holds."""
    return 2 if codes.dtype == FP4 else 1


def scaled_forwards(
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
    for codes, w, part in _present(x, weights, groups, out):
        part.copy_(scaled_forward(codes, w, (len(part), out.shape[1]), None, how))
    return out


def scaled_dgrads(
    dy: Codes, weights: Sequence[Codes], groups: RowGroups, out: Tensor, how: Accumulation
) -> Tensor:
    """``dx[rows of g] = dy[rows of g] W[g]``, written to ``out`` (T, K), which is returned.

    Args as in :func:`scaled_forwards`, but for weights by columns.
    """
    for codes, w, part in _present(dy, weights, groups, out):
        part.copy_(scaled_dgrad(codes, w, len(part), how))
    return out


def _present(
    x: Codes, weights: Sequence[Codes], groups: RowGroups, out: Tensor
) -> Iterable[tuple[Codes, Codes, Tensor]]:
    """Codes, weight and memory of each group that has rows."""
    assert groups.bounds is not None
    for codes, w, (start, stop) in zip(codes_of_groups(x, groups), weights, groups.bounds):
        if start < stop:
            yield codes, w, out[start:stop]
