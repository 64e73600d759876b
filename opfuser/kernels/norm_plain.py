"""The norms of rows in plain torch: the path of a CPU, and of what no kernel takes.

Dimensions as in ``norm``. Statistics and arithmetic are in fp32, in fp64 for fp64; y, total and dx
have the dtype of x, dw and db that of the parameter. With ``zero_centered``, the scale is
``weight + 1``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .cpu_blocks import at_once
from .scalar import cast, wide_dtype


class NormForward(NamedTuple):
    """A norm and what was computed on the way; None is what was not asked for.

    Attributes:
        y: (…, D), the norm.
        total: (…, D), ``x + residual``, of which y is the norm.
        mean: (…), of the rows.
        rstd: (…), one over the root of the mean square, of the variance or of the sum of squares.
    """

    y: Tensor
    total: Tensor | None
    mean: Tensor | None
    rstd: Tensor


class NormGrads(NamedTuple):
    """Gradients of a norm, and its output recomputed; None is what was not asked for.

    Attributes:
        dx: (…, D), that of the residual added.
        dw: (D,).
        db: (D,).
        y: (…, D), with the bits that forward gave it.
    """

    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None
    y: Tensor | None


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    with_mean: bool,
) -> NormForward:
    """``y = x̂ w + b`` with ``x̂ = (x - mean) rstd``, ``rstd = 1 / sqrt(mean((x - mean)²) + eps)``.

    Where there is a residual, ``x + residual`` stands for x. Without ``with_mean``, which is
    RMSNorm, mean is 0 and there is no b. L2 normalization is that without a weight: w is 1, and
    rstd = ``1 / sqrt(Σ x² + eps)``.
    """
    total = None
    if residual is not None:
        x = total = cast(x + residual, x.dtype).contiguous()
    if with_mean:
        y, mean, rstd = _layer_norm(x, weight, bias, eps, zero_centered)
        return NormForward(y, total, mean.squeeze(-1), rstd.squeeze(-1))
    x = x.contiguous()
    wide = cast(x, wide_dtype(x.dtype))
    squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    if weight is not None:
        squares.mul_(1 / x.shape[-1])
    rstd = squares.add_(eps).rsqrt_()
    # What was widened is ours to overwrite; x is not.
    y = wide * rstd if wide is x else wide.mul_(rstd)
    if weight is not None:
        y.mul_(_scale(weight, wide.dtype, zero_centered))
    return NormForward(cast(y, x.dtype), total, None, rstd.squeeze(-1))


def norm_backward(
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
    y_weight: Tensor | None = None,
    traced: bool = False,
) -> NormGrads:
    """Gradients, and the output again; ``want_dw`` asks for those of weight and bias together.

    ``dx = residual_grad + rstd (dy w - mean(dy w) - x̂ mean(dy w x̂))``, ``dw = Σ dy x̂``,
    ``db = Σ dy`` and ``y = x̂ w + b`` with ``x̂ = (x - mean) rstd``. Where mean is None, so is bias;
    x̂ is ``x rstd`` and the term ``mean(dy w)`` is left out. Where weight is None too, w is 1 and
    the sum ``Σ dy x̂`` stands for its mean. dx has the dtype to which torch promotes those of x and
    residual_grad. ``y_weight`` is the w of y, and None that of dx. ``traced`` is by torch.compile.
    """
    if not x.numel():
        return NormGrads(
            _add_residual(torch.empty_like(x), residual_grad, x.dtype) if want_dx else None,
            torch.zeros_like(weight) if want_dw and weight is not None else None,
            torch.zeros_like(bias) if want_dw and bias is not None else None,
            torch.empty_like(x) if want_y else None,
        )
    if mean is None:
        wants = want_dx, want_dw, want_y
        weights = weight, y_weight
        return _rms_backward(dy, x, weights, rstd, residual_grad, zero_centered, wants, traced)
    assert weight is not None
    w = weight if y_weight is None else y_weight
    needs = want_dx, want_dw, want_dw and bias is not None
    scale = _scale(weight, _operand_dtype(x), zero_centered)
    dx, dw, db = _layer_gradients(dy, x, mean.unsqueeze(-1), rstd.unsqueeze(-1), scale, needs)
    if dx is not None and (residual_grad is not None or dx.dtype != x.dtype):
        dx = _add_residual(dx, residual_grad, x.dtype)
    return NormGrads(
        dx,
        None if dw is None else cast(dw, weight.dtype),
        None if db is None or bias is None else cast(db, bias.dtype),
        _layer_norm(x, w, bias, eps, zero_centered)[0] if want_y else None,
    )


def _rms_backward(
    dy: Tensor,
    x: Tensor,
    weights: tuple[Tensor | None, Tensor | None],
    rstd: Tensor,
    residual_grad: Tensor | None,
    zero_centered: bool,
    wants: tuple[bool, bool, bool],
    traced: bool,
) -> NormGrads:
    (want_dx, want_dw, want_y), (weight, y_weight) = wants, weights
    scale = None if weight is None else _scale(weight, rstd.dtype, zero_centered)
    shape, dtype, cols = x.shape, x.dtype, x.shape[-1]
    if x.dim() != 2:  # ATen's backward of weight normalization takes two
        x, dy, rstd = x.reshape(-1, cols), dy.reshape(-1, cols), rstd.reshape(-1)
    rstd = rstd.unsqueeze(1)
    wide, dy = cast(x, rstd.dtype).contiguous(), cast(dy, rstd.dtype).contiguous()
    dx = dw = y = buffer = None
    if want_dw and weight is not None:
        # Not by the fast weight gradient of layer norm: it adds one row after the other, and is ten
        # times less accurate for a few thousand rows.
        buffer = dy * wide
        dw = cast(buffer.mul_(rstd).sum(0), weight.dtype)
    if want_dx:
        dh = dy
        if scale is not None:
            # Into memory that is there: for what is new, a CPU has to fetch pages.
            dh = buffer = torch.mul(dy, scale, out=None if traced else buffer)
        # dx = rstd (dh - x rstd² mean(dh x)) is the gradient of weight normalization g x / n with
        # norms n = g / rstd and gains g = √D, or 1 where it is the sum and not the mean. ATen has
        # one pass for that: about half the time of writing the formula out.
        if traced:  # by a compiler that makes one pass of the formula
            total = (dh * wide).sum(1, keepdim=True)
            share = total if scale is None else total / cols
            dx = rstd * (dh - wide * (rstd * rstd * share))
        else:
            gain = torch.full_like(rstd, 1.0 if scale is None else math.sqrt(cols))
            dx, _ = torch.ops.aten._weight_norm_interface_backward.default(
                dh, wide, gain, gain / rstd, 0
            )
        dx = dx if len(shape) == 2 else dx.view(*shape)
        dx = _add_residual(dx, residual_grad, dtype)
    if want_y:
        xhat = torch.mul(wide, rstd, out=None if traced else buffer)
        if y_weight is not None:
            scale = _scale(y_weight, rstd.dtype, zero_centered)
        y = cast(xhat if scale is None else xhat.mul_(scale), dtype)
        y = y if len(shape) == 2 else y.view(*shape)
    return NormGrads(dx, dw, None, y)


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd, the statistics as columns."""
    assert weight is not None
    dtype = _operand_dtype(x)
    scale = _scale(weight, dtype, zero_centered)
    shift = bias if bias is None or bias.dtype == dtype else bias.to(dtype)
    y, mean, rstd = torch.native_layer_norm(x, (x.shape[-1],), scale, shift, eps)
    # Autocast runs it in fp32 on a GPU.
    return y if y.dtype == x.dtype else y.to(x.dtype), mean, rstd


