"""Quantization of groups of rows to fp8 in plain torch, and products of their codes.

Dimensions, layouts and bits as in :mod:`.groups` and :mod:`.grouped_products`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .quantize_plain import (
    BLOCK,
    BlockScaling,
    Codes,
    MeasuredScaling,
    TensorScaling,
    by_blocks_plain,
    encode,
    given_scaling,
    raise_amax,
    scale_for,
)


class VectorScaling(NamedTuple):
    """A scale for each row, and by columns for each column of each group, from largest values.

    Attributes:
        dtype: of the codes.
        power_of_two: whether scales are powers of two.
    """

    dtype: torch.dtype
    power_of_two: bool = False


GroupScaling = TensorScaling | MeasuredScaling | BlockScaling | VectorScaling


class Grouped(NamedTuple):
    """Which rows of a matrix are those of groups.

    Attributes:
        groups: G.
        ends: of ``groups.group_ends``; None: all groups have R / G rows.
        sources: (R,) integers, the row of the matrix that each row is; None: the rows as they are.
    """

    groups: int
    ends: Tensor | None = None
    sources: Tensor | None = None


def padded_size(rows: int, groups: Grouped) -> int:
    """P: rows that groups have with padding, or may have at most."""
    count = groups.groups
    if groups.ends is None:
        return count * (-(-rows // count // BLOCK) * BLOCK)
    return (rows // BLOCK + count) * BLOCK


def count_rows(x: Tensor, groups: Grouped) -> int:
    """R."""
    return len(x if groups.sources is None else groups.sources)


def gathered(x: Tensor, groups: Grouped) -> Tensor:
    """The rows of groups."""
    return x if groups.sources is None else x.index_select(0, groups.sources)


def group_ends_plain(sizes: Tensor, rows: int) -> Tensor:
    """Where groups end, (2, G) in int32: among their rows, and where each is padded.

    Sizes below 0 count as 0, and no group ends behind row ``rows``: whatever the sizes are, kernels
    stay within their tensors.

    Args:
        sizes: (G,) integers.
        rows: R.
    """
    own = sizes.to(torch.int32).clamp_min(0)
    total = own.cumsum(0, dtype=torch.int32)
    ends = total.clamp_max(rows)
    own = ends - (total - own).clamp_max(rows)
    tiles = (own + (BLOCK - 1)).div(BLOCK, rounding_mode="floor").clamp_min(1)
    return torch.stack((ends, tiles.cumsum(0, dtype=torch.int32) * BLOCK))


def _ends(x: Tensor, groups: Grouped) -> Tensor:
    if groups.ends is not None:
        return groups.ends
    count = groups.groups
    numbers = torch.arange(1, count + 1, device=x.device)
    padded = padded_size(len(x), groups) // count
    return torch.stack((numbers * (len(x) // count), numbers * padded))


def _groups_of(ends: Tensor, count: int) -> Tensor:
    """For each of so many rows the number of its group; past the last group, of that."""
    numbers = torch.arange(count, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends.contiguous(), numbers, right=True).clamp_(max=len(ends) - 1)


def _have_group(ends: Tensor, x: Tensor) -> Tensor:
    """Which rows are those of a group, (R,)."""
    return torch.arange(len(x), device=x.device) < ends[0, -1]


class PaddedRows(NamedTuple):
    """The rows of groups in fp32, with zeros between them.

    Attributes:
        values: (P, C).
        own: (P,), which of them are rows of x.
        group: (P,), the groups that they are in.
        at: (R,), where the rows of x are.
    """

    values: Tensor
    own: Tensor
    group: Tensor
    at: Tensor


def padded_rows(x: Tensor, groups: Grouped) -> PaddedRows:
    """The rows of x, which are gathered, where each group is padded."""
    padded = padded_size(len(x), groups)
    stops, padded_stops = _ends(x, groups)
    group = _groups_of(padded_stops, padded)
    # A group lies as much further behind as all groups before it are padded.
    moved = torch.cat((stops.new_zeros(1), (padded_stops - stops)[:-1]))
    source = torch.arange(padded, device=x.device) - moved[group]
    own = source < stops[group]
    at = torch.arange(len(x), device=x.device) + moved[_groups_of(stops, len(x))]
    if not len(x):
        values = x.new_zeros(padded, x.shape[1], dtype=torch.float32)
    else:
        values = x.to(torch.float32)[source.clamp(max=len(x) - 1)].masked_fill_(~own[:, None], 0.0)
    return PaddedRows(values, own, group, at)


def maxima_plain(
    x: Tensor, groups: Grouped, rows: bool, cols: bool
) -> tuple[Tensor | None, Tensor | None]:
    """As ``groups.maxima_of_groups``."""
    x = gathered(x, groups)
    of_rows = of_cols = None
    ends = _ends(x, groups)
    if rows:
        of_rows = x.abs().amax(1).to(torch.float32).masked_fill_(~_have_group(ends, x), 0.0)
    if cols:
        lengths = ends[0].diff(prepend=ends.new_zeros(1))
        how: Any = {"lengths": lengths, "axis": 0, "unsafe": True, "initial": 0.0}
        of_cols = torch.segment_reduce(x.to(torch.float32).abs(), "max", **how).flatten()
    return of_rows, of_cols


def by_vectors_plain(x: Tensor, groups: Grouped, scaling: Any, rows: bool, cols: bool) -> Codes:
    """As ``groups.quantize_groups`` without blocks."""
    x, groups = gathered(x, groups), groups._replace(sources=None)
    count, dtype = groups.groups, scaling.dtype
    laid, ends = padded_rows(x, groups) if cols else None, _ends(x, groups)
    if isinstance(scaling, VectorScaling):
        power = scaling.power_of_two
        amax = maxima_plain(x, groups, rows, cols)
        of_rows, of_cols = (None if m is None else scale_for(m, dtype, power) for m in amax)
    else:
        scale, _, seen = given_scaling(scaling)
        assert scale is not None
        raise_amax(seen, x.masked_fill(~_have_group(ends, x)[:, None], 0.0))
        of_groups = scale.expand(count)
        of_rows = of_groups[_groups_of(ends[0], len(x))]
        of_cols = of_groups.repeat_interleave(x.shape[1])
    by_rows = by_cols = None
    if rows and of_rows is not None:
        by_rows, of_rows = encode(x, of_rows[:, None], dtype), of_rows.reciprocal()
    if laid is not None and of_cols is not None:
        codes = encode(laid.values, of_cols.view(count, -1)[laid.group], dtype)
        codes.view(torch.uint8).masked_fill_(~laid.own[:, None], 0)  # also where a scale is NaN
        by_cols, of_cols = codes.t().contiguous(), of_cols.reciprocal()
    return Codes(by_rows, of_rows if rows else None, by_cols, of_cols if cols else None, None)


def by_blocks_in_groups_plain(
    x: Tensor, groups: Grouped, scaling: BlockScaling, rows: bool, cols: bool
) -> Codes:
    """As ``groups.quantize_groups`` in blocks."""
    x = gathered(x, groups)
    by_rows = of_rows = by_cols = of_cols = None
    if rows:
        codes = by_blocks_plain(x, scaling, True, False, False)
        assert codes.rows is not None
        assert codes.row_scale is not None
        by_rows, of_rows = codes.rows[: len(x)], codes.row_scale[:, : len(x)].contiguous()
    if cols:
        values, own, *_ = padded_rows(x, groups)
        codes = by_blocks_plain(values, scaling, False, True, False)
        by_cols, of_cols = codes.cols, codes.col_scale
        assert by_cols is not None
        by_cols.view(torch.uint8).masked_fill_(~own, 0)
    return Codes(by_rows, of_rows, by_cols, of_cols, None)


def _in_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Values of codes (M, K) with scales (K / 128, M)."""
    values: Tensor = codes.float()
    values.unflatten(1, (-1, BLOCK)).mul_(scale.t().unsqueeze(2))
    return values


