"""The devices on which replaying is tested: a GPU, and a CPU that behaves like one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import opfuser
from opfuser.engine.replayed import graphs
from tests.replay.recorded import RecordedGraph


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CPU that behaves like a GPU."""
    # Users cannot say how a device records launches: CUDA graphs are all that there is.
    monkeypatch.setitem(graphs._TYPES, "cpu", RecordedGraph)
    return torch.device("cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, cpu: torch.device) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else cpu


@pytest.fixture
def replaying(device: torch.device) -> Iterator[None]:
    with opfuser.replay("on"):
        yield
