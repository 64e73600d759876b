"""Records what a pass of a program calls, as straight-line Python.

The functions of a program call operations, which decide by shapes, strides and modes what to call.
Where these are the same again, so is every decision. A :class:`Recorder` watches one pass and notes
each call of a torch function and each launch of a kernel, with the tensors by name and all else as
constants. Their lines are a program without decisions, for calls like the one that was watched.

What cannot be repeated so is refused: values that the host reads, tensors from elsewhere, writes to
tensors of the caller, memory that nothing is seen to write to.
"""

from __future__ import annotations

import builtins
import keyword
import math
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import torch_internals as internals
from ..buffer_reuse import any_overlap
from ..recording import watched
from .emission import Text
from .plan import Step
from .recorded_memory import Allocation, Call, Launched, Several, View, marked
from .recorded_text import Straight, text_of


class NotRecordableError(Exception):
    """Why a pass cannot be repeated by its calls alone."""


# What reads values on the host, or returns sizes that depend on them.
_HOST = frozenset(
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __contains__ equal "
    "allclose is_nonzero nonzero masked_select unique unique_consecutive bincount argwhere "
    "histogram combinations __array__ cpu cuda set_ resize_ resize_as_ t_ "
    "transpose_ squeeze_ unsqueeze_ swapaxes_ requires_grad_ register_hook backward "
    "_local_scalar_dense".split()
)
_EMPTY = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted".split()
)
# Change nothing, and what they return is another name for the same values.
_VIEWS = frozenset(
    "view view_as view_as_real view_as_complex reshape flatten unflatten squeeze unsqueeze t "
    "transpose permute movedim swapaxes expand expand_as narrow select unbind split "
    "split_with_sizes chunk as_strided detach".split()
)
_RESHAPING = frozenset("flatten unflatten reshape squeeze unsqueeze view_as".split())
# Return what they are given where nothing is to be done.
_MAYBE_SAME = frozenset(
    "contiguous to type_as long float half bfloat16 double reshape flatten".split()
)
# Answered by what guards compare.
_GUARDED = frozenset(
    "shape size stride dim ndim ndimension dtype device numel nelement is_contiguous is_cuda "
    "is_cpu is_meta is_floating_point is_complex requires_grad layout itemsize element_size nbytes "
    "get_device __len__ is_sparse is_inference is_conj is_neg".split()
)
# Compared with the answer by guards of calls in which they were asked for.
_ASKED = frozenset("is_leaf grad_dtype".split())
_PLACE = frozenset("data_ptr untyped_storage storage_offset".split())
# Whose questions about addresses change nothing but what is written to, which is looked at apart,
# or are asked again before each call.
_MAY_ASK = (
    ("opfuser.buffer_reuse", "_counts"),
    ("opfuser.quantization.state", "_current_parts"),
)
_OUT = ("out", "grad_input")


def memory_of_all(tensors: Iterable[Tensor | None]) -> set[int]:
    """The addresses of the memory of tensors.

    Raises:
        NotRecordableError: one has none of its own.
    """
    present = [t for t in tensors if t is not None]
    if any(t.layout is not torch.strided for t in present):
        raise NotRecordableError("a tensor has no memory of its own")
    return {internals.memory_of(t) for t in present}


class _Known(NamedTuple):
    """A tensor that has a name.

    Attributes:
        tensor: itself, as long as it lives.
        name: its name.
        root: what made the memory that it is a view of.
    """

    tensor: weakref.ref[Tensor]
    name: str
    root: int


class _Given(NamedTuple):
    """A tensor that was given.

    Attributes:
        name: its name.
        memory: what counts the references to its memory.
        place: where its memory begins, where it begins in it, and how much it is.
    """

    name: str
    memory: int
    place: tuple[int, int, int]


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    found = []
    for t in tensors:
        storage = t.untyped_storage()
        start = storage.data_ptr()
        found.append((start, t.data_ptr() - start, storage.nbytes()))
    return found


def _relative(found: Sequence[tuple[int, int, int]]) -> Hashable:
    starts = [start for start, _, _ in found]
    return tuple([(starts.index(start), offset, size) for start, offset, size in found])


def places(tensors: Sequence[Tensor]) -> Hashable:
    """Which tensors share memory, and where each begins in its own."""
    return _relative(_places(tensors))


