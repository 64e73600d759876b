"""Element-wise activations in plain torch. Dimensions as in ``opfuser.kernels.activation``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .cpu_blocks import at_once, row_blocks
from .scalar import FunctionSpec, ScalarFunction, cast, wide_dtype
from .tiling import empty_contiguous


class ActivationGrads(NamedTuple):
    """What backward returns, None where it was not wanted.

    Attributes:
        dx: ``dy f'(x + b)``, in the dtype of x.
        db: the sum of dx over rows, in the dtype of the bias, or of x where the bias is not given
            since x contains it. The sum is in fp32 or wider.
        y: ``f(x + b)``, in the dtype of x.
    """

    dx: Tensor | None
    db: Tensor | None
    y: Tensor | None


def forward_plain(x: Tensor, spec: FunctionSpec, bias: Tensor | None) -> Tensor:
    """``y = f(x + b)`` in the dtype of x; no bias counts as zero."""
    f = spec.function
    if bias is None:
        return cast(f.value(x), x.dtype)  # autocast runs some in fp32
    x, wide = x.contiguous(), wide_dtype(x.dtype)
    if at_once(x):
        return cast(f.value(cast(x, wide) + cast(bias, wide)), x.dtype)
    b, y = cast(bias, wide), empty_contiguous(x)
    for x_rows, y_rows in row_blocks(x, y):
        z = cast(x_rows, wide) + b
        if z.dtype == y.dtype:
            f.value(z, out=y_rows)
        else:
            y_rows.copy_(f.value(z))
    return y


def dx_plain(dy: Tensor, x: Tensor, spec: FunctionSpec) -> Tensor:
    """``dx = dy f'(x)``."""
    return spec.function.backward(cast(dy, x.dtype), x)


def backward_plain(
    dy: Tensor,
    x: Tensor,
    spec: FunctionSpec,
    bias: Tensor | None,
    want_dx: bool,
    want_db: bool,
    want_y: bool,
) -> ActivationGrads:
    """Gradients and output of ``f(x + b)``, as far as they are wanted."""
    f = spec.function
    if bias is not None:
        return _backward_with_bias(f, dy, x.contiguous(), bias, want_dx, want_db, want_y)
    dx = db = y = None
    if want_dx or want_db:
        dx = f.backward(cast(dy, x.dtype), x)
        if want_db:
            db = _sum(dx)
    if want_y:
        y = cast(f.value(x), x.dtype)
    return ActivationGrads(dx if want_dx else None, None if db is None else cast(db, x.dtype), y)


def _sum(dx: Tensor) -> Tensor:
    """Over rows, in memory of its own; ATen rounds only the final sum."""
    ndim = dx.dim()
    if ndim < 2:
        return dx.clone()
    # Torch takes one dimension as an int a quarter of a microsecond faster than as a tuple.
    return dx.sum(0 if ndim == 2 else tuple(range(ndim - 1)))


def _backward_with_bias(
    f: ScalarFunction,
    dy: Tensor,
    x: Tensor,
    bias: Tensor,
    want_dx: bool,
    want_db: bool,
    want_y: bool,
) -> ActivationGrads:
    wide = wide_dtype(x.dtype)
    b = cast(bias, wide)
    if x.dtype == wide and at_once(x):
        z = x.contiguous() + b
        dz = f.backward(cast(dy, wide).contiguous(), z) if want_dx or want_db else None
        db = cast(_sum(dz), bias.dtype) if want_db and dz is not None else None
        return ActivationGrads(dz if want_dx else None, db, f.value(z) if want_y else None)
    dx, y = (empty_contiguous(x) if wanted else None for wanted in (want_dx, want_y))
    sums = []
    for x_rows, dy_rows, dx_rows, y_rows in row_blocks(x, dy, dx, y):
        z = cast(x_rows, wide) + b
        if want_dx or want_db:
            dz = f.backward(cast(dy_rows, wide), z)
            if want_db:
                sums.append(dz.sum(0))
            if dx_rows is not None:
                dx_rows.copy_(dz)
        if y_rows is not None:
            y_rows.copy_(f.value(z))
    db = cast(torch.stack(sums).sum(0), bias.dtype) if want_db else None
    return ActivationGrads(dx, db, y)
