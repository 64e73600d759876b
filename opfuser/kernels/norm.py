"""RMSNorm, LayerNorm and L2 normalisation of rows: forward, also of a residual sum, and backward.

Dimensions: R rows, D columns. All tensors but weight and bias ``(D,)`` and the statistics ``(…)``
are ``(…, D)``, of one shape; the elements of a row are side by side. Which of the three norms it is
follows from the arguments: LayerNorm has a mean, RMSNorm none, and L2 normalisation no weight
either. Formulas: ``norm_plain``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import norm_plain as plain
from .norm_launch import MAX_COLS, backward, forward
from .norm_plain import NormForward, NormGrads
from .operators import operator

__all__ = ["NormForward", "NormGrads", "norm_backward", "norm_forward"]


def _has_kernel(x: Tensor, residual: Tensor | None) -> bool:
    return 0 < x.shape[-1] <= MAX_COLS and (residual is None or residual.dtype != torch.float64)


def _forward_wants(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    with_mean: bool,
) -> tuple[bool, ...]:
    return True, residual is not None, with_mean, True


norm_forward = operator(
    "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps,"
    " bool zero_centered, bool with_mean) -> Tensor[]",
    launch=forward,
    plain=plain.norm_forward,
    accepts=lambda x, residual, *_: _has_kernel(x, residual),
    results=NormForward,
    wanted=_forward_wants,
)


def _backward_accepts(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    residual_grad: Tensor | None,
    *options: object,
) -> bool:
    return _has_kernel(x, residual_grad)


def _backward_wants(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    residual_grad: Tensor | None,
    eps: float,
    zero_centered: bool,
    want_dx: bool,
    want_dw: bool,
    want_y: bool,
) -> tuple[bool, ...]:
    return want_dx, want_dw and weight is not None, want_dw and bias is not None, want_y


norm_backward = operator(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd,"
    " Tensor? residual_grad, float eps, bool zero_centered, bool want_dx, bool want_dw,"
    " bool want_y) -> Tensor[]",
    launch=backward,
    plain=plain.norm_backward,
    accepts=_backward_accepts,
    results=NormGrads,
    wanted=_backward_wants,
)
