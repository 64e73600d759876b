"""From a choice of constants to a running kernel, with little host time in between.

Triton's own ``kernel[grid](...)`` binds arguments by name, specialises each of them and looks the
binary up under a string, at every call. A :class:`Launch` has done that once for its constants;
what may still differ between two calls is a few properties of the arguments, and those are its key.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["INTERPRETED", "Launch", "Recorded", "multiprocessors", "recorded", "runs"]

DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AVAILABLE = importlib.util.find_spec("triton") is not None

# What a launch without a GPU is planned for: an H100 or H200.
_MULTIPROCESSORS = 132


class _State:
    """Whether kernels take tensors of any device, and where launches are noted instead of run."""

    everywhere: bool = INTERPRETED
    record: list[Recorded] | None = None


class Recorded(NamedTuple):
    """A launch that was noted.

    Attributes:
        launch: what would have run.
        grid: programs along three axes.
        tensors, ints, floats: its arguments.
    """

    launch: Launch
    grid: tuple[int, int, int]
    tensors: tuple[Tensor | None, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...]

    @property
    def traffic(self) -> int:
        """Bytes of all tensors that the kernel is given.

        One that it changes in place counts twice, as it is handed over as input and as output.
        """
        return sum(t.numel() * t.element_size() for t in self.tensors if t is not None)


def runs(x: Tensor) -> bool:
    """Whether there are kernels for ``x``: on a GPU, in fp16, bf16 or fp32, and with Triton."""
    return (x.is_cuda or _State.everywhere) and AVAILABLE and x.dtype in DTYPES


@contextmanager
def recorded() -> Iterator[list[Recorded]]:
    """Notes launches instead of running them, on tensors of any device: those of ``meta``, say."""
    before = _State.everywhere, _State.record
    launches: list[Recorded] = []
    _State.everywhere, _State.record = True, launches
    try:
        yield launches
    finally:
        _State.everywhere, _State.record = before


_counts: dict[int, int] = {}


def multiprocessors(x: Tensor) -> int:
    """Streaming multiprocessors of the device that ``x`` is on."""
    if not x.is_cuda:
        return _MULTIPROCESSORS
    index = x.get_device()
    count = _counts.get(index)
    if count is None:
        count = torch.cuda.get_device_properties(index).multi_processor_count
        _counts[index] = count
    return count


class Launch:
    """A Triton function with its constants chosen. Made once, by a cached launch rule.

    The function's parameters come in the order of the arguments: tensors (or None), ints, floats,
    constants. Its module is imported at the first launch, for Triton takes long to import.

    Args:
        function: ``"module:name"`` below ``opfuser.kernels.device``.
        constants: values of its ``tl.constexpr`` parameters, by name, in their order. A string
            that starts with ``@`` names a Triton function as ``function`` does; a Triton function
            may also stand there itself.
        num_warps: warps of 32 threads per program.
        num_stages: depth of software pipelining of loops.
    """

    __slots__ = (
        "_compiled",
        "_function",
        "_values",
        "constants",
        "name",
        "num_stages",
        "num_warps",
    )

    def __init__(
        self, function: str, constants: dict[str, Any], *, num_warps: int = 4, num_stages: int = 3
    ) -> None:
        self.name = function
        self.constants = constants
        self.num_warps = num_warps
        self.num_stages = num_stages
        self._function: Any = None
        self._values: tuple[Any, ...] = ()
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    @property
    def function(self) -> Any:
        """The Triton function."""
        if self._function is None:
            self._values = tuple(map(_resolved, self.constants.values()))
            self._function = _load(self.name)
        return self._function

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of the constants, in the order of the function's parameters."""
        assert self.function is not None
        return self._values

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...],
        ints: tuple[int, ...] = (),
        floats: tuple[float, ...] = (),
    ) -> None:
        """Launches on the current stream of the device of the first tensor; no programs: nothing.

        Args:
            grid: programs along three axes.
            tensors: pointer arguments; the first one is never None.
            ints: integer arguments.
            floats: fp32 arguments.
        """
        if _State.record is not None:
            _State.record.append(Recorded(self, grid, tensors, ints, floats))
            return
        x, y, z = grid
        if not (x and y and z):
            return
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        address = 0
        properties: list[Any] = [device]
        for t in tensors:
            if t is None:
                properties.append(None)
            else:
                properties.append(t.dtype)
                address |= t.data_ptr()
        for i in ints:
            # What Triton tells apart: 1 is a constant, a multiple of 16 allows wide accesses, and
            # beyond 31 bits the type is another.
            properties.append(1 if i == 1 else (i & 15 == 0, i >> 31))
        key = tuple(properties)
        entry = None if address & 15 else self._compiled.get(key)
        if entry is None or device != torch._C._cuda_getDevice():
            args = (*tensors, *ints, *floats)
            self._launch_by_triton(None if address & 15 else key, grid, args)
            return
        run, function, metadata = entry
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(x, y, z, stream, function, metadata, None, None, None,
            *tensors, *ints, *floats, *self._values)  # fmt: skip

    def _launch_by_triton(
        self, key: tuple[Any, ...] | None, grid: tuple[int, int, int], args: Sequence[Any]
    ) -> None:
        """Compiles if need be. Keeps the binary for aligned tensors, which nearly all are."""
        function = self.function
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if INTERPRETED:
            function[grid](*args, *self._values, **options)
            return
        with torch.cuda.device(args[0].device):
            kernel = function[grid](*args, *self._values, **options)
        if key is not None and hasattr(kernel, "packed_metadata"):
            self._compiled[key] = kernel.run, kernel.function, kernel.packed_metadata

    def __repr__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.name}({constants}, num_warps={self.num_warps}, num_stages={self.num_stages})"


def _load(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"opfuser.kernels.device.{module}"), function)


def _resolved(value: Any) -> Any:
    """``value`` with names of Triton functions, in tuples too, replaced by the functions."""
    if isinstance(value, tuple):
        return tuple(map(_resolved, value))
    return _load(value[1:]) if isinstance(value, str) and value[:1] == "@" else value
