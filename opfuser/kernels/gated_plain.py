"""Gated products of scalar functions in plain torch. Dimensions as in ``opfuser.kernels.gated``.

fp16 and bf16 are converted to fp32, computed there and rounded once, in blocks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..runtime.tracing import columns, each_column, joined_columns
from .cpu_blocks import at_once, row_blocks
from .scalar import ScalarFunction, cast, wide_dtype


@dataclass(frozen=True)
class Glu:
    """``gate(a) up(b)`` of gates a and linear units b packed into ``x (…, 2F)``.

    They are the two halves of the last dimension; or, with ``interleave``, alternating blocks of
    that many columns. No ``up`` stands for the identity.
    """

    gate: ScalarFunction
    up: ScalarFunction | None = None
    interleave: int | None = None

    def reference(self, x: Tensor) -> Tensor:
        """The product in plain differentiable torch."""
        a, b = self.split(x)
        y = self.gate.reference(a) * (b if self.up is None else self.up.reference(b))
        return y if self.interleave is None else y.flatten(-2)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a and b: ``(…, F)``, or ``(…, F / interleave, interleave)``."""
        if self.interleave is None:
            a, b = columns(x, [x.shape[-1] // 2] * 2)
            return a, b
        blocks = x.unflatten(-1, (-1, 2, self.interleave))
        return blocks.select(-2, 0), blocks.select(-2, 1)


_Function = Glu | ScalarFunction


class ProductSpec(NamedTuple):
    """A product as launchers and plain torch take it: the latter call it, the others name it.

    Attributes:
        function: the product; of a scalar function alone, without linear units.
        gate: name of the gates' function, as in ``FunctionSpec``.
        gate_parameters: its constants.
        up: name of the linear units' function, None if there are none.
        up_parameters: its constants.
        interleave: columns per block, 0 for the two halves of the last dimension.
    """

    function: _Function
    gate: str
    gate_parameters: tuple[float, ...]
    up: str | None
    up_parameters: tuple[float, ...]
    interleave: int


# All but the function: what launches depend on.
Product: TypeAlias = tuple[str, tuple[float, ...], str | None, tuple[float, ...], int]


def product_spec(function: _Function) -> ProductSpec:
    """How launchers and plain torch take it. Worth keeping: it takes some microseconds."""
    if isinstance(function, ScalarFunction):
        return ProductSpec(function, function.name, function.parameters, None, (), 0)
    gate, up = function.gate, function.up
    name, parameters = ("identity", ()) if up is None else (up.name, up.parameters)
    interleave = function.interleave or 0
    return ProductSpec(function, gate.name, gate.parameters, name, parameters, interleave)


class GatedGrads(NamedTuple):
    """What backward returns, None where it was not wanted.

    Attributes:
        dx: gradient of x, in its dtype.
        dscales: that of the scales, if there are any, in fp32 or wider, and so is its sum.
        y: the output, in the dtype of x.
    """

    dx: Tensor | None
    dscales: Tensor | None
    y: Tensor | None


def _operands(
    f: _Function, x: Tensor
) -> tuple[ScalarFunction, ScalarFunction | None, Tensor, Tensor | None]:
    """The two functions and what they are applied to, ``(…, F)``; no b where all are gates."""
    if isinstance(f, ScalarFunction):
        return f, None, x, None
    a, b = f.split(x)
    return f.gate, f.up, *((a, b) if f.interleave is None else (a.flatten(-2), b.flatten(-2)))


def _value(f: _Function, x: Tensor, s: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``gate(a) up(b) s`` of x in fp32 or fp64, in memory of its own unless ``out`` is given."""
    gate, up, a, b = _operands(f, x)
    direct = out is not None and out.dtype == x.dtype
    y = gate.value(a, out=out if direct else None)
    if b is not None:
        y.mul_(b if up is None else up.value(b))
    if s is not None:
        y.mul_(s)
    return y if direct or out is None else out.copy_(y)


def _gradients(
    f: _Function, g: Tensor, x: Tensor, want_h: bool, dx: Tensor | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """Gradients of a and b from g, that of ``h = gate(a) up(b)``; and h. All in fp32 or fp64.

    The last steps write to the halves of ``dx``, which may be x.
    """
    gate, up, a, b = _operands(f, x)
    v, backward = gate.vjp(a)
    if b is None:
        return [backward(g, out=dx)], v
    assert isinstance(f, Glu)
    da_out, db_out = (None, None) if dx is None else f.split(dx)
    u, up_backward = (b, None) if up is None else up.vjp(b)
    h = v * u if want_h else None
    da = backward(g * u, out=da_out)
    if up_backward is None:
        return [da, torch.mul(v, g, out=db_out)], h
    return [da, up_backward(v.mul_(g), out=db_out)], h


def _wide(x: Tensor) -> Tensor:
    return each_column(lambda t: cast(t, wide_dtype(t.dtype)), x)


def forward_plain(x: Tensor, spec: ProductSpec, scales: Tensor | None) -> Tensor:
    """``y = gate(a) up(b) s``, contiguous, in the dtype of x; no scales count as one."""
    f, wide = spec.function, wide_dtype(x.dtype)
    x, s = x.contiguous(), None if scales is None else cast(scales, wide).unsqueeze(-1)
    if at_once(x):
        return cast(_value(f, _wide(x), s), x.dtype)
    *leading, cols = x.shape
    y = x.new_empty(*leading, cols // 2 if isinstance(f, Glu) else cols)
    for x_rows, s_rows, y_rows in row_blocks(x, s, y):
        _value(f, cast(x_rows, wide), s_rows, y_rows)
    return y


def backward_plain(
    dy: Tensor,
    x: Tensor,
    spec: ProductSpec,
    scales: Tensor | None,
    want_dx: bool,
    want_y: bool,
    want_dscales: bool = True,
    over_x: bool = False,
) -> GatedGrads:
    """Gradients of x and of the scales, and the output, as far as they are wanted.

    With ``over_x``, dx takes the memory of x if that is contiguous.
    """
    wide = wide_dtype(x.dtype)
    x, s = x.contiguous(), None if scales is None else cast(scales, wide).unsqueeze(-1)
    dx = dscales = y = None
    if want_dx:
        dx = x if over_x else torch.empty_like(x)
    if want_dscales and s is not None:
        dscales = x.new_empty((*dy.shape[:-1], 1), dtype=wide)
    if want_y:
        y = x.new_empty(dy.shape)
    for rows in row_blocks(x, dy, s, dx, dscales, y):
        _backward_rows(spec.function, *rows)
    return GatedGrads(dx, None if dscales is None else dscales.squeeze(-1), y)


def _backward_rows(
    f: _Function,
    x: Tensor,
    dy: Tensor,
    s: Tensor | None,
    dx: Tensor | None,
    dscales: Tensor | None,
    y: Tensor | None,
) -> None:
    """Writes the results for a block of rows, those that are not None."""
    wide = wide_dtype(x.dtype)
    z, dy = cast(x, wide), cast(dy, wide)
    g = dy if s is None else dy * s
    h: Tensor | None
    want_h = dscales is not None or y is not None
    if dx is None:
        h = _value(f, z, None)
    elif isinstance(f, Glu) and f.interleave is not None:
        grads, h = _gradients(f, g, z, want_h)
        for part, grad in zip(f.split(dx), grads):
            part.copy_(grad.view(part.shape))
    else:
        into = dx if dx.dtype == wide else z  # over the copy in fp32
        _, h = _gradients(f, g, z, want_h, into)
        if into is not dx:
            dx.copy_(into)
    if dscales is not None:
        assert h is not None
        torch.sum(h * dy, -1, keepdim=True, out=dscales)
    if y is not None:
        assert h is not None
        y.copy_(h if s is None else h.mul_(s))


def backward_traced(
    dy: Tensor,
    x: Tensor,
    spec: ProductSpec,
    scales: Tensor | None,
    want_dx: bool,
    want_y: bool,
    want_dscales: bool = True,
    over_x: bool = False,
) -> GatedGrads:
    """As :func:`backward_plain`, for torch.compile to trace, which fuses it as it likes.

    dx never takes the memory of x. Nor is its layout asked for: it is unknown where data decide the
    number of rows.
    """
    f, wide = spec.function, wide_dtype(x.dtype)
    s = None if scales is None else cast(scales, wide).unsqueeze(-1)
    z, dy = _wide(x), cast(dy, wide)
    dx = dscales = y = None
    if want_dx:
        want_h = want_y or (want_dscales and s is not None)
        grads, h = _gradients(f, dy if s is None else dy * s, z, want_h)
        if isinstance(f, Glu) and f.interleave is not None:
            parts = [t.unflatten(-1, (-1, f.interleave)) for t in grads]
            dx = cast(torch.stack(parts, -2).flatten(-3), x.dtype)
        else:
            # Rounded before they are joined: a compiler would store the wide ones.
            dx = joined_columns(cast(grad, x.dtype) for grad in grads)
    else:
        h = _value(f, z, None)
    if want_dscales and s is not None:
        assert h is not None
        dscales = (h * dy).sum(-1)
    if want_y:
        assert h is not None
        y = cast(h if s is None else h * s, x.dtype)
    return GatedGrads(dx, dscales, y)
