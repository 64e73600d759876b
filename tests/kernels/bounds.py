"""pytest plugin: accesses of interpreted kernels are held to the tensors that they are of.

Triton's interpreter runs kernels on the host's memory, where whatever is read or written beyond a
tensor passes in silence. With this plugin, which ``tests/conftest.py`` names, every lane that no
mask excludes has to lie among the elements of one argument: the one that its pointer comes from.
Memory of another tensor will not do, nor will gaps between the rows of a view. What a pointer that
was read from memory points to has to lie in a tensor that Python knows.

So that whatever is computed from a pointer tells whose it is, an argument's address carries its
number in the bits that no address has, until memory is accessed. Hints to the compiler, which makes
accesses wide by them, are held to the values that they are about.

The interpreter takes the place of Triton's language anew for each function that a kernel calls;
here it does so once a launch. What else takes its time is in tests/kernels/quick_interpreter.py.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import triton
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    from tests.kernels.quick_interpreter import hasten

BITS = 48  # of an address
COUNTS: Counter[str] = Counter()
KERNELS: set[str] = set()
_ADDRESS = np.uint64(2**BITS - 1)
_IMPORTED: list[Tensor] = []


class OutOfBounds(AssertionError):  # noqa: N818  # what an access is
    """A kernel accesses what is not of the tensor, or hints at what is not so."""


class Extent(NamedTuple):
    """Where the elements of a tensor are.

    Attributes:
        name: of the argument.
        start: address of the first element.
        steps: bytes from one to the next, and how many there are, from the outermost dimension to
            runs of bytes; dimensions that follow one another without a gap count as one.
        memory: addresses at which the storage begins and ends.
    """

    name: str
    start: int
    steps: list[tuple[int, int]]
    memory: tuple[int, int]

    @classmethod
    def of(cls, name: str, t: Tensor) -> Extent:
        size = t.element_size()
        dims = [(stride * size, n) for stride, n in zip(t.stride(), t.shape) if n != 1 and stride]
        steps: list[tuple[int, int]] = []
        for stride, n in [*sorted(dims, reverse=True), (1, size if t.numel() else 0)]:
            more = 0
            if steps and steps[-1][0] <= stride * n:  # no gap; or they overlap
                outer, count = steps.pop()
                more = (count - 1) * outer // stride
            steps.append((stride, n + more))
        storage = t.untyped_storage()
        begin = storage.data_ptr()
        return cls(name, t.data_ptr(), steps, (begin, begin + storage.nbytes()))

    def __str__(self) -> str:
        """Bytes, as runs of them, and how far those are apart."""
        sizes = " x ".join(str(n) for _, n in self.steps)
        return sizes + "".join(f", {stride} apart" for stride, _ in self.steps[:-1])

    def outside(self, addresses: Any, size: int) -> Any:
        """Which accesses of so many bytes are not of the tensor."""
        rest = addresses.astype(np.int64) - self.start
        wrong = rest < 0
        for stride, n in self.steps[:-1]:
            index, rest = np.divmod(rest, stride)
            wrong |= index >= n
        return wrong | (rest + size > self.steps[-1][1])


class _Launch:
    """The launch under way: its kernel, names of its arguments' copies, and where those are."""

    kernel = ""
    names: dict[int, str] = {}  # noqa: RUF012  # replaced, not changed
    extents: list[Extent] = []  # noqa: RUF012
    live: list[Extent] | None = None
    interpreted: set[str] = set()  # noqa: RUF012  # of Triton's modules


def check(what: str, pointers: Any, mask: Any | None) -> Any:
    """The addresses of pointers; raises if one that is not masked is not of its tensor."""
    data = pointers.data
    addresses = type(pointers)(data & _ADDRESS, pointers.dtype)
    if mask is not None:
        mask = mask if isinstance(mask, np.ndarray) else mask.data
        data = data[mask.astype(bool, copy=False)]
    lanes = data.reshape(-1)
    if not lanes.size:
        return addresses
    COUNTS["accesses"] += 1
    COUNTS["lanes"] += lanes.size
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    first = int(lanes[0]) >> BITS
    if (lanes >> np.uint64(BITS) != first).any() or first > len(_Launch.extents):
        raise _error(f"{what} at addresses of several tensors, or of none")
    lanes = lanes & _ADDRESS
    if not first:  # an address from memory
        if _Launch.live is None:
            _Launch.live = [Extent.of("", t) for t in live_tensors()]
        if all(extent.outside(lanes, size).any() for extent in _Launch.live):
            raise _error(f"{what} of {size} bytes at an address in no tensor")
        return addresses
    extent = _Launch.extents[first - 1]
    wrong = extent.outside(lanes, size)
    if wrong.any():
        begin, end = extent.memory
        at = int(lanes[wrong][0])
        place = "the view" if begin <= at <= end - size else "the memory of"
        raise _error(
            f"{what} of {size} bytes outside {place} {extent.name}: at byte {at - extent.start} of "
            f"{extent}; {wrong.sum()} of {lanes.size} lanes"
        )
    return addresses


