"""Gated products of scalar functions in plain torch. Dimensions as in ``opfuser.kernels.gated``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .activation import Parameters
from .scalar import ScalarFunction, cast, reuse, scalar_function, wide_dtype

__all__ = [
    "Glu",
    "GluArguments",
    "gated_backward_over_x_plain",
    "gated_backward_plain",
    "gated_forward_plain",
]

GluArguments = tuple[str, Parameters, str, Parameters, int]

# Elements of the product in a block of rows on a CPU, in forward and in the backward that writes
# over x. What one pass leaves for the next stays in the cache, and new memory for the gradient
# would cost page faults. With two threads, SwiGLU of 1024 x 1792 takes 0.59 instead of 0.97 ms in
# forward in fp32, 0.77 instead of 1.03 ms in bf16; with one, 3.9 instead of 5.1 ms in backward in
# fp32, 3.4 instead of 3.6 ms in bf16, with the product made again 4.6 instead of 6.7 and 3.8
# instead of 4.7 ms.
_BLOCK = 2**19


@dataclass(frozen=True)
class Glu:
    """``gate(a) up(b)`` of gates a and linear units b packed into ``x (…, 2F)``.

    They are the two halves of the last dimension; or, with ``interleave``, alternating blocks of
    that many columns. No ``up`` stands for the identity.
    """

    gate: ScalarFunction
    up: ScalarFunction | None = None
    interleave: int | None = None

    @property
    def arguments(self) -> GluArguments:
        """What operators take. Worth keeping: it is built at every call."""
        up = ("identity", ()) if self.up is None else self.up.arguments
        return *self.gate.arguments, *up, self.interleave or 0

    def value(self, x: Tensor) -> Tensor:
        """The product, of shape ``(…, F)``."""
        if x.is_cpu and x.numel() > 2 * _BLOCK and self._goes_in_blocks(x):
            return self._value_in_blocks(x)
        a, b = self._split(x)
        y = self.gate.value(a).mul_(b if self.up is None else self.up.value(b))
        return y if self.interleave is None else y.flatten(-2)

    def _goes_in_blocks(self, x: Tensor) -> bool:
        return self.interleave is None and x.is_contiguous() and not torch.compiler.is_compiling()

    def _value_in_blocks(self, x: Tensor) -> Tensor:
        cols = x.shape[-1] // 2
        y = x.new_empty((*x.shape[:-1], cols))
        rows = max(1, _BLOCK // cols)
        for part, y_part in zip(x.view(-1, 2 * cols).split(rows), y.view(-1, cols).split(rows)):
            a, b = part.chunk(2, -1)
            self.gate.value(a, y_part).mul_(b if self.up is None else self.up.value(b))
        return y

    def backward(self, dy: Tensor, x: Tensor, y_out: Tensor | None = None) -> Tensor:
        """The gradient of ``x``, both parts written in place by their last pass.

        The product goes to ``y_out``, which is not for while torch.compile traces.
        """
        a, b = self._split(x)
        if self.interleave is not None:
            dy = dy.unflatten(-1, (-1, self.interleave))
            y_out = None if y_out is None else y_out.unflatten(-1, (-1, self.interleave))
        dx = reuse(torch.empty_like(x))
        da_out, db_out = (None, None) if dx is None else self._split(dx)
        u = b if self.up is None else self.up.value(b)
        da, db = self.gate.product_backward(dy, a, u, da_out, db_out, y_out)
        if self.up is not None:
            db = self.up.backward(db, b, reuse(db))
        if dx is not None:
            return dx
        if self.interleave is None:
            return torch.cat((da, db), -1)
        return torch.stack((da, db), -2).flatten(-3)

    def backward_over_x(self, dy: Tensor, x: Tensor, y_out: Tensor | None) -> None:
        """Writes the gradient over ``x``, block by block of rows; the product goes to ``y_out``.

        Only where :attr:`works_over_x` says so.
        """
        cols = dy.shape[-1]
        rows = max(1, _BLOCK // max(1, cols))
        x, dy = x.view(-1, 2 * cols), dy.reshape(-1, cols)
        scratch = x.new_empty((2, min(rows, len(dy)), cols))
        for start in range(0, len(dy), rows):
            block = slice(start, start + rows)
            a, b = self._split(x[block])
            f, da = scratch[:, : len(a)]
            self.gate.value(a, f)
            if y_out is not None:
                torch.mul(f, b, out=y_out.view(-1, cols)[block])
            torch.mul(dy[block], b, out=da)
            torch.mul(dy[block], f, out=b)
            self.gate.backward(da, a, a)

    @property
    def works_over_x(self) -> bool:
        """Whether there is :meth:`backward_over_x` for this product."""
        return self.up is None and self.interleave is None and self.gate.backward_over_x

    def reference(self, x: Tensor) -> Tensor:
        """The product in plain differentiable torch."""
        a, b = self._split(x)
        y = self.gate.reference(a) * (b if self.up is None else self.up.reference(b))
        return y if self.interleave is None else y.flatten(-2)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.interleave is None:
            a, b = x.chunk(2, -1)
            return a, b
        blocks = x.unflatten(-1, (-1, 2, self.interleave))
        return blocks.select(-2, 0), blocks.select(-2, 1)


def _function(
    gate: str, gate_parameters: Parameters, up: str, up_parameters: Parameters, interleave: int
) -> Glu | ScalarFunction:
    function = scalar_function(gate, gate_parameters)
    if not up:
        return function
    units = None if up == "identity" else scalar_function(up, up_parameters)
    return Glu(function, units, interleave or None)


def gated_forward_plain(
    x: Tensor,
    gate: str,
    gate_parameters: Parameters,
    up: str,
    up_parameters: Parameters,
    interleave: int,
    scales: Tensor | None,
) -> Tensor:
    """``y = gate(a) up(b) s``, contiguous, in the dtype of x; no scales count as one."""
    f = _function(gate, gate_parameters, up, up_parameters, interleave)
    y = f.value(x.contiguous())
    return y if scales is None else y.mul_(cast(scales, x.dtype).unsqueeze(-1))


def gated_backward_plain(
    dy: Tensor,
    x: Tensor,
    gate: str,
    gate_parameters: Parameters,
    up: str,
    up_parameters: Parameters,
    interleave: int,
    scales: Tensor | None,
    want_dx: bool,
    want_y: bool,
    want_dscales: bool = True,
) -> list[Tensor]:
    """Those wanted of dx, dscales (only where there are scales) and y, in this order.

    dx and y have the dtype of x; dscales is in fp32 or wider, and so is its sum.
    """
    f = _function(gate, gate_parameters, up, up_parameters, interleave)
    x, dy = x.contiguous(), cast(dy, x.dtype)
    s = None if scales is None else cast(scales, x.dtype).unsqueeze(-1)
    want_dscales = want_dscales and s is not None
    dx = y = None
    together = want_dx and isinstance(f, Glu) and not torch.compiler.is_compiling()
    if want_y or want_dscales:
        y = x.new_empty(dy.shape) if together else f.value(x)
    if want_dx:
        ds = dy if s is None else dy * s
        dx = f.backward(ds, x, y if together else None).contiguous()
    results = [] if dx is None else [dx]
    if want_dscales:
        assert y is not None
        results.append((dy * cast(y, wide_dtype(x.dtype))).sum(-1))
    if want_y:
        assert y is not None
        results.append(y if s is None else y.mul_(s))
    return results


def gated_backward_over_x_plain(
    dy: Tensor, x: Tensor, arguments: GluArguments, want_y: bool
) -> list[Tensor] | None:
    """dx, which takes the memory of x, and y if wanted; None if that is not simple."""
    if torch.compiler.is_compiling() or not (x.is_cpu and x.is_contiguous() and x.numel()):
        return None
    f = _function(*arguments)
    if not (isinstance(f, Glu) and f.works_over_x):
        return None
    y = x.new_empty(dy.shape) if want_y else None
    f.backward_over_x(cast(dy, x.dtype), x, y)
    return [x] if y is None else [x, y]
