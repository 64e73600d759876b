"""Gradients of weights on a stream of their own, beside the rest of a backward pass.

Nothing in a backward pass reads the gradient of a weight. Its GEMM leaves multiprocessors idle in
its last wave, and so do the passes over memory between the GEMMs: on two streams they share the
GPU. Every GEMM waits for what the pass has launched before, and the pass ends once all are done:
what receives its gradients, hooks and reductions among them, need not know of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .errors import ArgumentError, explain
from .torch_internals import current_node

__all__ = ["OverlappedPass", "Side", "WgradOverlap", "compute", "overlap_wgrad"]

# GEMMs that may be on their way at a time. Their operands stay in memory, and are not overwritten.
IN_FLIGHT = 2

T = TypeVar("T")


class Side(Protocol):
    """A stream for GEMMs beside the stream of a backward pass."""

    def run(self, work: Callable[[], T]) -> tuple[T, Any]:
        """Launches ``work`` behind all that the pass has launched so far.

        Returns:
            What it returns, which the pass may hand out but not read, and when it is done.
        """

    def wait(self, event: Any) -> None:
        """Has what the pass launches from now on wait for the end of some work."""


class CudaSide:
    """A stream of a GPU beside the current one.

    Args:
        stream: on the GPU of the pass.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.main = torch.cuda.current_stream(stream.device)

    def run(self, work: Callable[[], T]) -> tuple[T, torch.cuda.Event]:
        """As in :class:`Side`."""
        self.stream.wait_stream(self.main)
        with torch.cuda.stream(self.stream):
            result = work()
        results = result if isinstance(result, (list, tuple)) else [result]
        for made in results:
            if isinstance(made, Tensor):  # its memory belongs to the other stream
                made.record_stream(self.main)
        return result, self.stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """As in :class:`Side`."""
        self.main.wait_event(event)


class _UnderWay(threading.local):
    overlap: OverlappedPass | None = None


_under_way = _UnderWay()


class OverlappedPass:
    """One backward pass. It holds the operands of a GEMM until the pass waits for its end."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.pending: deque[tuple[Any, Callable[[], Any]]] = deque()
        self.node = current_node() or object()  # which is nobody's, where none is told
        self.outer = _under_way.overlap
        _under_way.overlap = self

    def run(self, work: Callable[[], T]) -> T:
        if len(self.pending) == IN_FLIGHT:
            self.wait()
        result, event = self.side.run(work)
        self.pending.append((event, work))
        return result

    def wait(self) -> None:
        event, _ = self.pending[0]
        self.side.wait(event)
        self.pending.popleft()

    def end(self) -> None:
        """Waits for all GEMMs."""
        _under_way.overlap = self.outer
        while self.pending:
            self.wait()


def compute(work: Callable[[], T]) -> T:
    """What ``work`` returns: a gradient or several; or nothing, where it writes them itself.

    The pass under way must not read them.
    """
    overlap = _under_way.overlap
    # Another node's gradients, of a backward pass that an operation's backward runs, are read
    # before this pass ends.
    if overlap is None or overlap.node is not current_node():
        return work()
    return overlap.run(work)


class WgradOverlap:
    """What :func:`overlap_wgrad` has switched on; as a context manager, until the block ends.

    Args:
        ops: the operations that have weights.
        stream: as there.
    """

    def __init__(self, ops: tuple[nn.Module, ...], stream: torch.cuda.Stream | None) -> None:
        self.ops = ops
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        if stream is not None:
            self._streams[stream.device] = stream
        for op in ops:
            op.wgrad_overlap = self  # type: ignore[assignment]

    def side(self, device: torch.device) -> Side | None:
        """A stream beside the current one of a device, or None: a CPU has none."""
        if device.type != "cuda":
            return None
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        return CudaSide(stream)

    def begin(self, device: torch.device) -> OverlappedPass | None:
        """A backward pass, to be ended by its ``end()``; None where nothing can overlap."""
        side = self.side(device)
        return None if side is None else OverlappedPass(side)

    def remove(self) -> None:
        """Switches it off."""
        for op in self.ops:
            if op.__dict__.get("wgrad_overlap") is self:
                op.wgrad_overlap = None  # type: ignore[assignment]

    def __enter__(self) -> WgradOverlap:
        return self

    def __exit__(self, *args: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # streams belong to a process: copies of operations have none


def overlap_wgrad(module: nn.Module, stream: torch.cuda.Stream | None = None) -> WgradOverlap:
    """Has the gradients of weights in ``module`` computed on a stream of their own.

    In backward passes of sequences that contain these operations, the GEMMs of weight gradients run
    beside all else on a GPU. They are done before a sequence returns its gradients, so that
    hooks, ``main_grad``, DistributedDataParallel and ``fully_shard`` see what they always see. The
    values are the same, bit for bit. At most two GEMMs are on their way at a time: until they are
    done, their operands stay in memory and are not overwritten, where a backward pass alone would
    have done so. Nothing happens on a CPU, and in what torch.compile traces.

    Args:
        module: a Sequential, an operation, or any module that contains some.
        stream: of the GPU on which the passes run; None is one that is made for it.

    Returns:
        What switches it off again: ``remove()``, or the end of a ``with`` block.

    Raises:
        ArgumentError: no operation in ``module`` has a weight to multiply by.
    """
    found = (op for m in module.modules() for op in getattr(m, "basic_ops", (m,)))
    ops = tuple({id(op): op for op in found if hasattr(type(op), "wgrad_overlap")}.values())
    if not ops:
        raise ArgumentError(
            explain(
                "overlap_wgrad needs linear operations",
                received=f"a {type(module).__name__} without any",
            )
        )
    return WgradOverlap(ops, stream)