def check_hint(key: str, handle: Any) -> None:
    """Raises if values are not in blocks of neighbors that begin at multiples, as hints say."""
    if key != "tt.contiguity":
        return
    values = handle.data.astype(np.int64)
    multiples = handle.attr.get("tt.divisibility", [1] * values.ndim)
    for axis, (length, multiple) in enumerate(zip(handle.attr[key], multiples)):
        blocks = np.moveaxis(values, axis, -1).reshape(-1, length)
        if (blocks != blocks[:, :1] + np.arange(length)).any() or (blocks[:, 0] % multiple).any():
            raise _error(f"not {length} neighbors from a multiple of {multiple} on, as hints say")


def live_tensors() -> list[Tensor]:
    """Those in memory of the host that Python knows."""
    found = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)] + _IMPORTED
    found = [t for t in found if t.device.type == "cpu" and t.layout == torch.strided]
    return [t for t in found if not torch._C._functorch.is_functorch_wrapped_tensor(t)]


def _error(text: str) -> OutOfBounds:
    """With the kernel, and the line under way."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or frame.f_globals["__name__"].startswith("triton."):
        frame = frame.f_back
    code = frame.f_code
    file = os.path.relpath(code.co_filename)
    return OutOfBounds(f"{_Launch.kernel}: {text} ({code.co_name}, {file}:{frame.f_lineno})")


def watch() -> None:
    """Checks all that the interpreter runs from now on."""
    Builder, Executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    Handle = interpreter.TensorHandle
    load, store = Builder.create_masked_load, Builder.create_masked_store
    modify, compare = Builder.create_atomic_rmw, Builder.create_atomic_cas
    copies, call, convert = Executor._init_args_hst, Executor.__call__, interpreter._implicit_cvt
    hint, interpret = Handle.set_attr, interpreter._patch_lang

    def named(self: Any, args: Any, kwargs: Any) -> Any:
        copied, more = copies(self, args, kwargs)
        rows = [*zip(self.arg_names, copied), *more.items()]
        _Launch.kernel, _Launch.extents, _Launch.live = self.fn.__name__, [], None
        _Launch.interpreted = set()
        _Launch.names = {id(arg): name for name, arg in rows}
        COUNTS["launches"] += 1
        KERNELS.add(f"{self.fn.__module__}.{self.fn.__name__}")
        return copied, more

    def interpreted(fn: Any) -> Any:
        names = fn.__globals__.get("_modules_of_the_language")
        if names is None:
            known = {id(value) for value in fn.__globals__.values()}
            both = triton.language, triton.language.core
            names = {module.__name__ for module in both if id(module) in known}
            fn.__globals__["_modules_of_the_language"] = names
        if names <= _Launch.interpreted:
            return None  # of the functions that are called; a launch takes back its own
        _Launch.interpreted |= names
        return interpret(fn)

    def numbered(arg: Any) -> Any:
        made = convert(arg)
        if hasattr(arg, "data_ptr"):
            name = _Launch.names.get(id(arg), "an argument")
            _Launch.extents.append(Extent.of(name, getattr(arg, "base", arg)))
            made.handle.data = made.handle.data + np.uint64(len(_Launch.extents) << BITS)
        return made

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            call(self, *args, **kwargs)
        except InterpreterError as error:  # one around another for each function that was called
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OutOfBounds):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None

    def hinted(self: Any, key: str, values: Any) -> None:
        hint(self, key, values)
        check_hint(key, self)

    interpreter._implicit_cvt, interpreter._patch_lang = numbered, interpreted
    Executor._init_args_hst, Executor.__call__, Handle.set_attr = named, launched, hinted
    Builder.create_masked_load = lambda self, at, mask, *rest, **more: load(
        self, check("load", at, mask), mask, *rest, **more
    )
    Builder.create_masked_store = lambda self, at, value, mask, *rest, **more: store(
        self, check("store", at, mask), value, mask, *rest, **more
    )
    Builder.create_atomic_rmw = lambda self, op, at, value, mask, *rest: modify(
        self, op, check("atomic", at, mask), value, mask, *rest
    )
    Builder.create_atomic_cas = lambda self, at, *rest: compare(
        self, check("atomic", at, None), *rest
    )


def pytest_collection_finish() -> None:
    """Python lists no more what tests/conftest.py freezes."""
    if INTERPRETED:
        _IMPORTED.extend(live_tensors())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tells what was checked."""
    if COUNTS:
        counts = ", ".join(f"{count} {what}" for what, count in COUNTS.items())
        terminalreporter.write_line(f"within bounds: {counts} of {len(KERNELS)} kernels")


if INTERPRETED:
    hasten()
    watch()
