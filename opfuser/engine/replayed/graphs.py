"""Recorded launches of a function, which a device repeats without the host: CUDA graphs."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch

from ... import torch_internals as internals

T = TypeVar("T")

# One at a time: a capture changes how the allocator of its device serves its thread.
_capturing = threading.Lock()


class Event(Protocol):
    """A place in the work of a stream."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this one to another one, once both were reached."""


class Graph(Protocol):
    """Launches that were recorded, in memory of their own."""

    bytes: int

    def __init__(self, device: torch.device) -> None: ...

    def capture(self, function: Callable[[], T]) -> T:
        """Records the launches of ``function()``; its result is written by :meth:`replay`."""

    def replay(self) -> None:
        """Repeats the launches on the current stream."""

    @staticmethod
    def stream(device: torch.device) -> int:
        """Identifies the current stream of ``device``."""

    @staticmethod
    def under_way() -> bool:
        """Whether somebody else is capturing this thread's launches."""

    @staticmethod
    def memory(device: torch.device) -> int:
        """Bytes of memory that ``device`` has."""

    @staticmethod
    def free(device: torch.device) -> int:
        """Bytes of memory that nobody has reserved."""

    @staticmethod
    def allocated(device: torch.device) -> int:
        """Bytes of memory that tensors of this process have."""

    @staticmethod
    def event(device: torch.device) -> Event:
        """The place that the current stream of ``device`` has come to."""

    @staticmethod
    def objection() -> str | None:
        """Why nothing should be recorded that nobody asked for."""


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` with a memory pool that no other one uses.

    What was allocated while it was captured keeps its address as long as the graph lives, and
    nothing else is ever placed there: neither other graphs nor the rest of the program write to it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], T]) -> T:
        device = self.device
        current = torch.cuda.current_stream(device)
        aside = torch.cuda.Stream(device)
        aside.wait_stream(current)
        pool = torch.cuda.graph_pool_handle()
        with _capturing, _no_collection(), _own_workspaces(), torch.cuda.stream(aside):
            before = _reserved(device)
            # Other threads may allocate meanwhile, as data loaders and NCCL do.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                self._abandon(pool)
                raise
            with warnings.catch_warnings():
                # A sequence of views launches nothing, and is repeated like any other.
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                self._graph.capture_end()
            self.bytes = max(0, _reserved(device) - before)
        current.wait_stream(aside)
        return result

    def _abandon(self, pool: Any) -> None:
        """Ends a capture in which something was raised, perhaps because of the capture."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            # Where the host waited for the device, the capture is void, and torch leaves its
            # allocator and its generator of random numbers as if it still went on.
            with suppress(RuntimeError):
                internals.end_allocate_to_pool(self.device.index, pool)
            other = torch.cuda.CUDAGraph()
            other.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self.device)
            other.capture_end()

    def replay(self) -> None:
        self._graph.replay()

    @staticmethod
    def stream(device: torch.device) -> int:
        return internals.cuda_stream(device.index)

    @staticmethod
    def under_way() -> bool:
        return internals.cuda_captures()

    @staticmethod
    def memory(device: torch.device) -> int:
        return int(torch.cuda.get_device_properties(device).total_memory)

    @staticmethod
    def free(device: torch.device) -> int:
        return int(torch.cuda.mem_get_info(device)[0])

    @staticmethod
    def allocated(device: torch.device) -> int:
        return int(torch.cuda.memory_allocated(device))

    @staticmethod
    def event(device: torch.device) -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    @staticmethod
    def objection() -> str | None:
        for name in ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
            if os.environ.get(name, "0") not in ("", "0"):
                return f"{name} is set"
        if torch.cuda.get_allocator_backend() != "native":
            return "memory is not that of torch's own allocator"
        if internals.cuda_history():
            return "the history of memory is recorded"
        return None


_TYPES: dict[str, type[Graph]] = {"cuda": CudaGraph}


def graph_type(device: torch.device) -> type[Graph] | None:
    """How launches on ``device`` are recorded; None if they cannot be."""
    return _TYPES.get(device.type)


def _reserved(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("reserved_bytes.all.current", 0))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps Python's collector from freeing CUDA objects in the middle of a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Has cuBLAS take its workspace from the memory of the graph, and forget it afterwards.

    Otherwise all graphs and eager calls of a stream would share one, also where they overlap.
    """
    internals.clear_cublas_workspaces()
    try:
        yield
    finally:
        internals.clear_cublas_workspaces()