class Recorder(TorchFunctionMode):
    """Notes what is called while it is entered.

    Args:
        code: of the function of the program that runs, whose lines tell the step.
        steps: of its lines.
        given: tensors that the pass is called with, by name.
        theirs: of these, those that belong to a caller: nothing is written to their memory.
        caches: what else it is called with, by name.

    Attributes:
        calls: what was noted.
        names: what names in it stand for, besides tensors.
        same: pairs of names that were given one tensor.
        device: of launches that were prepared; None without any.
        places: names of tensors that were given, and whose place in memory was asked for.
        reused: names of tensors that were given, to whose memory nobody else held a reference, and
            which is written to for that reason.
        answers: what attributes of tensors that were given had for a value.
        caches: as given.
        assumed: functions that operations have asked, and what these returned.
    """

    def __init__(
        self,
        code: CodeType,
        steps: Sequence[Step | None],
        given: dict[str, Tensor | None],
        theirs: Sequence[Tensor | None],
        caches: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._code, self._steps = code, steps
        self.caches = caches or {}
        self.calls: list[Call] = []
        self.names: dict[str, Any] = {}
        self.same: list[tuple[str, str]] = []
        self.device: int | None = None
        self.places: list[str] = []
        self.reused: list[str] = []
        self.answers: dict[tuple[str, str], Hashable] = {}
        self.assumed: dict[Callable[[], Hashable], Hashable] = {}
        self._refusal: str | None = None
        self._bound: dict[int, str] = {}
        self._known: dict[int, _Known] = {}
        self._theirs: set[int] = set()
        self._given: dict[int, _Given] = {}
        self._unwritten: set[int] = set()
        self._views: dict[Hashable, str] = {}
        self._numbers = count()
        self._roots = count()
        for name, tensor in given.items():
            if tensor is None:
                continue
            known = self._find(tensor)
            if known is None:
                root = next(self._roots)
                self._known[id(tensor)] = _Known(weakref.ref(tensor), name, root)
            else:
                self.same.append((known.name, name))
        self._first_made = next(self._roots)
        with self._noting():
            memory_of_theirs = memory_of_all(theirs)
            for name, tensor in given.items():
                if tensor is None:
                    continue
                root = self._known[id(tensor)].root
                (memory,) = memory_of_all([tensor])
                self._given.setdefault(root, _Given(name, memory, *_places([tensor])))
                if memory in memory_of_theirs:
                    self._theirs.add(root)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, calls and launches of this thread are noted."""
        with watched(self), self:
            yield

    def name_of(self, tensor: Tensor | None) -> str:
        """How the lines name a result; "None" for None.

        Raises:
            NotRecordableError: it is of no call that was noted, or nothing was written to it.
        """
        if tensor is None:
            return "None"
        known = self._find(tensor)
        if known is None:
            raise NotRecordableError("a result comes from elsewhere than from the calls seen")
        if internals.memory_of(tensor) in self._unwritten and tensor.numel():
            raise NotRecordableError("nothing was seen to write to a result")
        return known.name

    def share_memory(self, results: Sequence[Tensor]) -> bool:
        """Whether any of these, which have names, may share bytes with others or what was given."""
        roots = [self._known[id(t)].root for t in results]
        return any(root < self._first_made for root in roots) or any_overlap(results, roots)

    def is_view_of_own(self, result: Tensor) -> bool:
        """Whether a result is a view of memory that a call has made."""
        return internals.is_view(result) and self._known[id(result)].root > self._first_made

    def places_of_given(self) -> Hashable:
        """Where those lay whose place was asked for, as :func:`places` tells it."""
        given = {own.name: own.place for own in self._given.values()}
        return _relative([given[name] for name in self.places])

    def text(self, straight: Straight) -> Text:
        """The function of the pass, as far as it was noted."""
        return text_of(self.calls, self.names, self.device, straight)

    def refuse(self, why: str) -> None:
        self._refusal = why

    def finish(self) -> None:
        """Raises NotRecordableError if anything that was seen cannot be repeated."""
        if self._refusal is not None:
            raise NotRecordableError(self._refusal)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """What is refused within it is told by :meth:`finish`: the pass itself goes on."""
        try:
            yield
        except NotRecordableError as error:
            self._refusal = str(error)
        except Exception as error:  # noqa: BLE001
            self._refusal = f"{type(error).__name__}: {error}"

    # Calls.

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors_in((args, kwargs))
        before = _versions(given)
        result = func(*args, **kwargs)
        if self._refusal is None:
            with self._noting():
                written = _written(func, args, kwargs)
                now = _versions(given)
                written += [t for t, old, new in zip(given, before, now) if old != new]
                self._note(func, args, kwargs, result, given, written)
        return result

    def note_whole(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        writes: int | None,
        flag: int | None,
        reads: bool,
        several: Callable[..., Any] | None,
        each: bool,
    ) -> Any:
        with internals.DisableTorchFunction():
            result = function(*args)
        if self._refusal is None:
            with self._noting(), internals.DisableTorchFunction():
                given = _tensors_in(args)
                if reads or writes is not None:
                    only_reads = flag is not None and not args[flag]
                    targets = [] if writes is None or only_reads else [args[writes]]
                    self._refuse_memory(function.__name__, given, targets)
                returned = [t for t in _tensors_in(result) if not any(t is own for own in given)]
                if any(map(self._find, returned)):
                    raise NotRecordableError("a result is a tensor of other calls")
                names: list[str] = []
                values = ", ".join([self._value(value, names) for value in args])
                text = f"{self._bind(function, function.__name__)}({values})"
                self._add(text, names, result, given, effect=True)
                if several is not None and not (each and any(name[0] == "t" for name in names)):
                    name = self._bind(several, several.__name__.strip("_"))
                    about = Several(name, values, each, result.device)
                    self.calls[-1] = self.calls[-1]._replace(about=about)
        return result

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        given: list[Tensor],
        written: list[Tensor],
    ) -> None:
        name = _name_of_function(func)
        if name in _HOST or name == "__set__":
            raise NotRecordableError(f"{name} is called, which cannot be repeated")
        by_values = name == "where" and len(args) + len(kwargs) == 1
        if by_values or (name == "repeat_interleave" and _tensors_in((args[1:], kwargs))):
            raise NotRecordableError("the size of a result depends on values")
        made = _tensors_in(result)
        if not made and not written:
            asked = func.__self__.__name__ if name == "__get__" else name
            self._question(asked, given, result)
            return
        if name == "__get__" and func.__self__.__name__ not in _PROPERTIES:
            raise NotRecordableError(f"{func.__self__.__name__} is read, which may be anything")
        same = isinstance(result, Tensor) and any(result is t for t in given)
        if same and not written:
            if name in _MAYBE_SAME or name in _VIEWS:
                return
            raise NotRecordableError(f"{name} returns what it was given")
        is_view = name in _VIEWS or name in ("__get__", "__getitem__")
        if not is_view and name not in _EMPTY:
            read = given[1:] if kwargs.get("beta") == 0 else given
            self._refuse_memory(name, read, written)
        reads: list[str] = []
        if name in _RESHAPING and _is_reshaped(args[0], result):
            func, name = Tensor.view, "view"  # the same at the lowest price
            args, kwargs = (args[0], *(result.shape or ((),))), {}
        if name in _EMPTY and _is_plain_memory(result):
            func, name = torch.empty_strided, "empty_strided"  # likewise
            args = result.shape, result.stride()
            kwargs = {"dtype": result.dtype, "device": result.device}
        text = self._text_of_call(func, name, args, kwargs, reads)
        if same:
            self.calls.append(Call(self._step(), text, tuple(reads), (), False, effect=True))
            return
        pure = not written and (is_view or name in _EMPTY or name in _MAYBE_SAME)
        self._add(text, reads, result, given, effect=not pure)
        if name in _EMPTY:
            self._unwritten |= memory_of_all(made)
            if func is torch.empty_strided and isinstance(result, Tensor):
                about = Allocation(result.shape, result.stride(), result.dtype, result.device)
                self.calls[-1] = self.calls[-1]._replace(about=about)

    def _question(self, name: str, asked: Sequence[Tensor], answer: Any) -> None:
        """Notes a call that has returned no tensor: the answer must be the same again."""
        if name in _GUARDED or name in ("__set__", "__hash__"):
            return
        for t in asked:
            known = self._find(t)
            own = None if known is None or known.name[0] == "t" else known.name
            if own is None and name in _PLACE:
                own = self._name_of_given(t)  # it is a view of that
            if own is None or _asked_by() in _MAY_ASK:
                continue  # made on the way, by calls that are repeated
            if name in _ASKED:
                self.answers[own, name] = answer
                continue
            if name not in _PLACE:
                raise NotRecordableError(f"{name} of a tensor is asked for")
            if own not in self.places:
                self.places.append(own)

    def note_reuse(self, tensor: Tensor) -> None:
        """Notes that nobody else has a tensor, which may be written to therefore."""
        if self._refusal is not None:
            return
        with self._noting(), internals.DisableTorchFunction():
            if self._is_theirs(tensor):
                raise NotRecordableError("memory of the caller may be written to")
            own = self._name_of_given(tensor)
            if own is not None and own not in self.reused:
                self.reused.append(own)

    def note_setting(self, holder: Any, name: str, value: Hashable) -> None:
        """Notes that an attribute of ``holder`` is set, which is no tensor."""
        kind = type(holder).__name__.strip("_").lower()
        text = f"{self._bind(holder, kind)}.{name} = {self._bind(value, name)}"
        self.calls.append(Call(self._step(), text, (), (), False, effect=True))

    def note_assumption(self, read: Callable[[], Hashable], value: Hashable) -> None:
        """Notes that the pass depends on what ``read`` returns, no value of a tensor."""
        self.assumed[read] = value

    def _refuse_memory(self, name: str, given: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Raises NotRecordableError for what may not be written, or was not."""
        if any(map(self._is_theirs, written)):
            raise NotRecordableError(f"{name} writes to a tensor of the caller")
        self._unwritten -= memory_of_all(written)
        for t in given:
            if internals.memory_of(t) in self._unwritten and t.numel():
                raise NotRecordableError(f"{name} reads what nothing was seen to write to")

    def _add(
        self, text: str, reads: list[str], result: Any, given: list[Tensor], *, effect: bool
    ) -> None:
        """Notes a call, and gives names to what it has returned."""
        parts = result if isinstance(result, (tuple, list)) else [result]
        if any(isinstance(part, (tuple, list, dict)) for part in parts):
            raise NotRecordableError("results are nested")
        roots = {internals.memory_of(t): self._find(t) for t in given}
        shares: list[str] = []
        results: list[str | None] = []
        for part in parts:
            if not isinstance(part, Tensor):
                results.append(None)
                continue
            memory = internals.memory_of(part)
            of = roots.get(memory)
            if of is None:
                self._unwritten.discard(memory)
            root = next(self._roots) if of is None else of.root
            place = root, part.storage_offset(), part.shape, part.stride(), part.dtype
            known = None if effect or part is not result else self._views.get(place)
            if known is not None:  # the same view under a name that it has
                self._known[id(part)] = _Known(weakref.ref(part), known, root)
                return
            same = [self._find(t) for t in given if internals.memory_of(t) == memory]
            shares += [other.name for other in same if other is not None]
            name = f"t{next(self._numbers)}"
            self._views[place] = name
            self._known[id(part)] = _Known(weakref.ref(part), name, root)
            results.append(name)
        unpacked = isinstance(result, (tuple, list))
        noted = tuple(results) if unpacked or results != [None] else ()
        about = None if effect or unpacked or not shares else self._view(result, given, reads)
        call = Call(self._step(), text, tuple(reads), noted, unpacked, effect, tuple(shares), about)
        self.calls.append(call)

    def _view(self, result: Tensor, given: Sequence[Tensor], reads: Sequence[str]) -> View | None:
        """What is known of a view; None if it is one of several tensors."""
        if len(given) != 1 or len(reads) != 1:
            return None
        storage, dtype = result.untyped_storage(), result.dtype
        offset = result.data_ptr() - given[0].data_ptr()
        last = sum([(size - 1) * step for size, step in zip(result.shape, result.stride())])
        whole = result.data_ptr() == storage.data_ptr() and result.numel()
        if not whole or result.is_conj() or (last + 1) * dtype.itemsize != storage.nbytes():
            return View(reads[0], offset, dtype, None)
        how: Any = {"dtype": dtype, "device": result.device}
        layout = result.shape, result.stride()
        text = self._text_of_call(torch.empty_strided, "empty_strided", layout, how, [])
        return View(reads[0], offset, dtype, (Allocation(*layout, **how), text))

    def _root_of(self, tensor: Tensor) -> int | None:
        """The root of a tensor; by its memory if it is of no call that was noted.

        Memory that is free again may have become that of another tensor.
        """
        known = self._find(tensor)
        if known is not None:
            return known.root
        (memory,) = memory_of_all([tensor])
        roots = {known.root for known in list(self._known.values()) if known.tensor() is not None}
        held = (root for root, given in self._given.items() if given.memory == memory)
        return next((root for root in held if root in roots), None)

    def _name_of_given(self, tensor: Tensor) -> str | None:
        """The name of what was given, and has the memory of ``tensor``."""
        root = self._root_of(tensor)
        return self._given[root].name if root in self._given else None

    def _is_theirs(self, tensor: Tensor) -> bool:
        return self._root_of(tensor) in self._theirs

    def _find(self, tensor: Tensor) -> _Known | None:
        found = self._known.get(id(tensor))
        return found if found is not None and found.tensor() is tensor else None

    def _step(self) -> Step | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is self._code:
                return self._steps[frame.f_lineno - 1]
            frame = frame.f_back
        return None

    # Launches.

    def note_launch(
        self,
        launch: Any,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...],
        ints: tuple[int, ...],
        floats: tuple[float, ...],
    ) -> None:
        """Notes a launch of a kernel (``kernels.launch.Launch``) that has just run."""
        if self._refusal is None:
            with self._noting(), internals.DisableTorchFunction():
                self._note_launch(launch, grid, tensors, ints, floats)

    def _note_launch(
        self,
        launch: Any,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...],
        ints: tuple[int, ...],
        floats: tuple[float, ...],
    ) -> None:
        if not all(grid):
            return
        given = [t for t in tensors if t is not None]
        may_write = [t for n, t in enumerate(tensors) if t is not None and n != launch.only_reads]
        starts = [(internals.memory_of(t), t.storage_offset() * t.itemsize) for t in may_write]
        twice = [t for n, t in enumerate(may_write) if starts[n] in starts[:n]]
        if any(map(self._is_theirs, twice)):
            raise NotRecordableError(f"{launch.name} writes to a tensor of the caller")
        self._unwritten -= memory_of_all(given)
        reads: list[str] = []
        pointers = [self._value(t, reads) for t in tensors]
        numbers = [repr(i) for i in ints], [self._number(f) for f in floats]
        about = Launched(by_addresses=False)
        name = launch.name.partition(":")[2]
        prepared = launch.prepared(tensors, ints)
        if prepared is None:
            groups = ", ".join(map(_tuple_text, (pointers, *numbers)))
            text = f"{self._bind(launch, name)}({grid}, {groups})"
        else:
            run, function, before, packed, values = prepared
            about = Launched(by_addresses=True)
            self.device = given[0].get_device()
            addresses = ["None" if t == "None" else f"{t}.data_ptr()" for t in pointers]
            constants = [f"*{self._bind(values, 'constants')}"] if values else []
            own = ", ".join([*addresses, *numbers[0], *numbers[1], *constants])
            binary, between = self._bind(function, name), self._bind(before, "metadata")
            x, y, z = grid
            what = f"{x}, {y}, {z}, stream, {binary}, *{between}"
            text = f"{self._bind(run, 'launch')}({what}, {f'({own},)' if packed else own})"
        call = Call(self._step(), text, tuple(reads), (), False, effect=True, about=about)
        self.calls.append(call)

    # Text.

    def _text_of_call(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], reads: list[str]
    ) -> str:
        if name == "__get__":
            return f"{self._value(args[0], reads)}.{func.__self__.__name__}"
        if name in ("__getitem__", "__setitem__"):
            at = f"{self._value(args[0], reads)}[{self._index(args[1], reads)}]"
            return at if name == "__getitem__" else f"{at} = {self._value(args[2], reads)}"
        own = getattr(Tensor, name, None)
        is_method = own is func and args and isinstance(args[0], Tensor)
        rest = [self._value(a, reads) for a in args] if not is_method else []
        if is_method:
            target = self._value(args[0], reads)
            rest = [self._value(a, reads) for a in args[1:]]
        for key, value in kwargs.items():
            rest.append(f"{key}={self._value(value, reads)}")
        if is_method:
            return f"{target}.{name}({', '.join(rest)})"
        # An overload's call is a function in Python around this one.
        called = internals.called_by(func) if isinstance(func, internals.OpOverload) else func
        return f"{self._bind(called, name)}({', '.join(rest)})"

    def _index(self, index: Any, reads: list[str]) -> str:
        if isinstance(index, tuple):
            return ", ".join(self._index(part, reads) for part in index) or "()"
        if isinstance(index, slice):
            parts = ["" if part is None else self._value(part, reads) for part in
                     (index.start, index.stop)]  # fmt: skip
            step = "" if index.step is None else f":{self._value(index.step, reads)}"
            return f"{parts[0]}:{parts[1]}{step}"
        if index is Ellipsis:
            return "..."
        masks = [t for t in _tensors_in(index) if t.dtype in (torch.bool, torch.uint8)]
        if masks:
            raise NotRecordableError("a mask selects elements, whose number depends on values")
        return self._value(index, reads)

    def _value(self, value: Any, reads: list[str]) -> str:
        if isinstance(value, Tensor):
            known = self._find(value)
            if known is None:
                raise NotRecordableError("a tensor comes from elsewhere than from the calls seen")
            reads.append(known.name)
            return marked(known.name)
        if value is None or isinstance(value, (bool, str)):
            return repr(value)
        if isinstance(value, int):
            return repr(int(value))
        if isinstance(value, float):
            return self._number(value)
        if isinstance(value, (tuple, torch.Size)):
            return _tuple_text([self._value(part, reads) for part in value])
        if isinstance(value, list):
            return f"[{', '.join(self._value(part, reads) for part in value)}]"
        if isinstance(value, torch.dtype):
            return self._bind(value, str(value).partition(".")[2])
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return self._bind(value, type(value).__name__.strip("_"))
        if dist.is_available() and isinstance(value, dist.ProcessGroup):
            return self._bind(value, "group")
        cache = next((name for name, given in self.caches.items() if given is value), None)
        if cache is None:
            raise NotRecordableError(f"an argument of type {type(value).__name__} is no constant")
        return cache

    def _number(self, value: float) -> str:
        return repr(float(value)) if math.isfinite(value) else self._bind(value, "number")

    def _bind(self, value: Any, name: str) -> str:
        """A name that stands for ``value``: the one asked for, or one like it."""
        known = self._bound.get(id(value))
        if known is not None and (self.names[known] is value):
            return known
        if isinstance(value, (torch.device, tuple)):
            for own, other in self.names.items():
                if type(other) is type(value) and other == value and repr(other) == repr(value):
                    return own
        if not name.isidentifier() or keyword.iskeyword(name) or hasattr(builtins, name):
            name = f"{name}_" if f"{name}_".isidentifier() else "function"
        if name[0] in _GIVEN and (name[1:].isdigit() or not name[1:]):
            name = f"{name}_"
        taken, number = name, 2
        while taken in self.names or taken in _RESERVED or taken in self.caches:
            taken, number = f"{name}_{number}", number + 1
        self.names[taken] = value
        self._bound[id(value)] = taken
        return taken


