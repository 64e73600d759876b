"""Scalar functions with their derivatives, each defined once.

This is their form in plain torch; ``opfuser.kernels.device.scalar`` has that for kernels, under
:attr:`ScalarFunction.name`.

``out`` lets a caller collect results in parts of one buffer. No input is written to, but ``out``
may be ``dy`` itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, ten times cheaper where nothing is to be done."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics and sums: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grad(op: Any, *args: Any, out: Tensor | None, **kwargs: Any) -> Tensor:
    dx: Tensor
    if out is None:
        dx = op.default(*args, **kwargs)
    else:
        dx = op.grad_input(*args, **kwargs, grad_input=out)
    return dx


def reuse(tensor: Tensor) -> Tensor | None:
    """``tensor`` as an ``out`` argument; None, for new memory, while torch.compile traces.

    Dynamo breaks the graph at an ``out`` that is not contiguous, and needs no help to reuse memory.
    """
    return None if torch.compiler.is_compiling() else tensor


class ScalarFunction:
    """A function f of one number, applied to each element. Results have the dtype of ``x``.

    Class attributes:
        name: of the device function; also what :func:`scalar_function` knows it under.
        backward_over_x: whether x too may be ``out`` of its backward: nothing is read after that
            has been written.
    """

    name: ClassVar[str]
    backward_over_x: ClassVar[bool] = True

    @property
    def parameters(self) -> tuple[float, ...]:
        """Its constants, in the order that constructor and device function share."""
        # Not by vars(): the tracer of torch 2.11 does not know it.
        names = getattr(type(self), "__dataclass_fields__", ())
        return tuple([float(getattr(self, name)) for name in names])

    @property
    def arguments(self) -> tuple[str, tuple[float, ...]]:
        """Name and parameters, as operators take them. Worth keeping: it is built at every call."""
        return self.name, self.parameters

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``f(x)``, in memory of its own."""
        raise NotImplementedError

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``dy f'(x)``, in memory of its own unless ``out`` is given."""
        raise NotImplementedError

    def reference(self, x: Tensor) -> Tensor:
        """``f(x)`` in plain differentiable torch."""
        raise NotImplementedError

    def product_backward(
        self,
        dy: Tensor,
        x: Tensor,
        u: Tensor,
        dx_out: Tensor | None,
        du_out: Tensor | None,
        y_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of ``f(x) u``: ``dy u f'(x)`` and ``dy f(x)``; the product goes to ``y_out``.

        Overridden where value and derivative have work in common.
        """
        dx = torch.mul(dy, u, out=dx_out)
        dx = self.backward(dx, x, reuse(dx))
        return dx, _times(self.value(x, du_out), dy, u, y_out)


def _times(f: Tensor, dy: Tensor, u: Tensor, y_out: Tensor | None) -> Tensor:
    """``dy f`` in the memory of f, after ``f u`` has gone to ``y_out``."""
    if y_out is not None:
        torch.mul(f, u, out=y_out)
    return f.mul_(dy)


class Sigmoid(ScalarFunction):
    """``σ(x) = 1 / (1 + e⁻ˣ)``."""

    name = "sigmoid"

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.sigmoid(x, out=out)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        s = torch.sigmoid(x)
        return _grad(_aten.sigmoid_backward, dy, s, out=reuse(s) if out is None else out)

    def reference(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def product_backward(
        self,
        dy: Tensor,
        x: Tensor,
        u: Tensor,
        dx_out: Tensor | None,
        du_out: Tensor | None,
        y_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(x, out=du_out)
        dx = _grad(_aten.sigmoid_backward, u, s, out=dx_out).mul_(dy)
        return dx, _times(s, dy, u, y_out)


class Tanh(ScalarFunction):
    """``tanh(x)``."""

    name = "tanh"

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.tanh(x, out=out)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        t = torch.tanh(x)
        return _grad(_aten.tanh_backward, dy, t, out=reuse(t) if out is None else out)

    def reference(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


@dataclass(frozen=True)
class Softplus(ScalarFunction):
    """``log(1 + e^(βx)) / β``, and x where ``βx > threshold``."""

    name = "softplus"

    beta: float = 1.0
    threshold: float = 20.0

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return F.softplus(x, self.beta, self.threshold)
        y: Tensor = _aten.softplus.out(x, self.beta, self.threshold, out=out)
        return y

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _grad(_aten.softplus_backward, dy, x, self.beta, self.threshold, out=out)

    def reference(self, x: Tensor) -> Tensor:
        z = self.beta * x
        return torch.where(z > self.threshold, x, torch.logaddexp(z, z.new_zeros(())) / self.beta)


class Relu(ScalarFunction):
    """``max(x, 0)``; the derivative at 0 is 0."""

    name = "relu"

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.relu(x) if out is None else torch.clamp_min(x, 0, out=out)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _grad(_aten.threshold_backward, dy, x, 0, out=out)

    def reference(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class SquaredRelu(ScalarFunction):
    """``max(x, 0)²``."""

    name = "squared_relu"
    backward_over_x = False

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = torch.relu(x) if out is None else torch.clamp_min(x, 0, out=out)
        return y.mul_(y)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        # Masked at the end: for x = -inf the product is not finite.
        dx = torch.mul(dy, x, out=out).mul_(2)
        return _grad(_aten.threshold_backward, dx, x, 0, out=reuse(dx))

    def reference(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


@dataclass(frozen=True)
class Swish(ScalarFunction):
    """``x σ(βx)``: SiLU for β = 1, QGELU for β = 1.702."""

    name = "swish"

    beta: float = 1.0

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.beta == 1:
            return F.silu(x) if out is None else _aten.silu.out(x, out=out)
        return torch.mul(x, self.beta, out=out).sigmoid_().mul_(x)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.beta != 1:
            x = x * self.beta  # f'(x) is the derivative of SiLU at βx
            out = reuse(x) if out is None else out
        return _grad(_aten.silu_backward, dy, x, out=out)

    def product_backward(
        self,
        dy: Tensor,
        x: Tensor,
        u: Tensor,
        dx_out: Tensor | None,
        du_out: Tensor | None,
        y_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # For β = 1 ATen has both functions; elsewhere the number of passes counts, on a CPU rather
        # that of exponentials.
        if self.beta == 1 or not x.is_cpu:
            return super().product_backward(dy, x, u, dx_out, du_out, y_out)
        s = torch.mul(x, self.beta, out=dx_out).sigmoid_()
        if y_out is not None:
            torch.mul(s, x, out=y_out).mul_(u)
        du = torch.mul(dy, s, out=du_out).mul_(x)
        # dx = (s dy + (1 - s) β du) u
        return torch.lerp(du * self.beta, dy, s, out=reuse(s)).mul_(u), du

    def reference(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class GeluErf(ScalarFunction):
    """``x Φ(x)``, Φ the distribution function of the standard normal distribution."""

    name = "gelu_erf"

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return F.gelu(x) if out is None else _aten.gelu.out(x, out=out)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _grad(_aten.gelu_backward, dy, x, out=out)

    def reference(self, x: Tensor) -> Tensor:
        return 0.5 * x * torch.erfc(x * -math.sqrt(0.5))


_GELU_1 = 2 * math.sqrt(2 / math.pi)
_GELU_3 = 0.044715 * _GELU_1


class GeluTanh(ScalarFunction):
    """``x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))``, the usual approximation of GELU."""

    name = "gelu_tanh"

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if not x.is_cpu:
            if out is None:
                return F.gelu(x, approximate="tanh")
            y: Tensor = _aten.gelu.out(x, approximate="tanh", out=out)
            return y
        # It equals x σ(2 √(2/π) (x + 0.044715 x³)), and on a CPU σ costs a fraction of tanh: for
        # 1835008 elements in one thread 1.6 instead of 3.0 ms in fp32, 2.6 instead of 3.6 ms in
        # bf16, which like fp16 takes its intermediate results in fp32, as ATen's kernel does.
        wide = cast(x, wide_dtype(x.dtype))
        direct = out if wide is x else None
        z = torch.addcmul(wide.new_full((), _GELU_1), wide, wide, value=_GELU_3, out=direct)
        y = z.mul_(wide).sigmoid_().mul_(wide)
        if out is None:
            return cast(y, x.dtype)
        return y if wide is x else out.copy_(y)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _grad(_aten.gelu_backward, dy, x, approximate="tanh", out=out)

    def reference(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@dataclass(frozen=True)
class SoftCap(ScalarFunction):
    """``c tanh(x / c)``: about x where x is small, and never beyond ±c."""

    name = "soft_cap"

    cap: float

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.div(x, self.cap, out=out).tanh_().mul_(self.cap)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        t = torch.div(x, self.cap).tanh_()
        return _grad(_aten.tanh_backward, dy, t, out=reuse(t) if out is None else out)

    def reference(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)


@dataclass(frozen=True)
class SoftCappedSwish(ScalarFunction):
    """``c tanh(x / c) σ(x)``: SiLU with its factor x capped."""

    name = "soft_capped_swish"

    cap: float

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = torch.div(x, self.cap, out=out).tanh_().mul_(self.cap)
        return y.mul_(torch.sigmoid(x))

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        slope = self._slope(torch.div(x, self.cap).tanh_(), torch.sigmoid(x))
        return torch.mul(slope, dy, out=out)

    def product_backward(
        self,
        dy: Tensor,
        x: Tensor,
        u: Tensor,
        dx_out: Tensor | None,
        du_out: Tensor | None,
        y_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        t, s = torch.div(x, self.cap).tanh_(), torch.sigmoid(x)
        dx = torch.mul(self._slope(t, s), u, out=dx_out).mul_(dy)
        return dx, _times(torch.mul(t.mul_(self.cap), s, out=du_out), dy, u, y_out)

    def reference(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap) * torch.sigmoid(x)

    def _slope(self, t: Tensor, s: Tensor) -> Tensor:
        slope = _grad(_aten.tanh_backward, s, t, out=None)
        return slope.add_(_grad(_aten.sigmoid_backward, t, s, out=None), alpha=self.cap)


def _clamp_backward(dy: Tensor, x: Tensor, low: float, high: float, out: Tensor | None) -> Tensor:
    """``dy`` where ``low <= x <= high``, else 0."""
    # The kernel, several times faster than comparing and selecting, leaves the limits themselves
    # out; it compares in fp32 or wider.
    grow = 1 + torch.finfo(wide_dtype(x.dtype)).eps
    return _grad(_aten.hardtanh_backward, dy, x, low * grow, high * grow, out=out)


@dataclass(frozen=True)
class ClampedSwish(ScalarFunction):
    """``c σ(αc)`` with ``c = min(x, limit)``."""

    name = "clamped_swish"
    backward_over_x = False

    alpha: float
    limit: float

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return Swish(self.alpha).value(torch.clamp_max(x, self.limit), out)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        dc = Swish(self.alpha).backward(dy, torch.clamp_max(x, self.limit), out)
        return _clamp_backward(dc, x, -math.inf, self.limit, reuse(dc))

    def product_backward(
        self,
        dy: Tensor,
        x: Tensor,
        u: Tensor,
        dx_out: Tensor | None,
        du_out: Tensor | None,
        y_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        c = torch.clamp_max(x, self.limit)
        dc, du = Swish(self.alpha).product_backward(dy, c, u, dx_out, du_out, y_out)
        return _clamp_backward(dc, x, -math.inf, self.limit, reuse(dc)), du

    def reference(self, x: Tensor) -> Tensor:
        c = x.clamp(max=self.limit)
        return c * torch.sigmoid(self.alpha * c)


@dataclass(frozen=True)
class ShiftedClamp(ScalarFunction):
    """x clamped to ±limit, plus an offset."""

    name = "shifted_clamp"

    limit: float
    offset: float

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.clamp(x, -self.limit, self.limit, out=out).add_(self.offset)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _clamp_backward(dy, x, -self.limit, self.limit, out)

    def reference(self, x: Tensor) -> Tensor:
        return x.clamp(-self.limit, self.limit) + self.offset


FUNCTIONS: dict[str, type[ScalarFunction]] = {
    function.name: function
    for function in (
        Sigmoid,
        Tanh,
        Softplus,
        Relu,
        SquaredRelu,
        Swish,
        GeluErf,
        GeluTanh,
        SoftCap,
        SoftCappedSwish,
        ClampedSwish,
        ShiftedClamp,
    )
}


def scalar_function(name: str, parameters: Sequence[float]) -> ScalarFunction:
    """The function with that name and those parameters: the inverse of ``arguments``."""
    return FUNCTIONS[name](*parameters)
