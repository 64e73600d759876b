"""Scalar functions with their derivatives in plain torch, those that several operations apply.

Their form for kernels is in ``device.scalar``, under the same names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .scalar import Backward, ScalarFunction, grad_input, reuse, rounded_once

_aten = torch.ops.aten


@dataclass(frozen=True)
class Scale(ScalarFunction):
    """``s x``."""

    name = "scale"

    factor: float

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.mul(x, self.factor, out=out)

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.mul(dy, self.factor, out=out)

    def reference(self, x: Tensor) -> Tensor:
        return x * self.factor


class Sigmoid(ScalarFunction):
    """``σ(x) = 1 / (1 + e⁻ˣ)``."""

    name = "sigmoid"

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.sigmoid(x, out=out)

    @rounded_once
    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        s = torch.sigmoid(x)
        return grad_input(_aten.sigmoid_backward, dy, s, out=reuse(s) if out is None else out)

    def vjp(self, x: Tensor) -> tuple[Tensor, Backward]:
        s = torch.sigmoid(x)
        return s, lambda dy, *, out=None: grad_input(_aten.sigmoid_backward, dy, s, out=out)

    def reference(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class Relu(ScalarFunction):
    """``max(x, 0)``; the derivative at 0 is 0."""

    name = "relu"

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.relu(x) if out is None else torch.clamp_min(x, 0, out=out)

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return grad_input(_aten.threshold_backward, dy, x, 0, out=out)

    def reference(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class SquaredRelu(ScalarFunction):
    """``max(x, 0)²``."""

    name = "squared_relu"

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        y = Relu().value(x, out=out)
        return y.mul_(y)

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        # Masked at the end: for x = -inf the product is not finite.
        dx = torch.addcmul(x.new_zeros(()), dy, x, value=2)
        return grad_input(_aten.threshold_backward, dx, x, 0, out=reuse(dx) if out is None else out)

    def reference(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


@dataclass(frozen=True)
class Swish(ScalarFunction):
    """``x σ(βx)``: SiLU for β = 1, QGELU for β = 1.702."""

    name = "swish"

    beta: float = 1.0

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        if self.beta != 1:
            return self._value(x, out=out)
        return F.silu(x) if out is None else _aten.silu.out(x, out=out)

    @rounded_once
    def _value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.mul(x, self.beta, out=out).sigmoid_().mul_(x)

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        if self.beta == 1:
            return grad_input(_aten.silu_backward, dy, x, out=out)
        return self._backward(dy, x, out=out)

    @rounded_once
    def _backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        z = x * self.beta  # f'(x) is the derivative of SiLU at βx
        return grad_input(_aten.silu_backward, dy, z, out=reuse(z) if out is None else out)

    def vjp(self, x: Tensor) -> tuple[Tensor, Backward]:
        beta = self.beta
        s = torch.sigmoid(x if beta == 1 else x * beta)
        y = s * x

        def backward(dy: Tensor, *, out: Tensor | None = None) -> Tensor:
            # f'(x) = s + β y (1 - s)
            slope = torch.lerp(y if beta == 1 else y * beta, x.new_ones(()), s, out=reuse(s))
            return torch.mul(slope, dy, out=out)

        return y, backward

    def reference(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class GeluErf(ScalarFunction):
    """``x Φ(x)``, Φ the distribution function of the standard normal distribution."""

    name = "gelu_erf"

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return F.gelu(x) if out is None else _aten.gelu.out(x, out=out)

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return grad_input(_aten.gelu_backward, dy, x, out=out)

    def reference(self, x: Tensor) -> Tensor:
        return 0.5 * x * torch.erfc(x * -math.sqrt(0.5))


_GELU_1 = 2 * math.sqrt(2 / math.pi)
_GELU_3 = 0.044715 * _GELU_1


class GeluTanh(ScalarFunction):
    """``x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))``, the usual approximation of GELU."""

    name = "gelu_tanh"

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        if x.is_cpu:
            return self._value(x, out=out)
        y = F.gelu(x, approximate="tanh")
        return y if out is None else out.copy_(y)

    @rounded_once
    def _value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self._argument(x, out).sigmoid_().mul_(x)

    def _argument(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        # f(x) equals x σ(2 √(2/π) (x + 0.044715 x³)), and on a CPU σ costs a fraction of tanh: for
        # 1835008 elements in one thread 1.6 instead of 3.0 ms in fp32.
        z = torch.addcmul(x.new_full((), _GELU_1), x, x, value=_GELU_3, out=out)
        return z.mul_(x)

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return grad_input(_aten.gelu_backward, dy, x, approximate="tanh", out=out)

    def vjp(self, x: Tensor) -> tuple[Tensor, Backward]:
        if not x.is_cpu:
            return super().vjp(x)
        z = self._argument(x)
        s = torch.sigmoid(z)
        y = s * x

        def backward(dy: Tensor, *, out: Tensor | None = None) -> Tensor:
            # f'(x) = s + y σ(-z) z', as 1 - s has no digits left where s is about 1
            slope = torch.addcmul(x.new_full((), _GELU_1), x, x, value=3 * _GELU_3)
            slope.mul_(y).mul_(z.neg_().sigmoid_()).add_(s)
            return torch.mul(slope, dy, out=out)

        return y, backward

    def reference(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
