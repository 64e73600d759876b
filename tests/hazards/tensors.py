"""What the tests of hazards and of the contract share: values, leaves and comparisons."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

F64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}

Module = TypeVar("Module", bound=nn.Module)


def rand(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    """Random values; the same ones, rounded, whatever the dtype."""
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def leaf(t: Tensor) -> Tensor:
    """A copy in float64 with a gradient of its own, for a reference."""
    return t.detach().double().clone().requires_grad_()


def fill(model: Module) -> Module:
    """Random parameters: norms and biases start at ones and zeros, which hide mistakes."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64))
    return model


def close(got: Tensor | None, want: Tensor | None, tolerance: float = 1e-12) -> None:
    """Equal up to rounding in float64, or up to ``tolerance``; a missing gradient is a failure."""
    assert got is not None
    assert want is not None
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)
