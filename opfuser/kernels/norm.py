"""RMSNorm, LayerNorm and L2 normalisation of rows: forward, also of a residual sum, and backward.

Dimensions: R rows, D columns. All tensors but weight and bias ``(D,)`` and the statistics ``(R,)``
are ``(R, D)``; the elements of a row are contiguous, rows any distance apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import norm_plain as plain
from .norm_launch import MAX_COLS, backward, forward
from .operators import operator

__all__ = [
    "add_layer_norm_forward",
    "add_rms_norm_forward",
    "l2_norm_backward",
    "l2_norm_forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]


def _no_kernel(x: Tensor, residual: Tensor | None = None) -> bool:
    if residual is not None and residual.dtype == torch.float64:
        return True
    return not 0 < x.shape[1] <= MAX_COLS


def _rms_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    if _no_kernel(x):
        return plain.rms_norm_forward(x, weight, eps, zero_centered)
    y, _, _, rstd = forward(x, None, weight, None, eps, zero_centered, False)
    return y, rstd


rms_norm_forward = operator(
    "rms_norm_forward(Tensor x, Tensor weight, float eps, bool zero_centered) -> (Tensor, Tensor)",
    launch=_rms_forward,
    plain=plain.rms_norm_forward,
)


def _add_rms_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if _no_kernel(x, residual):
        return plain.add_rms_norm_forward(x, residual, weight, eps, zero_centered)
    y, total, _, rstd = forward(x, residual, weight, None, eps, zero_centered, False)
    return y, total, rstd


add_rms_norm_forward = operator(
    "add_rms_norm_forward(Tensor x, Tensor residual, Tensor weight, float eps, bool zero_centered)"
    " -> (Tensor, Tensor, Tensor)",
    launch=_add_rms_forward,
    plain=plain.add_rms_norm_forward,
)


def _rms_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None,
    zero_centered: bool,
    want_dx: bool,
    want_dw: bool,
    want_y: bool,
) -> list[Tensor]:
    wants = want_dx, want_dw, want_y
    if _no_kernel(x, residual_grad):
        return plain.rms_norm_backward(dy, x, weight, rstd, residual_grad, zero_centered, *wants)
    return backward(dy, x, weight, None, None, rstd, residual_grad, zero_centered, wants)


rms_norm_backward = operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Tensor? residual_grad,"
    " bool zero_centered, bool want_dx, bool want_dw, bool want_y) -> Tensor[]",
    launch=_rms_backward,
    plain=plain.rms_norm_backward,
)


def _layer_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if _no_kernel(x):
        return plain.layer_norm_forward(x, weight, bias, eps, zero_centered)
    y, _, mean, rstd = forward(x, None, weight, bias, eps, zero_centered, True)
    return y, mean, rstd


layer_norm_forward = operator(
    "layer_norm_forward(Tensor x, Tensor weight, Tensor? bias, float eps, bool zero_centered)"
    " -> (Tensor, Tensor, Tensor)",
    launch=_layer_forward,
    plain=plain.layer_norm_forward,
)


def _add_layer_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _no_kernel(x, residual):
        return plain.add_layer_norm_forward(x, residual, weight, bias, eps, zero_centered)
    y, total, mean, rstd = forward(x, residual, weight, bias, eps, zero_centered, True)
    return y, total, mean, rstd


add_layer_norm_forward = operator(
    "add_layer_norm_forward(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps,"
    " bool zero_centered) -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_add_layer_forward,
    plain=plain.add_layer_norm_forward,
)


def _layer_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None,
    eps: float,
    zero_centered: bool,
    want_dx: bool,
    want_dw: bool,
    want_y: bool,
) -> list[Tensor]:
    wants = want_dx, want_dw, want_y
    if _no_kernel(x, residual_grad):
        return plain.layer_norm_backward(
            dy, x, weight, bias, mean, rstd, residual_grad, eps, zero_centered, *wants
        )
    return backward(dy, x, weight, bias, mean, rstd, residual_grad, zero_centered, wants)


layer_norm_backward = operator(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor mean,"
    " Tensor rstd, Tensor? residual_grad, float eps, bool zero_centered, bool want_dx,"
    " bool want_dw, bool want_y) -> Tensor[]",
    launch=_layer_backward,
    plain=plain.layer_norm_backward,
)


def _l2_forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if _no_kernel(x):
        return plain.l2_norm_forward(x, eps)
    y, _, _, rnorm = forward(x, None, None, None, eps, False, False)
    return y, rnorm


l2_norm_forward = operator(
    "l2_norm_forward(Tensor x, float eps) -> (Tensor, Tensor)",
    launch=_l2_forward,
    plain=plain.l2_norm_forward,
)


def _l2_backward(dy: Tensor, x: Tensor, rnorm: Tensor) -> Tensor:
    if _no_kernel(x):
        return plain.l2_norm_backward(dy, x, rnorm)
    (dx,) = backward(dy, x, None, None, None, rnorm, None, False, (True, False, False))
    return dx


l2_norm_backward = operator(
    "l2_norm_backward(Tensor dy, Tensor x, Tensor rnorm) -> Tensor",
    launch=_l2_backward,
    plain=plain.l2_norm_backward,
)
