"""Numerics of kernels: under Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser.kernels.launch import INTERPRETED

# The interpreter has to be chosen before Triton is imported: test_interpreter.py starts a process
# of its own for these tests.
if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


def _filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.requires_grad:
            tensor.fill_(float("nan"))
        return tensor

    return filled


@pytest.fixture(autouse=True)
def nan_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a launcher allocates holds NaN: an element that no program writes shows."""
    monkeypatch.setattr(torch, "empty", _filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _filled(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", _filled(Tensor.new_empty))
