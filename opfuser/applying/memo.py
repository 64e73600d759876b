"""Tensors that are made of the inputs of a call, once for all layers that are given the same."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reading.built import Built
from ..reading.operations import Mask, Rotary

_Make = Callable[[Sequence[Any]], Any]


class _Made(NamedTuple):
    """A value, what it was made of, and the arguments that were given it."""

    given: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    value: Any
    readers: set[object]


class Memo:
    """The last value of each kind that was made, while what it was made of is there."""

    def __init__(self) -> None:
        self._made: dict[Hashable, _Made] = {}

    def share(self, built: Built) -> None:
        """Has what a sequence is given be made once for all that share this memo."""
        for number, argument in enumerate(built.arguments):
            if argument.reads_buffers:
                continue
            make: Any = argument.value
            read = tuple(n for part in make.args for n in _inputs_of(part))
            kind = argument.keyword, *make.args
            shared = functools.partial(self.value, object(), make, kind, (built.input, read))
            built.arguments[number] = argument._replace(value=shared)

    def value(
        self,
        reader: object,
        make: _Make,
        kind: Hashable,
        numbers: tuple[int, tuple[int, ...]],
        inputs: Sequence[Any],
    ) -> Any:
        """What is made of some of the inputs of a call, for a stream of one dtype.

        One that asks again does so for another call: writes through ``.data``, or by NumPy, do not
        change the versions of tensors.

        Args:
            reader: that asks.
            make: makes it.
            kind: equal where the same is made of equal inputs.
            numbers: of the stream, and of the inputs that are read.
            inputs: of the call.
        """
        stream, read = numbers
        given = [inputs[n] for n in read]
        if any(t.requires_grad or t.is_inference() for t in given) or _capturing(given[0]):
            return make(inputs)
        kind = kind, inputs[stream].dtype, torch.is_inference_mode_enabled()
        last = self._made.get(kind)
        versions = tuple(t._version for t in given)
        if (
            last is not None
            and reader not in last.readers
            and last.versions == versions
            and all(ref() is t for ref, t in zip(last.given, given))
        ):
            last.readers.add(reader)
            return last.value

        def forget(gone: object) -> None:
            self._made.pop(kind, None)

        made = make(inputs)
        refs = tuple(weakref.ref(t, forget) for t in given)
        self._made[kind] = _Made(refs, versions, made, {reader})
        return made


def _inputs_of(part: Any) -> tuple[int, ...]:
    """The numbers of the inputs that an operation reads, or several."""
    if isinstance(part, tuple):
        return tuple(n for inner in part for n in _inputs_of(inner))
    if isinstance(part, Mask):
        return (part.input,)
    if not isinstance(part, Rotary):
        return ()
    return tuple(table for table in part.tables if isinstance(table, int))


def _capturing(t: Tensor) -> bool:
    """Whether a graph is captured, whose replays are to read what the inputs hold then."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()
