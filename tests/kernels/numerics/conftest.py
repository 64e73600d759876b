"""Numerics of kernels and of their plain twins: each test holds both to the same.

On a CPU it is plain torch, all at once, and block by block where it does that; in the processes
that test_interpreter.py starts, kernels under Triton's interpreter; and where there is a GPU,
kernels there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser.fused.parts import chain
from opfuser.kernels import pointwise
from opfuser.kernels.launch import INTERPRETED, runs
from tests.kernels.blocks import small_blocks


@pytest.fixture
def device(device: torch.device, request: pytest.FixtureRequest) -> torch.device:
    if request.node.get_closest_marker("kernels") and not runs(torch.ones(1, device=device)):
        pytest.skip("plain torch differs")
    return device


# Whose plain torch works on large tensors block by block.
IN_BLOCKS = ("activation", "cross_entropy", "gated", "norm", "pointwise", "rotary")
IN_BLOCKS += ("vocabulary_slices",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    ways = ["kernels"] if INTERPRETED else ["at once"]
    family = metafunc.module.__name__.rpartition("test_")[2]
    if not INTERPRETED and family in IN_BLOCKS:
        ways.append("block by block")
    metafunc.parametrize("way", ways, indirect=True)


@pytest.fixture(autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "block by block":
        small_blocks(monkeypatch)
    # Chains are planned on a CPU too, and drop the same elements there.
    for module in (chain, pointwise):
        monkeypatch.setattr(module, "INTERPRETED", True)


def _filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.requires_grad:
            tensor.fill_(float("nan"))
        return tensor

    return filled


@pytest.fixture(autouse=True)
def nan_filled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a launcher allocates holds NaN: an element that no program writes shows."""
    if not runs(torch.ones(1, device=device)):
        return
    monkeypatch.setattr(torch, "empty", _filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _filled(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", _filled(Tensor.new_empty))
