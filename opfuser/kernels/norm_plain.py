"""The norms of rows in plain torch: the path of a CPU, and of what no kernel takes.

Dimensions: R rows, D columns. Statistics and arithmetic are in fp32, in fp64 for fp64; y, total and
dx have the dtype of x, dw and db that of the parameter. With ``zero_centered``, the scale is
``weight + 1``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .scalar import cast, reuse, wide_dtype

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


def rms_norm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """``y = x rstd w`` and ``rstd = 1 / sqrt(mean(x²) + eps)``."""
    x = x.contiguous()
    wide = cast(x, wide_dtype(x.dtype))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rstd = norm.square_().mul_(1 / x.shape[1]).add_(eps).rsqrt_()
    # What was widened is ours to overwrite; x is not.
    y = wide * rstd if wide is x else wide.mul_(rstd)
    y.mul_(_scale(weight, wide.dtype, zero_centered))
    return cast(y, x.dtype), rstd.view(-1)


def add_rms_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Also, as second result, ``total = x + residual``, of which y is the norm."""
    total = _sum(x, residual)
    y, rstd = rms_norm_forward(total, weight, eps, zero_centered)
    return y, total, rstd


def rms_norm_backward(
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
    """Returns dx, dw and y, those that are wanted.

    ``dx = residual_grad + rstd (dy w - x̂ mean(dy w x̂))``, ``dw = Σ dy x̂`` and ``y = x̂ w`` with
    ``x̂ = x rstd``. dx has the dtype to which torch promotes those of x and residual_grad; y has the
    bits that forward gave it.
    """
    if not x.shape[0]:
        return _of_no_rows(x, residual_grad, want_dx, [weight] * want_dw, want_y)
    scale = _scale(weight, rstd.dtype, zero_centered)
    wide, dy = cast(x, rstd.dtype).contiguous(), cast(dy, rstd.dtype).contiguous()
    rstd = rstd.view(-1, 1)
    dx = dw = y = buffer = None
    if want_dw:
        # Not by the fast weight gradient of layer norm: it adds one row after the other, and is ten
        # times less accurate for a few thousand rows.
        buffer = dy * wide
        dw = cast(buffer.mul_(rstd).sum(0), weight.dtype)
    if want_dx:
        # Into memory that is there: for what is new, a CPU has to fetch pages.
        buffer = torch.mul(dy, scale, out=_reuse(buffer))
        # dx = rstd (dh - x rstd² mean(dh x)) with dh = dy w is the gradient of weight normalisation
        # g x / n with norms n = √D / rstd and gains g = √D, for which ATen has one pass: about half
        # the time of writing the formula out.
        gain = torch.full_like(rstd, math.sqrt(x.shape[1]))
        dx, _ = torch.ops.aten._weight_norm_interface_backward.default(
            buffer, wide, gain, gain / rstd, 0
        )
        dx = _with_residual(dx, residual_grad, x.dtype)
    if want_y:
        y = cast(torch.mul(wide, rstd, out=_reuse(buffer)).mul_(scale), x.dtype)
    return [result for result in (dx, dw, y) if result is not None]


def layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``y = (x - mean) rstd w + b``, mean, and ``rstd = 1 / sqrt(var(x) + eps)``."""
    y, mean, rstd = torch.native_layer_norm(
        x,
        (x.shape[1],),
        _scale(weight, _operand_dtype(x), zero_centered),
        None if bias is None else cast(bias, _operand_dtype(x)),
        eps,
    )
    # Autocast runs it in fp32 on a GPU.
    return cast(y, x.dtype), mean.view(-1), rstd.view(-1)


def add_layer_norm_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Also, as second result, ``total = x + residual``, of which y is the norm."""
    total = _sum(x, residual)
    y, mean, rstd = layer_norm_forward(total, weight, bias, eps, zero_centered)
    return y, total, mean, rstd


def layer_norm_backward(
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
    """Returns dx, dw, db and y, those that are wanted; db together with dw, where there is a bias.

    ``dx = residual_grad + rstd (dy w - mean(dy w) - x̂ mean(dy w x̂))``, ``dw = Σ dy x̂``,
    ``db = Σ dy`` and ``y = x̂ w + b`` with ``x̂ = (x - mean) rstd``. dx has the dtype to which torch
    promotes those of x and residual_grad; y has the bits that forward gave it.
    """
    parameters = [p for p in (weight, bias) if p is not None and want_dw]
    if not x.shape[0]:
        return _of_no_rows(x, residual_grad, want_dx, parameters, want_y)
    # The bias is read for nothing but its dtype.
    dx, *grads = _layer_gradients(
        dy,
        x,
        mean.view(-1, 1),
        rstd.view(-1, 1),
        _scale(weight, _operand_dtype(x), zero_centered),
        (want_dx, want_dw, want_dw and bias is not None),
    )
    results = [] if dx is None else [_with_residual(dx, residual_grad, x.dtype)]
    results += [cast(grad, p.dtype) for grad, p in zip(grads, parameters) if grad is not None]
    if want_y:
        results.append(layer_norm_forward(x, weight, bias, eps, zero_centered)[0])
    return results


# Elements whose fp32 copies a core's cache (1 to 2 MiB) holds.
_BLOCK = 2**17


def _layer_gradients(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight and bias, those that are needed.

    On a CPU ATen sums those of the parameters in the dtype of x: for 4096 rows of bf16 they are off
    by a third. So it is given copies in fp32, block by block so that they stay in the cache, which
    takes 1.1 to 1.5 times as long.
    """
    backward, shape = torch.ops.aten.native_layer_norm_backward.default, (x.shape[1],)
    in_wide = x.is_cpu and x.dtype != rstd.dtype and any(needs[1:])
    block = x.shape[0]  # a tracer would take len(x) to be fixed
    if in_wide and not torch.compiler.is_compiling():
        block = max(1, _BLOCK * torch.get_num_threads() // x.shape[1])
    if block >= x.shape[0]:
        dtype = rstd.dtype if in_wide else x.dtype
        dy, x = cast(dy, dtype), cast(x, dtype)
        results: tuple[Tensor | None, ...]
        results = backward(dy, x, shape, mean, rstd, scale, scale, needs)
        return results
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    sums = []
    for start in range(0, x.shape[0], block):
        rows = slice(start, start + block)
        wide = dy[rows].to(rstd.dtype), x[rows].to(rstd.dtype)
        part, dw, db = backward(*wide, shape, mean[rows], rstd[rows], scale, scale, needs)
        sums.append((dw, db))
        if dx is not None:
            dx[rows] = part
    dws, dbs = zip(*sums)
    return dx, *(None if parts[0] is None else torch.stack(parts).sum(0) for parts in (dws, dbs))


def l2_norm_forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``y = x rnorm`` and ``rnorm = 1 / sqrt(Σ x² + eps)``."""
    x = x.contiguous()
    wide = cast(x, wide_dtype(x.dtype))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rnorm = norm.square_().add_(eps).rsqrt_()
    y = wide * rnorm if wide is x else wide.mul_(rnorm)
    return cast(y, x.dtype), rnorm.view(-1)


def l2_norm_backward(dy: Tensor, x: Tensor, rnorm: Tensor) -> Tensor:
    """``dx = rnorm (dy - y Σ dy y)`` with ``y = x rnorm``."""
    if not x.numel():
        return torch.empty_like(x)
    wide = cast(x, rnorm.dtype).contiguous()
    dy = cast(dy, rnorm.dtype).contiguous()
    rnorm = rnorm.view(-1, 1)
    # That is weight normalisation's gradient, for which ATen has one pass.
    dx, _ = torch.ops.aten._weight_norm_interface_backward.default(
        dy, wide, torch.ones_like(rnorm), rnorm.reciprocal(), 0
    )
    return cast(dx, x.dtype)


def _reuse(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else reuse(buffer)


def _scale(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    scale = cast(weight, dtype)
    return scale + 1 if zero_centered else scale


def _operand_dtype(x: Tensor) -> torch.dtype:
    """The dtype of parameters that layer norm's kernel for ``x`` takes."""
    # On a CPU the statistics come out in this dtype; elsewhere it must be that of x.
    return wide_dtype(x.dtype) if x.is_cpu else x.dtype


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    return cast(x + residual, x.dtype).contiguous()


def _with_residual(dx: Tensor, residual_grad: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``dx``, which is ours to overwrite, plus the gradient of the residual."""
    if residual_grad is None:
        return cast(dx, dtype)
    if torch.promote_types(dx.dtype, residual_grad.dtype) == dx.dtype:
        dx.add_(residual_grad)
    else:
        dx = dx + residual_grad
    return cast(dx, torch.promote_types(dtype, residual_grad.dtype)).contiguous()


def _of_no_rows(
    x: Tensor,
    residual_grad: Tensor | None,
    want_dx: bool,
    parameters: list[Tensor],
    want_y: bool,
) -> list[Tensor]:
    """Results of a backward without rows."""
    results = [_with_residual(torch.empty_like(x), residual_grad, x.dtype)] if want_dx else []
    results += [torch.zeros_like(p) for p in parameters]
    return [*results, torch.empty_like(x)] if want_y else results
