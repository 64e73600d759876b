"""Gated products of scalar functions, over the two parts of the last dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError, InputError, explain
from ..kernels.scalar import (
    ClampedSwish,
    ScalarFunction,
    ShiftedClamp,
    SoftCap,
    SoftCappedSwish,
    reuse,
)

__all__ = ["Glu", "clamped_swish", "situ"]


def situ(beta1: float, beta2: float) -> tuple[ScalarFunction, ScalarFunction]:
    """The functions of SiTUGLU, applied to gates and to linear units."""
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 < beta < math.inf:
            raise ArgumentError(
                explain(f"{name} must be finite and positive", received=f"{name}={beta}")
            )
    return SoftCappedSwish(beta1), SoftCap(beta2)


def clamped_swish(
    limit: float, alpha: float, offset: float
) -> tuple[ScalarFunction, ScalarFunction]:
    """The functions of ClampedSwiGLU, applied to gates and to linear units."""
    if not limit > 0:
        raise ArgumentError(explain("limit must be positive", received=f"limit={limit}"))
    return ClampedSwish(alpha, limit), ShiftedClamp(limit, offset)


@dataclass(frozen=True)
class Glu:
    """``gate(a) up(b)`` of gates a and linear units b packed into ``x (…, 2F)``.

    They are the two halves of the last dimension; or, with ``interleave``, alternating blocks of
    that many columns. No ``up`` stands for the identity.
    """

    gate: ScalarFunction
    up: ScalarFunction | None = None
    interleave: int | None = None

    def __post_init__(self) -> None:
        if self.interleave is not None and self.interleave < 1:
            raise ArgumentError(
                explain(
                    "glu_interleave_size must be positive or None", received=str(self.interleave)
                )
            )

    def check(self, x: Tensor, where: str) -> None:
        """Raises InputError unless the last dimension divides into gates and linear units."""
        unit = 2 * (self.interleave or 1)
        if x.dim() and not x.shape[-1] % unit:
            return
        raise InputError(
            explain(
                f"The last dimension must be a multiple of {unit}, to divide into gates and "
                "linear units",
                where=where,
                received=f"shape {tuple(x.shape)}",
                remedy="Give the operation before it twice as many output features as this one's",
            )
        )

    def value(self, x: Tensor) -> Tensor:
        """The product, of shape ``(…, F)``."""
        a, b = self._split(x)
        y = self.gate.value(a).mul_(b if self.up is None else self.up.value(b))
        return y if self.interleave is None else y.flatten(-2)

    def backward(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of ``x``, both parts written in place by their last pass."""
        a, b = self._split(x)
        if self.interleave is not None:
            dy = dy.unflatten(-1, (-1, self.interleave))
        dx = reuse(torch.empty_like(x))
        da_out, db_out = (None, None) if dx is None else self._split(dx)
        u = b if self.up is None else self.up.value(b)
        da, db = self.gate.product_backward(dy, a, u, da_out, db_out)
        if self.up is not None:
            db = self.up.backward(db, b, reuse(db))
        if dx is not None:
            return dx
        if self.interleave is None:
            return torch.cat((da, db), -1)
        return torch.stack((da, db), -2).flatten(-3)

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
