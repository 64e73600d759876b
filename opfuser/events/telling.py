"""Subscribers to events, and how events reach them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from ..errors import ArgumentError, counted
from .kinds import KINDS, AttentionKernelTaken, Event, FallbackTaken

logger = logging.getLogger("opfuser")

_Kind = TypeVar("_Kind", bound=Event)


class _State:
    """The subscribers; replaced as a whole, so that dispatch needs no lock."""

    subscriptions: tuple[Subscription, ...] = ()
    generation = 0


class _Telling(threading.local):
    """The subscriptions whose callbacks run on this thread."""

    now: tuple[Subscription, ...] = ()


_lock = threading.Lock()
_telling = _Telling()


class Subscription:
    """A callback that receives events until :meth:`remove`, or until its ``with`` block ends.

    Returned by :func:`subscribe`.

    Args:
        callback: as there.
        only: as there.
    """

    def __init__(
        self, callback: Callable[[Event], object], only: tuple[type[Event], ...] = (Event,)
    ) -> None:
        self._callback = callback
        self._only = only
        self._failed = False

    def remove(self) -> None:
        """Ends the subscription; a second call does nothing."""
        _change(lambda now: tuple(s for s in now if s is not self))

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _tell(self, event: Event) -> None:
        """Calls the callback, unless it is running: what it does itself is not told to it."""
        telling = _telling.now
        if self in telling or not isinstance(event, self._only):
            return
        _telling.now = (*telling, self)
        try:
            self._callback(event)
        except Exception:
            if not self._failed:  # at every call otherwise
                self._failed = True
                logger.exception("A callback of opfuser.events failed, and is still called")
        finally:
            _telling.now = telling


def _change(change: Callable[[tuple[Subscription, ...]], tuple[Subscription, ...]]) -> None:
    with _lock:
        now = _State.subscriptions = change(_State.subscriptions)
        _State.generation += 1
        for kind in KINDS:
            kind.wanted = any(issubclass(kind, s._only) for s in now)
        # One flag for attention, which tells of both at once.
        AttentionKernelTaken.wanted |= FallbackTaken.wanted


def generation() -> int:
    """A number that differs once anybody has subscribed; who tells of changes alone reads it."""
    return _State.generation


def emit(event: Event) -> None:
    """Tells an event; the caller has looked at ``wanted``, so that nothing is made in vain."""
    for subscription in _State.subscriptions:
        subscription._tell(event)


def _checked(only: Any, where: str) -> tuple[type[Event], ...]:
    kinds = only if isinstance(only, tuple) else (only,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, Event) for kind in kinds):
        return kinds
    raise ArgumentError.explained(
        "Events are chosen by their classes",
        where=where,
        received=repr(only),
        remedy=f"Choose among: {', '.join(kind.__name__ for kind in KINDS)}",
    )


def subscribe(
    callback: Callable[[Event], object], *, only: type[Event] | tuple[type[Event], ...] = Event
) -> Subscription:
    """Calls ``callback`` with every event from now on, wherever in the process it happens.

    It is called where the event happens: on the thread of the call, or on autograd's thread for a
    backward pass, in the middle of planning or of a pass. It should be fast, and must not wait for
    the device. An error in it is logged once and not raised. It does not receive events that it
    causes itself, such as by calling a model.

    Args:
        callback: takes an event; its result is ignored.
        only: the kinds that it receives, by default all. Other kinds cost nothing.

    Returns:
        A handle with ``remove()``; as a context manager it ends the subscription with the block.

    Raises:
        ArgumentError: ``callback`` cannot be called, or ``only`` holds something other than kinds
            of events.
    """
    if not callable(callback):
        raise ArgumentError.explained(
            "A subscriber of events is a function of an event",
            where="opfuser.events.subscribe",
            received=repr(callback),
        )
    subscription = Subscription(callback, _checked(only, "opfuser.events.subscribe"))
    _change(lambda now: (*now, subscription))
    return subscription


class EventLog(Sequence[Event]):
    """The events of a block, in order; at most the last ``limit`` of them.

    Returned by :func:`record_events`.

    Args:
        limit: the number of events to keep.
    """

    def __init__(self, limit: int) -> None:
        self._events: deque[Event] = deque(maxlen=limit)
        self._count = 0
        self._lock = threading.Lock()

    def _append(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            self._count += 1

    @property
    def dropped(self) -> int:
        """Number of events that were dropped because of ``limit``."""
        with self._lock:
            return self._count - len(self._events)

    def of(self, *kinds: type[_Kind]) -> list[_Kind]:
        """Returns the events of some kinds.

        Args:
            *kinds: classes of events.
        """
        return [event for event in self if isinstance(event, kinds)]

    def __len__(self) -> int:
        return len(self._events)

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...

    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        return self._kept()[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._kept())

    def _kept(self) -> list[Event]:
        with self._lock:  # another thread may append meanwhile
            return list(self._events)

    def __repr__(self) -> str:
        return f"EventLog({counted(len(self), 'event')}, {self.dropped} dropped)"


@contextmanager
def record_events(
    *, limit: int = 10_000, only: type[Event] | tuple[type[Event], ...] = Event
) -> Iterator[EventLog]:
    """Collects events within a block, from all threads.

    Args:
        limit: the number of events to keep, the last ones.
        only: the kinds that are collected.

    Yields:
        The log: a sequence of events, which remains after the block.

    Raises:
        ArgumentError: ``limit`` is not positive, or ``only`` holds something other than kinds of
            events.
    """
    kinds = _checked(only, "opfuser.record_events")
    if not isinstance(limit, int) or limit < 1:
        raise ArgumentError.explained(
            "A log keeps a positive number of events",
            where="opfuser.record_events",
            received=f"limit={limit!r}",
        )
    log = EventLog(limit)
    with subscribe(log._append, only=kinds):
        yield log
