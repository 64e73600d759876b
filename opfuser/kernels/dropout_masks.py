"""Masks of dropout that are drawn once and applied where they are needed."""

from __future__ import annotations

import torch
from torch import Tensor

from .philox import draw_seed
from .pointwise import draws_seeds, dropout
from .pointwise_plain import rescale


def draw_mask(x: Tensor, p: float) -> Tensor:
    """A mask for a tensor like x: a seed, int64, where kernels run, else a bool for each entry."""
    if draws_seeds(x):
        return draw_seed(x)
    return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p)


def masked(t: Tensor, mask: Tensor, p: float) -> Tensor:
    """``t / (1 - p)`` where the mask keeps it, else 0: dropout, and its gradient for t = dy."""
    if mask.dtype == torch.int64:
        return dropout(t, mask, p)
    kept: Tensor = torch.ops.aten.native_dropout_backward(t, mask, rescale(p))
    return kept
