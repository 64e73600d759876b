"""RMSNorm, LayerNorm and L2 normalization of rows: forward, also of a residual sum, and backward.

Dimensions: R rows, D columns. All tensors but weight and bias ``(D,)`` and the statistics ``(…)``
are ``(…, D)``, of one shape; the elements of a row are side by side. Which of the three norms it is
follows from the arguments: LayerNorm has a mean, RMSNorm none, and L2 normalization no weight
either. Formulas: ``norm_plain``.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import norm_plain as plain
from .choice import kernel_or_plain
from .norm_launch import MAX_COLS, backward, forward
from .norm_plain import NormForward, NormGrads

__all__ = ["NormForward", "NormGrads", "norm_backward", "norm_forward"]


def _has_kernel(x: Tensor, residual: Tensor | None) -> bool:
    return 0 < x.shape[-1] <= MAX_COLS and (residual is None or residual.dtype != torch.float64)


norm_forward = kernel_or_plain(
    launch=forward,
    plain=plain.norm_forward,
    accepts=lambda x, residual, *_: _has_kernel(x, residual),
)
norm_backward = kernel_or_plain(
    launch=backward,
    plain=plain.norm_backward,
    traced=functools.partial(plain.norm_backward, traced=True),
    accepts=lambda dy, x, weight, bias, mean, rstd, residual_grad, *_: _has_kernel(
        x, residual_grad
    ),
)
