"""The plain twin of :mod:`row_map`: gathers in both passes, so that no sum is atomic.

Symbols: T tokens, k experts of each, R = T k rows, D features. A row map ``(..., k)`` holds for
each token and choice the row that belongs to it; as one dimension it is a permutation of the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError


class RowMap(NamedTuple):
    """Where rows go, int64.

    Attributes:
        row_map: (..., k).
        sizes: rows of each expert, (E,).
    """

    row_map: Tensor
    sizes: Tensor


def counts(indices: Tensor, number: int, mask: Tensor | None = None) -> Tensor:
    """How often each of the numbers below ``number`` occurs, (number,), of the indices' dtype.

    Integers add up to the same in any order. ``torch.bincount`` waits for the device.

    Args:
        indices: (..., k).
        number: number of numbers.
        mask: (...), bool: which of the k indices count; None: all.
    """
    flat = indices.reshape(-1)
    ones = torch.ones_like(indices)
    if mask is not None:
        ones = ones * mask.unsqueeze(-1)
    return flat.new_zeros(number).scatter_add_(0, flat.long(), ones.reshape(-1))


def inverse(permutation: Tensor) -> Tensor:
    """For each row the place in the flat row map that holds it, (R,); and the other way round."""
    flat = permutation.reshape(-1).long()
    numbers = torch.arange(flat.shape[0], device=flat.device)
    return torch.empty_like(flat).scatter_(0, flat, numbers)


def sort(indices: Tensor, num_experts: int) -> RowMap:
    """The rows of tokens with experts ``indices``, (..., k), by expert; the sort is stable."""
    try:
        sizes = counts(indices, num_experts).long()
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise InputError.explained(must_be_experts(num_experts), where="Permute") from error
    order = indices.reshape(-1).argsort(stable=True)
    return RowMap(inverse(order).view(indices.shape), sizes)


def must_be_experts(number: int) -> str:
    """The invariant of indices."""
    return f"The experts' indices must be from 0 to {number - 1}"


def tokens(order: Tensor, k: int) -> Tensor:
    """For each row the number of its token, (R,), given its place in the flat row map."""
    return order.div(max(k, 1), rounding_mode="floor")


def row_copies(x: Tensor, row_map: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``rows[row_map[t, j]] = x[t]``, (R, D), and likewise the weight of each row, (R,)."""
    order = inverse(row_map)
    rows = x.reshape(-1, x.shape[-1]).index_select(0, tokens(order, row_map.shape[-1]))
    return rows, None if weights is None else weights.reshape(-1).index_select(0, order)


def picked(row_values: Tensor | None, row_map: Tensor) -> Tensor | None:
    """``row_values[row_map]``, (..., k), or None."""
    if row_values is None:
        return None
    return row_values.index_select(0, row_map.reshape(-1)).view(row_map.shape)


def row_sums(
    rows: Tensor, row_map: Tensor, weights: Tensor | None, row_values: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """``y[t] = Σ_j w[t, j] rows[row_map[t, j]]``, (..., D), and ``row_values[row_map]``, (..., k).

    Args:
        rows: (R, D).
        row_map: (..., k).
        weights: (..., k), which are rounded to the rows' dtype; None: ones.
        row_values: (R,), or None.
    """
    *leading, k = row_map.shape
    shape, values = (*leading, rows.shape[1]), picked(row_values, row_map)
    if not rows.numel():
        return rows.new_zeros(shape), values
    # Reads each row once, adds in fp32 or wider and writes the sum alone; a gather and a sum would
    # write and read the rows once more.
    starts = torch.arange(0, row_map.numel(), k, device=row_map.device, dtype=row_map.dtype)
    w = None if weights is None else weights.reshape(-1).to(rows.dtype)
    flat = row_map.reshape(-1)
    y = torch.embedding_bag(rows.contiguous(), flat, starts, mode=0, per_sample_weights=w)
    return y[0].view(shape), values


def row_sums_traced(
    rows: Tensor, row_map: Tensor, weights: Tensor | None, row_values: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """A gather and a sum, of which a compiler makes one kernel."""
    terms = rows.index_select(0, row_map.reshape(-1)).view(*row_map.shape, rows.shape[1])
    terms = terms.to(torch.promote_types(rows.dtype, torch.float32))
    if weights is not None:
        terms = terms * weights.to(rows.dtype).unsqueeze(-1)
    return terms.sum(-2).to(rows.dtype), picked(row_values, row_map)


def weighted_grads(
    dy: Tensor, row_map: Tensor, weights: Tensor, rows: Tensor | None, want_drows: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of rows and weights of :func:`row_sums`; the second one if ``rows`` is given."""
    order = inverse(row_map)
    of_rows = dy.reshape(-1, dy.shape[-1]).index_select(0, tokens(order, row_map.shape[-1]))
    drows = dweights = None
    if rows is not None:
        wide = torch.promote_types(rows.dtype, torch.float32)
        products = torch.linalg.vecdot(of_rows.to(wide), rows.to(wide))
        dweights = picked(products.to(weights.dtype), row_map)
    if want_drows:
        w = weights.reshape(-1).to(dy.dtype).index_select(0, order)
        drows = of_rows * w.unsqueeze(-1)
    return drows, dweights
