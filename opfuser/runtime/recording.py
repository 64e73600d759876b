"""What recorded launches take for granted of the world outside of them.

While a pass is recorded (``engine.captured``), an operation may look at state that no plan's key
holds, such as ``weight.grad``, and may change some. It tells what it saw, so that the launches are
repeated only where it would see the same, and what is to be done again at every replay.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from .. import torch_internals as internals

Function = TypeVar("Function", bound=Callable[..., Any])


class Assumptions:
    """Assumptions of one recorded pass.

    Attributes:
        seen: what was read, and how to read it again.
        effects: what replaying does besides launching.
        stream: of the caller, while the pass is recorded on another one.
    """

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.seen: list[tuple[Callable[[], Hashable], Hashable]] = []
        self.effects: list[Callable[[], None]] = []

    def hold(self) -> bool:
        """Whether everything would be seen again as it was."""
        return all(read() == value for read, value in self.seen)

    def repeat_effects(self) -> None:
        """Does what replaying does besides launching."""
        for effect in self.effects:
            effect()


class Watcher(Protocol):
    """An observer that notes the calls of a pass, to repeat them (``engine.recorder``)."""

    def note_whole(
        self, function: Callable[..., Any], args: tuple[Any, ...], how: seen_whole
    ) -> Any:
        """Calls a function, and notes that alone, not what it calls."""

    def refuse(self, why: str) -> None:
        """Gives up: the pass does what cannot be repeated by its calls."""

    def note_reuse(self, tensor: torch.Tensor) -> None:
        """Notes that there is no other reference to a tensor, which may be written to therefore."""

    def note_setting(self, holder: Any, name: str, value: Hashable) -> None:
        """Notes that an attribute of an object was set."""

    def note_assumption(self, read: Callable[[], Hashable], value: Hashable) -> None:
        """Notes that the pass depends on what a function returns."""

    def note_launch(self, launch: Any, *arguments: Any) -> None:
        """Notes a launch of a kernel that has run, with the arguments of ``Launch``."""


class _State(threading.local):
    under_way: Assumptions | None = None


class _Watching(threading.local):
    """The observers of the calls of this thread."""

    watcher: Watcher | None = None


watching = _Watching()


_state = _State()


@contextmanager
def recorded(assumptions: Assumptions) -> Iterator[None]:
    """Within it, :func:`assume` and :func:`repeat` note things in ``assumptions``."""
    _state.under_way = assumptions
    try:
        yield
    finally:
        _state.under_way = None


def is_recording() -> bool:
    """Whether a pass is recorded on this thread."""
    return _state.under_way is not None


def assume(read: Callable[[], Hashable]) -> None:
    """While a pass is recorded or watched, notes that it depends on what ``read`` returns."""
    if _state.under_way is not None:
        _state.under_way.seen.append((read, read()))
    if watching.watcher is not None:
        watching.watcher.note_assumption(read, read())


def repeat(effect: Callable[[], None]) -> None:
    """Calls ``effect``, now and whenever the pass that is recorded is replayed."""
    effect()
    if _state.under_way is not None:
        _state.under_way.effects.append(effect)


def callers_stream(device: int) -> int:
    """The stream in which a pass runs, or will be replayed if it is recorded now."""
    if _state.under_way is not None:
        return _state.under_way.stream
    return internals.cuda_stream(device)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Within it, ``watcher`` notes the calls of this thread."""
    watching.watcher = watcher
    try:
        yield
    finally:
        watching.watcher = None


def refuse_watching(why: str) -> None:
    """Tells who notes the calls of this thread, if anybody does, that they do not tell all."""
    if watching.watcher is not None:
        watching.watcher.refuse(why)


@contextmanager
def unwatched(why: str) -> Iterator[None]:
    """Within it nobody notes what is called; who did is told why."""
    if watching.watcher is None:
        yield
        return
    watching.watcher.refuse(why)
    with internals.without_innermost_mode():
        yield


def unseen(function: Function) -> Function:
    """A function that computes nothing, and whose answer follows from what guards compare.

    Who notes calls sees nothing of it.
    """

    @functools.wraps(function)
    def ask(*args: Any) -> Any:
        if watching.watcher is None:
            return function(*args)
        with internals.DisableTorchFunction():
            return function(*args)

    return ask  # type: ignore[return-value]


def leave(holder: Any, name: str, value: Hashable) -> None:
    """Sets an attribute, now and whenever the pass that is watched is repeated.

    Args:
        value: nothing that differs between the passes.
    """
    setattr(holder, name, value)
    if watching.watcher is not None:
        watching.watcher.note_setting(holder, name, value)


@dataclass(frozen=True)
class seen_whole:  # noqa: N801 - reads as the decorator that it is
    """A function that decides by more than guards compare: who notes calls notes it as one.

    Attributes:
        writes: position of the argument that it may write to, and return; None: to none.
        flag: position of the argument that says whether it may; without, it always may.
        reads: whether it reads values though it writes to no argument.
        several: returns the results of several such calls, in place of the first of them.
        each: whether it takes the arguments of all calls, whose values none of them and nothing
            between them changes; else that of the first one, and how many there are.
    """

    writes: int | None = None
    flag: int | None = None
    reads: bool = False
    several: Callable[..., Any] | None = None
    each: bool = False

    def __call__(self, function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            watcher = watching.watcher
            if watcher is None:
                return function(*args)
            return watcher.note_whole(function, args, self)

        return call  # type: ignore[return-value]
