"""Records what a pass of a program calls, as straight-line Python.

The functions of a program call operations, which decide by shapes, strides and modes what to call.
Where these are the same again, so is every decision. A :class:`Recorder` watches one pass and notes
each call of a torch function and each launch of a kernel, with the tensors by name and all else as
constants. Their lines are a program without decisions, for calls like the one that was watched.

What cannot be repeated so is refused: values that the host reads, tensors from elsewhere, writes to
tensors of the caller, memory that nothing is seen to write to, modes that an operation sets.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ... import torch_internals as internals
from ...core.buffer_reuse import any_overlap
from ...core.op_base.kinds import is_built_in
from ...runtime.recording import seen_whole, watched
from ..lines import Text, tuple_text
from ..plan import Step
from . import functions
from .functions import NotRecordableError, Surroundings, memory_of_all, tensors_in
from .memory import Allocation, Call, Launched, Several, View
from .names import Names
from .text import Straight, text_of

# Whose questions about addresses change nothing but what is written to, which is looked at apart,
# or are asked again before each call.
_ASKING = ("opfuser.core.buffer_reuse", "_counts"), ("opfuser.quantization.state", "_current_parts")


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


def _find(known: dict[int, _Known], tensor: Tensor) -> _Known | None:
    found = known.get(id(tensor))
    return found if found is not None and found.tensor() is tensor else None


def _name_of(known: dict[int, _Known], tensor: Tensor) -> str | None:
    found = _find(known, tensor)
    return None if found is None else found.name


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
        self._known: dict[int, _Known] = {}
        self._names = Names(partial(_name_of, self._known), caches)  # not of self: a cycle
        self.caches = self._names.caches
        self.names = self._names.bound
        self.calls: list[Call] = []
        self.same: list[tuple[str, str]] = []
        self.device: int | None = None
        self.places: list[str] = []
        self.reused: list[str] = []
        self.answers: dict[tuple[str, str], Hashable] = {}
        self.assumed: dict[Callable[[], Hashable], Hashable] = {}
        self._refusal: str | None = None
        self._theirs: set[int] = set()
        self._given: dict[int, _Given] = {}
        self._unwritten: set[int] = set()
        self._views: dict[Hashable, str] = {}  # by place; by name where a tensor tells the place
        self._numbers = count()
        self._roots = count()
        for name, tensor in given.items():
            if tensor is None:
                continue
            known = _find(self._known, tensor)
            if known is None:
                root = next(self._roots)
                self._known[id(tensor)] = _Known(weakref.ref(tensor), name, root)
            else:
                self.same.append((known.name, name))
        self._first_made = next(self._roots)
        of_users = any(step is not None and not is_built_in(step.op) for step in steps)
        self._around = Surroundings(tensors_in(given) if of_users else None)
        with self._noting():
            memory_of_theirs = memory_of_all(theirs)
            for name, tensor in given.items():
                if tensor is None:
                    continue
                root = self._known[id(tensor)].root
                (memory,) = memory_of_all([tensor])
                (place,) = functions.place_of_each([tensor])
                self._given.setdefault(root, _Given(name, memory, place))
                if memory in memory_of_theirs:
                    self._theirs.add(root)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, calls and launches of this thread are noted."""
        with watched(self):
            self._around.look()
            with self:
                yield
            self._around.compare()

    def name_of(self, tensor: Tensor | None) -> str:
        """How the lines name a result; "None" for None.

        Raises:
            NotRecordableError: it is of no call that was noted, or nothing was written to it.
        """
        if tensor is None:
            return "None"
        known = _find(self._known, tensor)
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
        return functions.relative([given[name] for name in self.places])

    def text(self, straight: Straight) -> Text:
        """The function of the pass, as far as it was noted."""
        return text_of(self.calls, self.names, self.device, straight)

    def refuse(self, why: str) -> None:
        self._refusal = why

    def finish(self) -> None:
        """Raises NotRecordableError if anything that was seen cannot be repeated."""
        if self._refusal is not None:
            raise NotRecordableError(self._refusal)
        self._around.refuse_changes()

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
        given = tensors_in((args, kwargs))
        before = functions.versions_of(given)
        self._around.compare()
        result = func(*args, **kwargs)
        self._around.look()
        if self._refusal is None:
            with self._noting():
                written = functions.written_by(func, args, kwargs)
                now = functions.versions_of(given)
                written += [t for t, old, new in zip(given, before, now) if old != new]
                self._note(func, args, kwargs, result, given, written)
        return result

    def note_whole(
        self, function: Callable[..., Any], args: tuple[Any, ...], how: seen_whole
    ) -> Any:
        with internals.DisableTorchFunction():
            result = function(*args)
            self._around.look()
        if self._refusal is None:
            with self._noting(), internals.DisableTorchFunction():
                given = tensors_in(args)
                if how.reads or how.writes is not None:
                    only_reads = how.flag is not None and not args[how.flag]
                    targets = [] if how.writes is None or only_reads else [args[how.writes]]
                    self._refuse_memory(function.__name__, given, targets)
                returned = [t for t in tensors_in(result) if not any(t is own for own in given)]
                if any(_find(self._known, t) for t in returned):
                    raise NotRecordableError("a result is a tensor of other calls")
                names: list[str] = []
                values = ", ".join([self._names.value(value, names) for value in args])
                text = f"{self._names.bind(function, function.__name__)}({values})"
                self._add(text, names, result, given, effect=True)
                several, of_made = how.several, any(name[0] == "t" for name in names)
                if several is not None and not (how.each and of_made):
                    name = self._names.bind(several, several.__name__.strip("_"))
                    about = Several(name, values, how.each, result.device)
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
        name = functions.name_of_function(func)
        if name in functions.HOST or name == "__set__":
            raise NotRecordableError(f"{name} is called, which cannot be repeated")
        functions.refuse_values(name, args, kwargs)
        made = tensors_in(result)
        if not made and not written:
            asked = func.__self__.__name__ if name == "__get__" else name
            self._question(asked, given, result)
            return
        if name == "__get__" and func.__self__.__name__ not in _PROPERTIES:
            raise NotRecordableError(f"{func.__self__.__name__} is read, which may be anything")
        same = isinstance(result, Tensor) and any(result is t for t in given)
        if same and not written:
            if name in functions.MAYBE_SAME or name in functions.VIEWS:
                return
            raise NotRecordableError(f"{name} returns what it was given")
        is_view = name in functions.VIEWS or name in ("__get__", "__getitem__")
        if not is_view and name not in functions.EMPTY:
            read = given[1:] if kwargs.get("beta") == 0 else given
            self._refuse_memory(name, read, written)
        reads: list[str] = []
        if name in functions.RESHAPING and functions.is_reshaped(args[0], result):
            func, name = Tensor.view, "view"  # the same at the lowest price
            args, kwargs = (args[0], *(result.shape or ((),))), {}
        if name in functions.EMPTY and functions.is_plain_memory(result):
            func, name = torch.empty_strided, "empty_strided"  # likewise
            args = result.shape, result.stride()
            kwargs = {"dtype": result.dtype, "device": result.device}
        text = self._names.call(func, name, args, kwargs, reads)
        if same:
            self.calls.append(Call(self._step(), text, tuple(reads), (), False, effect=True))
            return
        pure = not written and (is_view or name in functions.EMPTY or name in functions.MAYBE_SAME)
        self._add(text, reads, result, given, effect=not pure)
        if name in functions.EMPTY:
            self._unwritten |= memory_of_all(made)
            if func is torch.empty_strided and isinstance(result, Tensor):
                about = Allocation(result.shape, result.stride(), result.dtype, result.device)
                self.calls[-1] = self.calls[-1]._replace(about=about)

    def _question(self, name: str, asked: Sequence[Tensor], answer: Any) -> None:
        """Notes a call that has returned no tensor: the answer must be the same again."""
        if name in functions.GUARDED or name in ("__set__", "__hash__"):
            return
        for t in asked:
            known = _find(self._known, t)
            own = None if known is None or known.name[0] == "t" else known.name
            if own is None and name in functions.PLACE:
                own = self._name_of_given(t)  # it is a view of that
            if name not in functions.PLACE and name not in functions.ASKED:
                raise NotRecordableError(f"{name} of a tensor is asked for")
            if own is None or functions.asked_by(__name__) in _ASKING:
                continue  # made on the way, by calls that are repeated
            if name in functions.ASKED:
                self.answers[own, name] = answer
                continue
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
        """Notes that an attribute of ``holder`` is set, which is not a tensor."""
        kind = type(holder).__name__.strip("_").lower()
        text = f"{self._names.bind(holder, kind)}.{name} = {self._names.bind(value, name)}"
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
        roots = {internals.memory_of(t): _find(self._known, t) for t in given}
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
            fixed = of is None or (len(given) == 1 and self._views.keys().isdisjoint(reads))
            again = fixed and not effect and part is result
            known = self._views.get(place) if again else None
            if known is not None:  # the same view under a name that it has
                self._known[id(part)] = _Known(weakref.ref(part), known, root)
                return
            same = [_find(self._known, t) for t in given if internals.memory_of(t) == memory]
            shares += [other.name for other in same if other is not None]
            name = f"t{next(self._numbers)}"
            self._views[place if fixed else name] = name
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
        text = self._names.call(torch.empty_strided, "empty_strided", layout, how, [])
        return View(reads[0], offset, dtype, (Allocation(*layout, **how), text))

    def _root_of(self, tensor: Tensor) -> int | None:
        """The root of a tensor; by its memory if it is of no call that was noted.

        Memory that is free again may have become that of another tensor.
        """
        known = _find(self._known, tensor)
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

    def _step(self) -> Step | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is self._code:
                return self._steps[frame.f_lineno - 1]
            frame = frame.f_back
        return None

    def note_launch(
        self,
        launch: Any,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...],
        ints: tuple[int, ...],
        floats: tuple[float, ...],
    ) -> None:
        """Notes a launch of a kernel (``kernels.launch.Launch``) that has just run."""
        if self._refusal is not None or not all(grid):
            return
        with self._noting(), internals.DisableTorchFunction():
            bind, given = self._names.bind, [t for t in tensors if t is not None]
            may_write = [
                t for n, t in enumerate(tensors) if t is not None and n != launch.only_reads
            ]
            starts = [(internals.memory_of(t), t.storage_offset() * t.itemsize) for t in may_write]
            twice = [t for n, t in enumerate(may_write) if starts[n] in starts[:n]]
            if any(map(self._is_theirs, twice)):
                raise NotRecordableError(f"{launch.name} writes to a tensor of the caller")
            self._unwritten -= memory_of_all(given)
            reads: list[str] = []
            pointers = [self._names.value(t, reads) for t in tensors]
            numbers = [repr(i) for i in ints], [self._names.number(f) for f in floats]
            about = Launched(by_addresses=False)
            name = launch.name.partition(":")[2]
            prepared = launch.prepared(tensors, ints)
            if prepared is None:
                groups = ", ".join(map(tuple_text, (pointers, *numbers)))
                text = f"{bind(launch, name)}({grid}, {groups})"
            else:
                run, function, before, packed, values = prepared
                about = Launched(by_addresses=True)
                self.device = given[0].get_device()
                addresses = ["None" if t == "None" else f"{t}.data_ptr()" for t in pointers]
                constants = [f"*{bind(values, 'constants')}"] if values else []
                own = ", ".join([*addresses, *numbers[0], *numbers[1], *constants])
                binary, between = bind(function, name), bind(before, "metadata")
                x, y, z = grid
                what = f"{x}, {y}, {z}, stream, {binary}, *{between}"
                text = f"{bind(run, 'launch')}({what}, {f'({own},)' if packed else own})"
            call = Call(self._step(), text, tuple(reads), (), False, effect=True, about=about)
            self.calls.append(call)


_PROPERTIES = ("T", "mT", "H", "mH", "data")
