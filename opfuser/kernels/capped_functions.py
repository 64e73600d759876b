"""Scalar functions that cap or clamp what they are applied to, as ``functions`` has the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..torch_internals import CLAMP_PASSES_AT_LIMITS
from .functions import Swish
from .scalar import Backward, ScalarFunction, grad_input, reuse, rounded_once, wide_dtype

_aten = torch.ops.aten


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
        return grad_input(_aten.tanh_backward, dy, t, out=reuse(t) if out is None else out)

    def vjp(self, x: Tensor) -> tuple[Tensor, Backward]:
        t = torch.div(x, self.cap).tanh_()
        return t * self.cap, lambda dy, *, out=None: grad_input(_aten.tanh_backward, dy, t, out=out)

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
            slope = grad_input(_aten.tanh_backward, s, t, out=None)
            slope.add_(grad_input(_aten.sigmoid_backward, t, s, out=None), alpha=self.cap)
            return torch.mul(slope, dy, out=out)

        return torch.mul(t, self.cap).mul_(s), backward

    def reference(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap) * torch.sigmoid(x)


@dataclass(frozen=True)
class SoftCappedSquaredRelu(ScalarFunction):
    """``(c tanh(max(x, 0) / c))²``: the squared ReLU of small x, and never beyond c²."""

    name = "soft_capped_squared_relu"

    cap: float

    @rounded_once
    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self._tanh(x, out).mul_(self.cap).square_()

    def _tanh(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.div(x, self.cap, out=out).clamp_min_(0).tanh_()

    @rounded_once
    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self._from_tanh(dy, x, self._tanh(x), out)

    def vjp(self, x: Tensor) -> tuple[Tensor, Backward]:
        t = self._tanh(x)

        def backward(dy: Tensor, *, out: Tensor | None = None) -> Tensor:
            return self._from_tanh(dy, x, t, out)

        return torch.mul(t, self.cap).square_(), backward

    def _from_tanh(self, dy: Tensor, x: Tensor, t: Tensor, out: Tensor | None) -> Tensor:
        # f'(x) = 2 c t (1 - t²). Masked at the end: nothing of an infinite gradient passes below 0.
        dx = grad_input(_aten.tanh_backward, dy, t, out=None).mul_(t).mul_(2 * self.cap)
        return grad_input(_aten.threshold_backward, dx, x, 0, out=reuse(dx) if out is None else out)

    def reference(self, x: Tensor) -> Tensor:
        return (self.cap * torch.tanh(torch.relu(x) / self.cap)).square()


def _clamp_backward(dy: Tensor, x: Tensor, low: float, high: float, out: Tensor | None) -> Tensor:
    """``dy`` where x is within the limits, or at one if ``torch.clamp`` passes it there, else 0."""
    # The kernel, several times faster than comparing and selecting, leaves the limits themselves
    # out; it compares in fp32 or wider.
    grow = 1 + torch.finfo(wide_dtype(x.dtype)).eps if CLAMP_PASSES_AT_LIMITS else 1.0
    return grad_input(_aten.hardtanh_backward, dy, x, low * grow, high * grow, out=out)


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
        c = torch.clamp_max(x, self.limit)
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
        return torch.clamp(x, -self.limit, self.limit) + self.offset
