"""Scalar functions with their derivatives, each defined once.

This is their form in plain torch; ``opfuser.kernels.device.scalar`` has that for kernels, under
:attr:`ScalarFunction.name`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten

# Elements per thread that the cache holds along with intermediate results. With one thread of an
# EPYC (1 MiB of L2), SwiGLU of 1024 x 1792 in bf16 takes 1.9 ms in forward and 3.8 ms in backward;
# 2.4 and 4.7 ms in blocks of 2**16, 4.5 and 19.5 ms all at once. In fp32, 2.3 and 5.0 ms; all at
# once 2.3 and 13.4 ms.
BLOCK = 2**18


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


def rounded_once(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method of several steps that computes fp16 and bf16 in fp32, and rounds its result alone.

    Large tensors on a CPU are converted and computed block by block.
    """

    @functools.wraps(method)
    def wide_method(self: ScalarFunction, *inputs: Tensor, out: Tensor | None = None) -> Tensor:
        x = inputs[-1]
        wide = wide_dtype(x.dtype)
        if x.dtype == wide:
            return method(self, *inputs, out=out)
        if torch.compiler.is_compiling() or not x.is_cpu or x.numel() <= 2 * BLOCK:
            y = method(self, *[cast(t, wide) for t in inputs])
            return cast(y, x.dtype) if out is None else out.copy_(y)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        block = BLOCK * torch.get_num_threads()
        blocks = zip(*[t.reshape(-1).split(block) for t in (y, *inputs)])
        for y_part, *parts in blocks:
            y_part.copy_(method(self, *[cast(t, wide) for t in parts]))
        return y if out is None else out.copy_(y)

    return wide_method


class Backward(Protocol):
    """From dy to ``dy f'(x)`` of one x, which the last step writes to ``out``."""

    def __call__(self, dy: Tensor, *, out: Tensor | None = None) -> Tensor: ...


class ScalarFunction:
    """A function f of one number, applied to each element.

    Results have the dtype of ``x`` and are rounded once. No input is written to, unless it is
    ``out``, where the last step of a backward writes.

    Class attributes:
        name: of the device function; also what :func:`scalar_function` knows it under.
    """

    name: ClassVar[str]

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

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``f(x)``, in memory of its own unless ``out``, of the dtype of x, is given."""
        raise NotImplementedError

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``dy f'(x)``, in memory of its own unless ``out`` is given."""
        raise NotImplementedError

    def vjp(self, x: Tensor) -> tuple[Tensor, Backward]:
        """``f(x)`` of x in fp32 or fp64, and the function from dy to ``dy f'(x)``.

        Overridden where they have work in common. The function is called once, if at all, and
        before anything is written to ``f(x)``, or to x other than by itself.
        """
        return self.value(x), lambda dy, *, out=None: self.backward(dy, x, out=out)

    def reference(self, x: Tensor) -> Tensor:
        """``f(x)`` in plain differentiable torch."""
        raise NotImplementedError


