"""Rows in the order of their experts, and back: gathers in both passes, so that no sum is atomic.

Symbols: T tokens, k experts of each, R = T k rows, D features. A row map ``(..., k)`` holds for
each token and choice the row that belongs to it; as one dimension it is a permutation of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["counts", "gather_sum", "slots", "tokens"]


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


def slots(row_map: Tensor) -> Tensor:
    """For each row the place in the flat row map that holds it: the inverse permutation, (R,)."""
    flat = row_map.reshape(-1).long()
    numbers = torch.arange(flat.shape[0], device=flat.device)
    return torch.empty_like(flat).scatter_(0, flat, numbers)


def tokens(slots: Tensor, k: int) -> Tensor:
    """For each row the number of its token, (R,), given its place in the flat row map."""
    return slots.div(max(k, 1), rounding_mode="floor")


def gather_sum(rows: Tensor, row_map: Tensor, weights: Tensor | None = None) -> Tensor:
    """``y[t] = Σ_j w[t, j] rows[row_map[t, j]]``: (R, D) -> (..., D), of the rows' dtype.

    Args:
        rows: (R, D).
        row_map: (..., k).
        weights: (..., k), which are rounded to the rows' dtype; None: ones.
    """
    *leading, k = row_map.shape
    shape = *leading, rows.shape[1]
    if not rows.numel():
        return rows.new_zeros(shape)
    # Reads each row once, adds in fp32 or wider and writes the sum alone; a gather and a sum would
    # write and read the rows once more.
    starts = torch.arange(0, row_map.numel(), k, device=row_map.device, dtype=row_map.dtype)
    w = None if weights is None else weights.reshape(-1).to(rows.dtype)
    y = torch.embedding_bag(
        rows, row_map.reshape(-1), starts, False, 0, False, w, include_last_offset=False
    )
    return y[0].view(shape)
