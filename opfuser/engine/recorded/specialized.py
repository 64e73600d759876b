"""Straight-line functions of a program for calls that are alike in all that operations decide by.

The functions of a program hold for tensors of any shape. The second call with the same shapes,
strides and modes is recorded (:mod:`.recorder`), and those that follow it run what was recorded: no
contexts, no decisions, the same calls of torch functions and launches of kernels in the same order.
A guard of each says for which calls that holds; any other call runs the program's functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import torch_internals as internals
from ...core.buffer_reuse import is_batched
from ...core.change_tracking import Clock
from ...core.context import OperationContext, any_autocast, autocast_dtype
from ...core.op_base import BasicOperation
from ...quantization.recorded import QuantizedCalls
from ...quantization.state import QuantizationState
from ..emission import comment
from .functions import NotRecordableError, memory_of_all, places
from .guards import all_inputs, guard_of_call, is_plain, kind_of, layout_of
from .recordable import is_plain_call, refusal_of_program, refuse_tensors
from .recorder import Recorder
from .text import Straight

# Functions of one program, and kinds of calls that are told apart. Where shapes differ from call to
# call, nothing is recorded.
_MAX_FOUND = 8
_MAX_KINDS = 64

# Equal calls before one is recorded: a first one compiles kernels, fills caches, and may be alone.
CALLS_BEFORE = 1

# Where as many are recorded as may be, before one takes the place of what was unused for longest:
# with sizes that change from call to call, nothing is recorded again and again.
_CALLS_BEFORE_REPLACING = 16


class Backward(NamedTuple):
    """A recorded backward pass, for gradients of one kind.

    Attributes:
        function: from the gradients of the output and of the extra outputs, the list of what was
            saved and what operations keep, the gradients of input, parameters and extra inputs.
        same: pairs of names that were given one tensor.
        asked: positions of saved tensors whose place in memory was asked for.
        places: where they lay.
        reused: positions of saved tensors that are written to, since nobody else has them.
        cached: tensors that operations had cached, and their positions in what they keep.
        assumed: functions that operations have asked, and what these returned.
        shares: whether a gradient may share memory with another one, or with what was given.
    """

    function: Callable[..., list[Tensor | None]]
    same: tuple[tuple[str, str], ...]
    asked: tuple[int, ...]
    places: Hashable
    reused: tuple[int, ...]
    cached: tuple[tuple[int, weakref.ref[Tensor]], ...]
    assumed: tuple[tuple[Callable[[], Hashable], Hashable], ...]
    shares: bool

    def is_for(
        self,
        dy: Tensor,
        received: Sequence[Tensor | None],
        saved: Sequence[Tensor | None],
        kept: Sequence[Tensor],
    ) -> bool:
        """Whether tensors lie where they did and are one that were, and answers are the same."""
        if any(kept[n] is not ref() for n, ref in self.cached):
            return False
        if any(read() != value for read, value in self.assumed):
            return False
        rows: dict[str, Sequence[Tensor | None]] = {"s": saved, "g": received, "k": kept}

        def read(name: str) -> Tensor | None:
            return dy if name == "dy" else rows[name[0]][int(name[1:])]

        if any(read(a) is not read(b) for a, b in self.same):
            return False
        return places([saved[n] for n in self.asked]) == self.places  # type: ignore[misc]


class DueBackward(NamedTuple):
    """A backward pass that is to be recorded.

    Attributes:
        special: of its forward.
        key: of the kind of gradients.
        recorder: watches it.
        names: of saved tensors, gradients of extra outputs, and tensors that operations keep.
        cached: of the latter, those that they have cached, by position.
    """

    special: Specialization
    key: Hashable
    recorder: Recorder
    names: tuple[str, ...]
    cached: dict[int, weakref.ref[Tensor]]


class Specialization:
    """A recorded forward pass, with its backward passes.

    Attributes:
        keywords: of the call, as :func:`keywords_of` tells them.
        guard: whether a call is of its kind; takes the arguments of ``forward``.
        forward: from the input, the parameters, the extra inputs, what operations keep, and the
            caches of the call, the output, the extra outputs, and what is saved.
        contexts: of the operations, as every forward of this kind leaves them.
        own: of each saved tensor, whether its memory is nobody else's.
        backwards: by kinds of gradients.
        refusal: why no backward is recorded; None if one may be.
    """

    __slots__ = ("backwards", "contexts", "forward", "guard", "keywords", "own", "refusal")

    def __init__(
        self,
        keywords: Hashable,
        guard: Callable[..., bool],
        forward: Callable[..., Any],
        contexts: list[OperationContext],
        own: tuple[bool, ...],
    ) -> None:
        self.keywords = keywords
        self.guard = guard
        self.forward = forward
        self.contexts = contexts
        self.own = own
        self.backwards: dict[Hashable, Backward | int] = {}
        self.refusal: str | None = None


class Specializations:
    """The recorded calls of one program.

    Attributes:
        found: the one that was used last comes first.
        refusal: why there are none; None if there may be.
        keeps: whether operations may read tensors besides parameters.
    """

    def __init__(self, program: Any) -> None:
        self.found: tuple[Specialization, ...] = ()
        self.refusal = refusal_of_program(program)
        self._kinds: dict[Hashable, int] = {}
        self._refused: dict[Hashable, str] = {}
        self._seen = -1
        self._places: list[tuple[dict[str, Any], str, bool]] = []
        self._ops = program.plan.basic_ops
        self._caching = [
            op for op in self._ops if type(op).cached_tensors is not BasicOperation.cached_tensors
        ]
        self.quantized = _quantized_calls(program)
        # Buffers of an operation come and go with its signature.
        self._buffered = bool(self._caching) or any(
            module._buffers for op in self._ops for module in (*op.modules(), *op.children())
        )
        self.keeps = self._buffered or self.quantized is not None

    def kept(self) -> Sequence[Tensor]:
        """What operations read besides parameters: buffers, tensors that they have cached, scales.

        Scales come last, and are the only ones that passes change.
        """
        scales = () if self.quantized is None else self.quantized.scales()
        if not self._buffered:
            return scales
        return (*self.buffers(scales=False), *self.cached(), *scales)

    def cached(self) -> list[Tensor]:
        """The tensors that operations have cached."""
        found: list[Tensor] = []
        for op in self._caching:
            found += op.cached_tensors()
        return found

    def buffers(self, *, scales: bool) -> list[Tensor]:
        """The buffers of the operations, with or without scales."""
        if self._seen != Clock.now:
            self._places = [
                (module._buffers, name, isinstance(module, QuantizationState))
                for op in self._ops
                for module in dict.fromkeys((*op.modules(), *op.children()))
                for name in module._buffers
            ]
            self._seen = Clock.now
        if not self._places:
            return []
        found = [own[name] for own, name, scale in self._places if scales or not scale]
        return [t for t in found if t is not None]

    def _cached(self, kept: Sequence[Tensor]) -> dict[int, weakref.ref[Tensor]]:
        """Positions in what :meth:`kept` returned of tensors that operations have cached.

        They come and go with the calls, and others alike may have taken their positions.
        """
        cached = set(map(id, self.cached()))
        return {n: weakref.ref(t) for n, t in enumerate(kept) if id(t) in cached}

    def reason(self) -> str | None:
        """Why calls, or backward passes, are not recorded; None if nothing was refused."""
        of_passes = (special.refusal for special in self.found)
        reasons = [self.refusal, *reversed(self._refused.values()), *of_passes]
        return next((reason for reason in reasons if reason is not None), None)

    def find(
        self,
        x: Tensor,
        parameters: Sequence[Tensor],
        extra_inputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        keywords: Hashable,
    ) -> Specialization | None:
        """The one for a call, if there is any."""
        try:
            for found in self.found:
                if found.keywords == keywords and found.guard(x, parameters, extra_inputs, kept):
                    if found is not self.found[0]:
                        self.found = (found, *[other for other in self.found if other is not found])
                    return found
        except RuntimeError:  # a tensor of a layout without sizes or strides
            pass
        return None

    def kind_due(
        self,
        x: Tensor,
        parameters: Sequence[Tensor],
        extra_inputs: Sequence[Tensor],
        keywords: Hashable,
    ) -> tuple[Hashable, Hashable] | None:
        """The kind of a call for which there is none, if it is to be recorded. Counts it."""
        if not is_plain_call(x, parameters, extra_inputs):
            return None
        kind = keywords, kind_of((x, *extra_inputs))
        if kind in self._refused:
            return None
        if len(self._kinds) >= _MAX_KINDS:
            self._kinds.clear()
        self._kinds[kind] = calls = self._kinds.get(kind, 0) + 1
        before = CALLS_BEFORE if len(self.found) < _MAX_FOUND else _CALLS_BEFORE_REPLACING
        is_due = calls > before and (self.quantized is None or self.quantized.are_as_usual())
        return kind if is_due else None

    def recorder(
        self,
        program: Any,
        x: Tensor,
        parameters: Sequence[Tensor],
        extra_inputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        caches: Sequence[Any],
    ) -> Recorder:
        """What watches a forward pass with these tensors and caches."""
        given = _named(p=parameters, e=extra_inputs, k=kept)
        theirs = x, *parameters, *extra_inputs, *self._unwritten(kept)
        code, steps = program.lines("forward")
        named = {f"cache{n}": cache for n, cache in enumerate(caches)}
        return Recorder(code, steps, {"x": x, **given}, theirs, named)

    def _unwritten(self, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors returned by :meth:`kept` that passes only read."""
        return kept if self.quantized is None else kept[: len(kept) - self.quantized.count]

    def add(
        self,
        program: Any,
        recorder: Recorder,
        arguments: tuple[Tensor, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
        results: tuple[Tensor, Sequence[Tensor]],
        contexts: list[OperationContext],
        saved: Sequence[Tensor | None],
        kind: tuple[Hashable, Hashable],
    ) -> Specialization | None:
        """What a forward pass did, for calls to come; None if it cannot be repeated.

        Args:
            recorder: has watched it.
            arguments: of :attr:`Specialization.forward`.
            results: output and extra outputs.
            contexts: that it left.
            saved: what it has saved.
            kind: as :meth:`kind_due` returned it.
        """
        _, parameters, extra_inputs, kept = arguments
        try:
            recorder.finish()
            refuse_tensors(contexts)
            output, outputs = results
            names = [recorder.name_of(t) for t in (output, *outputs, *saved)]
            guard = guard_of_call(
                recorder, arguments, self._cached(kept), self._unwritten(kept), self.quantized
            )
        except NotRecordableError as error:
            if len(self._refused) >= _MAX_KINDS:
                self._refused.clear()
            self._refused[kind] = str(error)
            return None
        extras, keeps = names[1 : 1 + len(outputs)], names[1 + len(outputs) :]
        # As execute_eagerly returns it: autograd would not let the caller change such a view.
        detached = ".detach()" if recorder.is_view_of_own(output) else ""
        closing = f"{names[0]}{detached}, [{', '.join(extras)}], [{', '.join(keeps)}]"
        opening = _read(_named(e=extra_inputs, k=kept))
        paths = _paths_of_parameters(program, len(parameters))
        reads = zip(_read(_named(p=parameters)), paths)
        opening = [*[(name, f"{line}  # {path}") for (name, line), path in reads], *opening]
        how = partial(comment, program.paths)
        arguments_of = ", ".join(["x, parameters, extra_inputs, kept", *recorder.caches])
        straight = Straight("forward", arguments_of, opening, (closing, names), how)
        function = program.specialize("forward", recorder.text(straight))
        theirs = memory_of_all([*all_inputs(arguments), output, *outputs])
        own = tuple(t is not None and internals.memory_of(t) not in theirs for t in saved)
        made = Specialization(kind[0], guard, function, contexts, own)
        self._kinds.pop(kind, None)  # it may be replaced, and come again
        self.found = (made, *self.found[: _MAX_FOUND - 1])
        return made

    def find_backward(
        self,
        special: Specialization,
        dy: Tensor,
        received: Sequence[Tensor | None],
        saved: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        keep: bool,
    ) -> Backward | None:
        """What was recorded of a backward pass like one, if anything was.

        Args:
            special: of its forward.
            dy, received: gradients of the output and of the extra outputs.
            saved: what forward has saved.
            kept: what operations read besides.
            keep: whether another backward pass may follow.
        """
        kind = self._kind_of_backward(dy, received, kept, keep)
        found = None if kind is None else special.backwards.get(kind)
        if not isinstance(found, Backward):
            return None
        plain = not (found.same or found.asked or found.cached or found.assumed)
        return found if plain or found.is_for(dy, received, saved, kept) else None

    def due_backward(
        self,
        program: Any,
        special: Specialization,
        dy: Tensor,
        received: Sequence[Tensor | None],
        saved: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        keep: bool,
    ) -> DueBackward | None:
        """What records a backward pass for which nothing was found, if it is to be. Counts it.

        Args:
            program: whose pass it is.
            special, dy, received, saved, kept, keep: see :meth:`find_backward`.
        """
        kind = self._kind_of_backward(dy, received, kept, keep)
        if kind is None or special.refusal is not None:
            return None
        number = special.backwards.get(kind, 0)
        given_tensors = [t for t in (*received, *saved) if t is not None]
        if isinstance(number, Backward) or not is_plain_call(dy, given_tensors, ()):
            return None
        if number < CALLS_BEFORE:
            if len(special.backwards) < _MAX_FOUND:
                special.backwards[kind] = number + 1
            return None
        given = _named(s=saved, g=received, k=kept)
        own = (*special.own, *(False,) * (len(saved) - len(special.own)))
        theirs = [dy, *received, *self._unwritten(kept)]
        theirs += [t for t, is_own in zip(saved, own) if not is_own]
        code, steps = program.lines("backward")
        recorder = Recorder(code, steps, {"dy": dy, **given}, theirs)
        return DueBackward(special, kind, recorder, tuple(given), self._cached(kept))

    def _kind_of_backward(
        self, dy: Tensor, received: Sequence[Tensor | None], kept: Sequence[Tensor], keep: bool
    ) -> Hashable:
        """What backward passes are told apart by, besides where tensors lie.

        None where a recorded one may not run, and none may be recorded.
        """
        if is_batched(dy) or (received and any(map(is_batched, received))) or not is_plain(dy):
            return None
        where = torch.get_num_threads() if dy.is_cpu else dy.data_ptr() & 15
        how = where, torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
        autocast = autocast_dtype(dy.device) if any_autocast() else None
        kind: Hashable = keep, dy.stride(), how, autocast
        if received:
            kind = kind, *map(layout_of, received)
        if self._buffered:
            kind = kind, *map(layout_of, self._unwritten(kept))
        if self.quantized is None:
            return kind
        facts = self.quantized.facts()
        return None if facts is None else (kind, facts)

    @staticmethod
    def add_backward(program: Any, due: DueBackward, grads: Sequence[Tensor | None]) -> None:
        """Keeps what a backward pass did, unless it cannot be repeated.

        Args:
            program: whose pass it is.
            due: has recorded it.
            grads: of the input, parameters and extra inputs.
        """
        special, key, recorder, given, _ = due
        try:
            recorder.finish()
            names = [recorder.name_of(t) for t in grads]
            if recorder.answers:
                raise NotRecordableError("an attribute of a tensor is asked for")
            if any(name[0] != "s" for name in recorder.places):
                raise NotRecordableError("the place of a gradient is asked for")
            asked = tuple([int(name[1:]) for name in recorder.places])
            lie = recorder.places_of_given()
            reused = tuple([int(name[1:]) for name in recorder.reused])
        except NotRecordableError as error:
            special.refusal = str(error)
            return
        opening = [*_read(given), (None, "saved.clear()")]
        closing = f"[{', '.join(names)}]"
        how = partial(comment, program.paths)
        straight = Straight("backward", "dy, received, saved, kept", opening, (closing, names), how)
        function = program.specialize("backward", recorder.text(straight))
        cached, assumed = tuple(due.cached.items()), tuple(recorder.assumed.items())
        shares = recorder.share_memory([t for t in grads if t is not None])
        special.backwards[key] = Backward(
            function, tuple(recorder.same), asked, lie, reused, cached, assumed, shares
        )


_ROWS = {"p": "parameters", "e": "extra_inputs", "k": "kept", "s": "saved", "g": "received"}


def _named(**rows: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """Tensors by the names that lines give them: the letter of a row, and the position in it."""
    return {f"{letter}{n}": t for letter, row in rows.items() for n, t in enumerate(row)}


def _read(names: Iterable[str]) -> list[tuple[str | None, str]]:
    """The lines that give tensors these names."""
    return [(name, f"{name} = {_ROWS[name[0]]}[{name[1:]}]") for name in names]


def _paths_of_parameters(program: Any, count: int) -> list[str]:
    paths = []
    for n, op in enumerate(program.plan.basic_ops):
        at = program.paths[n] if n < len(program.paths) else str(n)
        for _, name in op.parameter_slots():
            text = f"{at}.{name}" if at else name
            paths.append("".join(c if c.isprintable() else "?" for c in text))
    return paths if len(paths) == count else [""] * count


def _quantized_calls(program: Any) -> QuantizedCalls | None:
    """What calls of a program share if they have a recipe."""
    plan = program.plan
    if plan.env.recipe is None:
        return None
    steps = *plan.forward, *plan.backward
    return QuantizedCalls([op for step in steps for op in step.op.quantized_ops], plan.env.recipe)