_GIVEN = "xpeksdtg"
_RESERVED = frozenset(
    "forward backward parameters extra_inputs kept saved received stream dy "
    "current_stream scratch numbers free".split()
)


_PROPERTIES = ("T", "mT", "H", "mH", "data")


def _asked_by() -> tuple[str, str]:
    """The module and function whose code called the function that is being noted."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if name != __name__ and not name.startswith(("torch", "contextlib")):
            return name, frame.f_code.co_name
        frame = frame.f_back
    return "", ""


def _name_of_function(func: Any) -> str:
    if isinstance(func, internals.OpOverload):
        return str(internals.schema_of(func).name.partition("::")[2])
    return str(getattr(func, "__name__", type(func).__name__))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What a function writes to, as far as its name and schema say."""
    name = _name_of_function(func)
    outs = _tensors_in([kwargs.get(key) for key in _OUT])
    if outs:
        return outs
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if isinstance(func, internals.OpOverload):
        arguments = internals.schema_of(func).arguments
        written = [a for a in arguments if a.alias_info and a.alias_info.is_write]
        given = dict(zip([a.name for a in arguments], args)) | kwargs
        return _tensors_in([given.get(a.name) for a in written])
    if name.startswith("__i") and name.endswith("__"):
        in_place = name not in ("__invert__", "__index__")
    return _tensors_in(args[:1]) if in_place or kwargs.get("inplace") else []


def _is_reshaped(x: Tensor, result: Tensor) -> bool:
    """Whether ``x.view(result.shape)`` is just the view that ``result`` is."""
    with internals.DisableTorchFunction():
        try:
            view = x.view(result.shape)
        except RuntimeError:  # strides do not allow for it: it is another view, or a copy
            return False
        return result.data_ptr() == view.data_ptr() and result.stride() == view.stride()


def _is_plain_memory(result: Any) -> bool:
    """Whether ``torch.empty_strided`` returns the like of ``result``, which was just allocated."""
    with internals.DisableTorchFunction():
        return (
            type(result) is Tensor
            and result.layout is torch.strided
            and not result.requires_grad
            and not (result.is_cpu and torch.cuda.is_available() and result.is_pinned())
        )


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [t for part in value for t in _tensors_in(part)]
    return []


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors]


def _tuple_text(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
