"""What a module computes, and how near that has to be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def results(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters."""
    y = module(x, *args, **kwargs)
    wrt = [t for t in (x, *module.parameters()) if t.requires_grad]
    return [y, *torch.autograd.grad(y.sin().sum(), wrt)]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    """To 1e-12 in fp64 and 1e-6 in fp32, relative to the size of the tensor."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected):
        tolerance = 1e-12 if theirs.dtype == torch.float64 else 1e-6
        assert (mine - theirs).norm().item() <= tolerance * theirs.norm().item()
