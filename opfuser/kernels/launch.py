"""From a choice of constants to a running kernel, with little host time in between.

Triton's own ``kernel[grid](...)`` binds arguments by name, specialises each of them and looks the
binary up under a string, at every call. A :class:`Launch` has done that once for its constants;
what may still differ between two calls is a few properties of the arguments, and those are its key.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import torch_internals as internals
from ..errors import CompilerError
from ..events.kinds import KernelCompiled
from ..events.telling import emit
from ..runtime import compilers
from ..runtime.recording import watching
from ..runtime.tracing import functional

DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AVAILABLE = importlib.util.find_spec("triton") is not None

# What a launch without a GPU is planned for: an H100 or H200.
_MULTIPROCESSORS = 132


_MAX_RECENT = 256

# The launcher, the binary's function, what comes between it and the kernel's arguments, and whether
# these come in a tuple.
_Entry = tuple[Any, Any, tuple[Any, ...], bool]


class _State:
    """What applies to all launches.

    Attributes:
        everywhere: whether kernels take tensors of any device.
        record: where launches are noted instead of run.
    """

    everywhere: bool = INTERPRETED
    only_meta: bool = False
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


def runs(x: Tensor, dtypes: frozenset[torch.dtype] = DTYPES) -> bool:
    """Whether there are kernels for ``x``: on a GPU, in one of the dtypes, and with Triton.

    Under ``torch.vmap`` there are none: what it hands over has no memory of its own. Nor are there
    while torch.compile traces: it makes its own, fused with what stands around.
    """
    taken = x.is_cuda or (_State.everywhere and (x.is_meta or not _State.only_meta))
    return taken and AVAILABLE and x.dtype in dtypes and not functional()


@contextmanager
def recorded(*, only_meta: bool = False) -> Iterator[list[Recorded]]:
    """Notes launches instead of running them, on tensors of any device: those of ``meta``, say.

    Args:
        only_meta: whether tensors of other devices, which another thread may have, are left alone.
    """
    before = _State.everywhere, _State.only_meta, _State.record
    launches: list[Recorded] = []
    _State.everywhere, _State.only_meta, _State.record = True, only_meta, launches
    try:
        yield launches
    finally:
        _State.everywhere, _State.only_meta, _State.record = before


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


_capabilities: dict[int, tuple[int, int]] = {}


def _capability(x: Tensor) -> tuple[int, int]:
    index = x.get_device()
    found = _capabilities.get(index)
    if found is None:
        _capabilities[index] = found = torch.cuda.get_device_capability(index)
    return found


def has_fp8(x: Tensor) -> bool:
    """Whether the GPU that ``x`` is on converts to fp8: those from compute capability 8.9 on."""
    return not x.is_cuda or _capability(x) >= (8, 9)


def has_fp4(x: Tensor) -> bool:
    """Whether the GPU that ``x`` is on converts to fp4: those from compute capability 10.0 on."""
    return not x.is_cuda or _capability(x) >= (10, 0)


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
        only_reads: position of a tensor that may be another one's memory and is not written to.
            Of other tensors those that are given twice are changed in place.
    """

    __slots__ = (
        "_compiled",
        "_function",
        "_recent",
        "_values",
        "constants",
        "name",
        "num_stages",
        "num_warps",
        "only_reads",
    )

    def __init__(
        self,
        function: str,
        constants: dict[str, Any],
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        only_reads: int | None = None,
    ) -> None:
        self.name = function
        self.constants = constants
        self.num_warps = num_warps
        self.num_stages = num_stages
        self.only_reads = only_reads
        self._function: Any = None
        self._values: tuple[Any, ...] = ()
        # By what Triton tells apart, and by the very integers, which are the same at most calls.
        self._compiled: dict[tuple[Any, ...], _Entry] = {}
        self._recent: dict[tuple[Any, ...], _Entry] = {}

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
            tensors: pointer arguments; the first one is never None.
        """
        if _State.record is not None and (tensors[0].is_meta or not _State.only_meta):  # type: ignore[union-attr]
            _State.record.append(Recorded(self, grid, tensors, ints, floats))
            return
        if watching.watcher is None:
            self._run(grid, tensors, ints, floats)
            return
        with internals.DisableTorchFunction():  # what Triton asks of tensors is no call of the pass
            self._run(grid, tensors, ints, floats)
        watching.watcher.note_launch(self, grid, tensors, ints, floats)

    def _run(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...],
        ints: tuple[int, ...],
        floats: tuple[float, ...],
    ) -> None:
        x, y, z = grid
        if not (x and y and z):
            return
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        # On an H200 the launcher takes 0.1 to 0.2 us less for a pointer than for a tensor.
        aligned, elsewhere = True, False
        pointers: list[int | None] = []
        properties: list[Any] = [device, ints]
        for t in tensors:
            if t is None:
                pointers.append(None)
                properties.append(None)
            else:
                pointer = t.data_ptr()
                if pointer & 15:
                    aligned = False
                if t.get_device() != device:
                    elsewhere = True
                pointers.append(pointer)
                properties.append(t.dtype)
        if not aligned:  # Triton tells apart which ones are
            properties.append(tuple([p is None or p & 15 == 0 for p in pointers]))
        key = tuple(properties)
        # Triton is to refuse what is elsewhere, which it cannot see from a pointer.
        entry = None if elsewhere else self._recent.get(key) or self._find(key)
        if entry is None or device != internals.cuda_device():
            args = (*tensors, *ints, *floats)
            self._launch_by_triton(None if elsewhere else key, grid, args)
            return
        run, function, before, packed = entry
        stream = internals.cuda_stream(device)
        if packed:
            args = (*pointers, *ints, *floats, *self._values)
            run(x, y, z, stream, function, *before, args)
        else:
            run(x, y, z, stream, function, *before, *pointers, *ints, *floats, *self._values)

    def prepared(
        self, tensors: tuple[Tensor | None, ...], ints: tuple[int, ...]
    ) -> tuple[Any, Any, tuple[Any, ...], bool, tuple[Any, ...]] | None:
        """What a call with such arguments hands to Triton's launcher; None: what is not known.

        The launcher, the binary's function, what comes before the arguments of the kernel, whether
        these come in a tuple, and the constants behind them. It holds for tensors of these dtypes
        that begin at multiples of 16 bytes where these do.
        """
        first = tensors[0]
        assert first is not None
        if INTERPRETED:
            return None
        properties: list[Any] = [None if t is None else t.dtype for t in tensors]
        aligned = tuple([t is None or t.data_ptr() & 15 == 0 for t in tensors])
        if not all(aligned):
            properties.append(aligned)
        entry = self._recent.get((first.get_device(), ints, *properties))
        return None if entry is None else (*entry, self._values)

    def _find(self, key: tuple[Any, ...]) -> _Entry | None:
        """The binary for integers that came with this key for the first time."""
        entry = self._compiled.get(_general(key))
        if entry is not None:
            if len(self._recent) >= _MAX_RECENT:
                self._recent.clear()
            self._recent[key] = entry
        return entry

    def _launch_by_triton(
        self, key: tuple[Any, ...] | None, grid: tuple[int, int, int], args: Sequence[Any]
    ) -> None:
        """Compiles if need be; keeps the binary, unless the key is None."""
        function = self.function
        if INTERPRETED:
            function[grid](*args, *self._values, **self.options)
            return
        began = time.perf_counter()
        with torch.cuda.device(args[0].device):
            try:
                kernel = function[grid](*args, *self._values, **self.options)
            except Exception as error:
                lacking = compilers.reason(error)
                if lacking is None:
                    raise
                raise CompilerError.explained(lacking, where=self.name) from error
        entry = None if key is None else internals.launcher_of(kernel)
        if key is not None and entry is not None:
            general = _general(key)
            is_new = general not in self._compiled
            self._compiled[general] = entry
            if is_new and KernelCompiled.wanted:
                kinds, seconds = tuple(map(_kind, args)), time.perf_counter() - began
                emit(KernelCompiled(self.name, repr(self), kinds, args[0].device, seconds))

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told besides the arguments."""
        # Products and sums become one operation, as was the default up to triton 3.9; that of 3.10
        # is announced to be another one, and 3.9 warns where it is left open.
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }

    def __repr__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.name}({constants}, num_warps={self.num_warps}, num_stages={self.num_stages})"


def _general(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key with no more of the integers than what Triton tells apart.

    1 is a constant, a multiple of 16 allows wide accesses, and beyond 31 bits the type is another.
    """
    device, ints, *dtypes = key
    return (device, *[1 if i == 1 else (i & 15 == 0, i >> 31) for i in ints], *dtypes)


def _kind(argument: Tensor | int | float | None) -> str:
    """What Triton tells apart of an argument, as text."""
    if argument is None:
        return "None"
    if isinstance(argument, Tensor):
        return f"{str(argument.dtype).removeprefix('torch.')}*"
    if isinstance(argument, float):
        return "float32"
    return "1" if argument == 1 else "16n" if argument & 15 == 0 else "int"


def _load(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"opfuser.kernels.device.{module}"), function)


def _resolved(value: Any) -> Any:
    """``value`` with names of Triton functions, in tuples too, replaced by the functions."""
    if isinstance(value, tuple):
        return tuple(map(_resolved, value))
    return _load(value[1:]) if isinstance(value, str) and value[:1] == "@" else value
