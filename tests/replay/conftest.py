"""The devices on which replaying is tested: a GPU, and a CPU that behaves like one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import opfuser
from opfuser.engine.replayed import graphs
from tests.replay.recorded import RecordedGraph


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setitem(graphs._TYPES, "cpu", RecordedGraph)
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def replaying(device: torch.device) -> Iterator[None]:
    with opfuser.replay("on"):
        yield
