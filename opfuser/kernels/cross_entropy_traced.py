"""Cross entropy for torch.compile to trace: all rows at once, nothing written in place.

The compiler makes of it what plain torch does in blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cross_entropy_plain import (
    LossGradient,
    RowLosses,
    Terms,
    classes_of_rows,
    losses_of_rows,
    scaled_rows,
)
from .scalar import cast, wide_dtype


def forward(x: Tensor, targets: Tensor, terms: Terms) -> RowLosses:
    """Losses and statistics of logits (rows, classes)."""
    valid, index = classes_of_rows(targets, terms.ignore_index)
    x = cast(x, wide_dtype(x.dtype))
    row_max = x.amax(1, keepdim=True)
    sum_exp = (x - row_max).exp().sum(1, keepdim=True)
    loss = torch.where(valid, losses_of_rows(x, row_max, sum_exp, index, terms), 0.0)
    return RowLosses(loss.squeeze(1), row_max.squeeze(1), sum_exp.squeeze(1))


def backward(
    x: Tensor,
    targets: Tensor,
    row_max: Tensor,
    sum_exp: Tensor,
    dloss: Tensor,
    count: Tensor | None,
    terms: Terms,
) -> Tensor:
    """Gradient of the logits, contiguous; arguments as of the twin in plain torch."""
    _, smoothing, z_loss = terms
    index, scale = scaled_rows(targets, dloss, count, terms)
    row_max, sum_exp = row_max.unsqueeze(1), sum_exp.unsqueeze(1)
    p = (x - row_max).exp() / sum_exp
    p_scale = scale
    if z_loss:
        p_scale = scale * (1 + 2 * z_loss * (row_max + sum_exp.log()))
    # A scatter would make the compiler write dx twice.
    hit = torch.arange(x.shape[1], device=x.device) == index
    target = hit.to(p.dtype) * (1 - smoothing) + smoothing / x.shape[1]
    return cast(p * p_scale - target * scale, x.dtype).contiguous()


def gradient(x: Tensor, targets: Tensor, count: Tensor | None, terms: Terms) -> LossGradient:
    """Losses, and their gradient for 1, or 1 / count."""
    losses, row_max, sum_exp = forward(x, targets, terms)
    one = losses.new_ones(())
    return LossGradient(losses, backward(x, targets, row_max, sum_exp, one, count, terms))


def scaled(
    x: Tensor, factor: Tensor, count: Tensor | None, dtype: torch.dtype, in_place: bool
) -> Tensor:
    """``x factor / count`` in ``dtype``."""
    if count is not None:
        factor = factor / count.clamp_min(1)  # where no row counts, x is 0
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * factor).to(dtype)
