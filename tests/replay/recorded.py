"""Launches recorded on a CPU, so that the logic of replaying is tested without a GPU.

What a CUDA graph does to memory, this does too: every result has one address, and a replay writes
new values there, whoever holds it. Python numbers are as they were when it was recorded, and
recording changes nothing outside of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from opfuser.engine.replayed import graphs


class _Call(NamedTuple):
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    places: tuple[int, ...]
    """Addresses of the tensors among the arguments."""

    def given(self) -> Any:
        """The arguments; of one whose memory has moved, what a graph would find where it was."""
        places = iter(self.places)

        def there(t: Tensor) -> Tensor:
            has_moved = t.data_ptr() != next(places) and t.is_floating_point()
            return torch.full_like(t, float("nan")) if has_moved else t

        return tree_map_only(Tensor, there, (self.args, self.kwargs))

    def results(self) -> Iterator[Tensor]:
        return _tensors(self.result)


class _Recorder(TorchDispatchMode):
    active = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.made: dict[int, int] = {}
        """Bytes of each memory that was allocated, by its address."""
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        """What was written to and not allocated here, with its value before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)  # begins or ends a range of the host: no launch
        for t in _written(func, args, kwargs):
            memory = t.untyped_storage()._cdata
            if memory not in self.made and memory not in self.before:
                self.before[memory] = t, t.clone()
        given = {_memory(t) for t in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        # Addresses, as a graph has them: a tensor whose data is swapped later is not followed.
        call = tree_map_only(Tensor, Tensor.detach, (args, kwargs, result))
        places = tuple(t.data_ptr() for t in _tensors(call[:2]))
        self.calls.append(_Call(func, *call, places))
        for t in _tensors(result):
            if _memory(t) not in given:
                self.made[_memory(t)] = t.untyped_storage().nbytes()
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (t for t in tree_leaves(tree) if isinstance(t, Tensor))


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[n] if n < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


class Times:
    """Times of an imagined device and its host, in seconds a pass; each pass advances them.

    Attributes:
        usual, replayed: of the host and of the device, for a pass of either kind.
        between: from the end of a call to the beginning of the next one.
        lag: how many events the device is behind the host.
    """

    def __init__(self) -> None:
        self.usual = 5e-3, 5e-3
        self.replayed = 1e-4, 1e-3
        self.between = 0.0
        self.lag = 0
        self.host = self.device = 0.0
        self.events = 0
        self.has_replayed = False

    def event(self) -> Event:
        if self.events % 2:  # the end of a pass
            host, device = self.replayed if self.has_replayed else self.usual
            self.host += host
            self.device += device
            self.has_replayed = False
        elif not self.events % 4:
            self.device += self.between
        self.events += 1
        return Event(self)

    def perf_counter(self) -> float:
        return self.host


class Event:
    """A moment on the imagined device."""

    def __init__(self, times: Times) -> None:
        self.times, self.number, self.device = times, times.events, times.device

    def query(self) -> bool:
        return self.times.events >= self.number + self.times.lag

    def elapsed_time(self, end_event: Event) -> float:
        return 1e3 * (end_event.device - self.device)


class RecordedGraph:
    """Stands for a CUDA graph; see :class:`opfuser.engine.replayed.graphs.CudaGraph`."""

    limit = 2**30
    times = Times()
    why_not: str | None = None

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0
        self.calls: list[_Call] = []

    def capture(self, function: Callable[[], Any]) -> Any:
        recorder = _Recorder()
        _Recorder.active += 1
        try:
            with torch.random.fork_rng(devices=[]), recorder:
                result = function()
        finally:
            _Recorder.active -= 1
            for t, value in recorder.before.values():
                t.copy_(value)
        self.calls = recorder.calls
        self.bytes = sum(recorder.made.values())
        return result

    def replay(self) -> None:
        RecordedGraph.times.has_replayed = True
        with _disable_current_modes():  # launches of a graph pass no dispatcher
            for call in self.calls:
                args, kwargs = call.given()
                for old, new in zip(call.results(), _tensors(call.function(*args, **kwargs))):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    @staticmethod
    def stream(device: torch.device) -> int:
        return 0

    @staticmethod
    def under_way() -> bool:
        return _Recorder.active > 0

    @classmethod
    def memory(cls, device: torch.device) -> int:
        return cls.limit

    @classmethod
    def free(cls, device: torch.device) -> int:
        return cls.limit

    @staticmethod
    def allocated(device: torch.device) -> int:
        return 0

    @classmethod
    def event(cls, device: torch.device) -> Event:
        return cls.times.event()

    @classmethod
    def objection(cls) -> str | None:
        return cls.why_not


@contextmanager
def replayed_on_a_cpu() -> Iterator[None]:
    """Calls on a CPU are recorded so; no setting of the library says how a device records."""
    with mock.patch.dict(graphs._TYPES, cpu=RecordedGraph):
        yield
