"""The devices on which replaying is tested: a GPU, and a CPU that behaves like one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import opfuser
from tests.replay.recorded import replayed_on_a_cpu


@pytest.fixture
def cpu() -> Iterator[torch.device]:
    """A CPU that behaves like a GPU."""
    with replayed_on_a_cpu():
        yield torch.device("cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, cpu: torch.device) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else cpu


@pytest.fixture
def replaying(device: torch.device) -> Iterator[None]:
    with opfuser.replay("on"):
        yield