# Elements whose fp32 copies a core's cache (1 to 2 MiB) holds.
_BLOCK = 2**17


def _layer_gradients(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias, those that are needed.

    On a CPU ATen sums those of the parameters in the dtype of x: for 4096 rows of bf16 they are off
    by a third. So it is given copies in fp32, block by block so that they stay in the cache, which
    takes 1.1 to 1.5 times as long.
    """
    backward, cols = torch.ops.aten.native_layer_norm_backward.default, x.shape[-1]
    in_wide = x.dtype != rstd.dtype and x.is_cpu and any(needs[1:])
    block = 0  # rows; 0 for all at once, as while a tracer would take their number to be fixed
    if in_wide and not at_once(x, _BLOCK):
        block = max(1, _BLOCK * torch.get_num_threads() // cols)
    if not block or block * cols >= x.numel():
        dtype = rstd.dtype if in_wide else x.dtype
        dy, x = cast(dy, dtype), cast(x, dtype)
        # The bias is read for nothing but its dtype.
        dx, dw, db = backward(dy, x, (cols,), mean, rstd, scale, scale, needs)
        return dx, dw, db
    shape = x.shape
    x, dy = x.reshape(-1, cols), dy.reshape(-1, cols)
    mean, rstd = mean.reshape(-1, 1), rstd.reshape(-1, 1)
    dx = x.new_empty(x.shape) if needs[0] else None
    sums = []
    for start in range(0, x.shape[0], block):
        rows = slice(start, start + block)
        wide = dy[rows].to(rstd.dtype), x[rows].to(rstd.dtype)
        part, dw, db = backward(*wide, (cols,), mean[rows], rstd[rows], scale, scale, needs)
        sums.append((dw, db))
        if dx is not None:
            dx[rows] = part
    dws, dbs = zip(*sums)
    dw, db = (None if parts[0] is None else torch.stack(parts).sum(0) for parts in (dws, dbs))
    return None if dx is None else dx.view(shape), dw, db


def _scale(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    scale = weight if weight.dtype == dtype else weight.to(dtype)
    return scale + 1 if zero_centered else scale


def _operand_dtype(x: Tensor) -> torch.dtype:
    """The dtype of parameters that layer norm's kernel for ``x`` takes."""
    # On a CPU the statistics come out in this dtype; elsewhere it must be that of x.
    return wide_dtype(x.dtype) if x.is_cpu else x.dtype


def _add_residual(dx: Tensor, residual_grad: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``dx``, which is ours to overwrite, plus the gradient of the residual."""
    if residual_grad is None:
        return cast(dx, dtype)
    if torch.promote_types(dx.dtype, residual_grad.dtype) == dx.dtype:
        dx.add_(residual_grad)
    else:
        dx = dx + residual_grad
    return cast(dx, torch.promote_types(dtype, residual_grad.dtype)).contiguous()