def _in_squares(codes: Tensor, scale: Tensor) -> Tensor:
    """Values of codes (..., M, K) with scales (..., M / 128, K / 128)."""
    return codes.float() * scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


def rows_by_matrices_plain(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    split: bool,
    out: Tensor | None,
) -> Tensor:
    """As ``grouped_products.rows_by_matrices``."""
    if a.is_meta:
        return a.new_empty((len(a), b.shape[1]), dtype=dtype) if out is None else out
    if a_scale.dim() == 2:
        left, right = _in_blocks(a, a_scale), _in_squares(b, b_scale)
    else:
        left, right = a.float() * a_scale[:, None], b.float() * b_scale[:, :, None]
    y = F.grouped_mm(left, right.transpose(1, 2), offs=ends[0])
    return y.to(dtype) if out is None else out.copy_(y)


def columns_by_columns_plain(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    split: bool,
    out: Tensor | None,
) -> Tensor:
    """As ``grouped_products.columns_by_columns``."""
    shape = ends.shape[1], len(a), len(b)
    if a.is_meta:
        return a.new_empty(shape, dtype=dtype) if out is None else out
    if a_scale.dim() == 1:
        y = F.grouped_mm(a.float(), b.float().t(), offs=ends[1])
        y = y * a_scale.view(-1, len(a), 1) * b_scale.view(-1, 1, len(b))
    else:
        blocks = a.shape[1] // BLOCK
        of_blocks = b_scale.shape == (blocks, len(b))
        right = _in_blocks(b, b_scale) if of_blocks else _in_squares(b, b_scale[:, :blocks])
        y = F.grouped_mm(_in_blocks(a, a_scale), right.t(), offs=ends[1])
    return y.to(dtype) if out is None else out.copy_(y)