class Sigmoid(ScalarFunction):
    """``σ(x) = 1 / (1 + e⁻ˣ)``."""

    name = "sigmoid"

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.sigmoid(x, out=out)

    @rounded_once
    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        s = torch.sigmoid(x)
        return _grad(_aten.sigmoid_backward, dy, s, out=reuse(s) if out is None else out)

    def vjp(self, x: Tensor) -> tuple[Tensor, Backward]:
        s = torch.sigmoid(x)
        return s, lambda dy, *, out=None: _grad(_aten.sigmoid_backward, dy, s, out=out)

    def reference(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class Tanh(ScalarFunction):
    """``tanh(x)``."""

    name = "tanh"

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.tanh(x, out=out)

    @rounded_once
    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
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

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            return F.softplus(x, self.beta, self.threshold)
        y: Tensor = _aten.softplus.out(x, self.beta, self.threshold, out=out)
        return y

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return _grad(_aten.softplus_backward, dy, x, self.beta, self.threshold, out=out)

    def reference(self, x: Tensor) -> Tensor:
        z = self.beta * x
        return torch.where(z > self.threshold, x, torch.logaddexp(z, z.new_zeros(())) / self.beta)


class Relu(ScalarFunction):
    """``max(x, 0)``; the derivative at 0 is 0."""

    name = "relu"

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.relu(x) if out is None else torch.clamp_min(x, 0, out=out)

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return _grad(_aten.threshold_backward, dy, x, 0, out=out)

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
        return _grad(_aten.threshold_backward, dx, x, 0, out=reuse(dx) if out is None else out)

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
            return _grad(_aten.silu_backward, dy, x, out=out)
        return self._backward(dy, x, out=out)

    @rounded_once
    def _backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        z = x * self.beta  # f'(x) is the derivative of SiLU at βx
        return _grad(_aten.silu_backward, dy, z, out=reuse(z) if out is None else out)

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
        return _grad(_aten.gelu_backward, dy, x, out=out)

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
        return _grad(_aten.gelu_backward, dy, x, approximate="tanh", out=out)

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


@dataclass(frozen=True)
class SoftCap(ScalarFunction):
    """``c tanh(x / c)``: about x where x is small, and never beyond ±c."""

    name = "soft_cap"

    cap: float

    @rounded_once
    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.div(x, self.cap, out=out).tanh_().mul_(self.cap)

    @rounded_once
    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        t = torch.div(x, self.cap).tanh_()
        return _grad(_aten.tanh_backward, dy, t, out=reuse(t) if out is None else out)

    def vjp(self, x: Tensor) -> tuple[Tensor, Backward]:
        t = torch.div(x, self.cap).tanh_()
        return t * self.cap, lambda dy, *, out=None: _grad(_aten.tanh_backward, dy, t, out=out)

    def reference(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)


@dataclass(frozen=True)
class SoftCappedSwish(ScalarFunction):
    """``c tanh(x / c) σ(x)``: SiLU with its factor x capped."""

    name = "soft_capped_swish"

    cap: float

    @rounded_once
    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.div(x, self.cap, out=out).tanh_().mul_(self.cap).mul_(torch.sigmoid(x))

    @rounded_once
    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self.vjp(x)[1](dy, out=out)

    def vjp(self, x: Tensor) -> tuple[Tensor, Backward]:
        t, s = torch.div(x, self.cap).tanh_(), torch.sigmoid(x)

        def backward(dy: Tensor, *, out: Tensor | None = None) -> Tensor:
            slope = _grad(_aten.tanh_backward, s, t, out=None)
            slope.add_(_grad(_aten.sigmoid_backward, t, s, out=None), alpha=self.cap)
            return torch.mul(slope, dy, out=out)

        return torch.mul(t, self.cap).mul_(s), backward

    def reference(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap) * torch.sigmoid(x)


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

    alpha: float
    limit: float

    @rounded_once
    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return Swish(self.alpha).value(torch.clamp_max(x, self.limit), out=out)

    @rounded_once
    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        dc = Swish(self.alpha).backward(dy, torch.clamp_max(x, self.limit))
        return self._masked(dc, x, out)

    def vjp(self, x: Tensor) -> tuple[Tensor, Backward]:
        y, backward = Swish(self.alpha).vjp(torch.clamp_max(x, self.limit))
        return y, lambda dy, *, out=None: self._masked(backward(dy), x, out)

    def _masked(self, dc: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        return _clamp_backward(dc, x, -math.inf, self.limit, reuse(dc) if out is None else out)

    def reference(self, x: Tensor) -> Tensor:
        c = x.clamp(max=self.limit)
        return c * torch.sigmoid(self.alpha * c)


@dataclass(frozen=True)
class ShiftedClamp(ScalarFunction):
    """x clamped to ±limit, plus an offset."""

    name = "shifted_clamp"

    limit: float
    offset: float

    @rounded_once
    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.clamp(x, -self.limit, self.limit, out=out).add_(self.offset)

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
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
