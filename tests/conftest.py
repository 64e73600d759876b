"""What all tests share: seeds, threads, devices."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest
import torch

from opfuser.fused.parts.pipeline import Pipeline

pytest_plugins = ["tests.kernels.bounds", "tests.record_run"]

HAS_CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if HAS_CUDA else ["cpu"]


def pytest_configure(config: pytest.Config) -> None:
    # The shapes of the tests are small: more threads only wait for each other.
    threads = min(2, torch.get_num_threads())
    if is_worker(config):
        threads = 1
        os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    torch.set_num_threads(threads)


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of several processes that share the tests and the cores."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules are imported and tests made without looks for garbage, of which there is little."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there now stays to the end, and is no garbage: the 800,000 objects of all tests."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_worker(config):
        # What takes long begins first, so that no core waits for it at the end.
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_small() -> Iterator[None]:
    """Tests are of small tensors, while nearly all that they promise of memory is for others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "small", 0)
        yield


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the CUDA device where there is one: such cases carry the marker ``gpu``."""
    return torch.device(request.param)


@contextmanager
def nothing_waits_for_the_device() -> Iterator[None]:
    """Whatever waits for the GPU inside this block raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode finds not every synchronization
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_waiting() -> object:
    """:func:`nothing_waits_for_the_device`, after a look that it does raise."""
    x = torch.ones(1, device="cuda")
    with nothing_waits_for_the_device(), pytest.raises(RuntimeError, match="synchroniz"):
        x.item()
    return nothing_waits_for_the_device
