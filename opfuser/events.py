"""Events: what becomes of calls and plans, told to whoever subscribes.

    with opfuser.record_events(only=(PlanInvalidated, FallbackTaken)) as log:
        train_one_step()
    for event in log:
        print(event)

Off by default: as long as nobody subscribes to a kind of event, a place where one could be told
reads one flag. Events are data about a moment. They hold no tensors and no operations, so that
keeping them keeps nothing else alive, and making one waits for no device. What torch.compile runs
tells of its planning alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

import torch

from .errors import ArgumentError, explain
from .kernels import launch

__all__ = [
    "AttentionKernelTaken",
    "BytesSaved",
    "Change",
    "Event",
    "EventLog",
    "FallbackTaken",
    "FusionMatched",
    "FusionRefused",
    "KernelCompiled",
    "PlanCreated",
    "PlanInvalidated",
    "ScalesUpdated",
    "Subscription",
    "record_events",
    "subscribe",
]

logger = logging.getLogger("opfuser")

_Kind = TypeVar("_Kind", bound="Event")


def counted(count: int, noun: str) -> str:
    """``"1 operation"``, ``"2 operations"``."""
    return f"{count} {noun}" + "s" * (count != 1)


class Event:
    """Base of all events; subscribing to it subscribes to every kind.

    Attributes:
        wanted: whether anybody is told of this kind.
    """

    wanted: ClassVar[bool] = False


@dataclass(frozen=True)
class PlanCreated(Event):
    """A plan was made for a group of operations; its matches and refusals are told next.

    Attributes:
        plan: its number, counted in this process; the same one that log and dumps show.
        operations: types of the basic operations, in forward order.
        dtype, device: of the input.
        autocast_dtype: dtype of the active autocast region, or None.
        grad_enabled: whether grad mode is on.
        recipe: type of the recipe of quantised compute; empty without one.
        forward_steps, backward_steps: how many steps each pass has.
    """

    plan: int
    operations: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    autocast_dtype: torch.dtype | None
    grad_enabled: bool
    recipe: str
    forward_steps: int
    backward_steps: int

    def __str__(self) -> str:
        steps = f"{self.forward_steps} forward and {self.backward_steps} backward steps"
        count = counted(len(self.operations), "operation")
        return f"[plan {self.plan}] created: {count} in {steps}"


class Change(NamedTuple):
    """One part of the key of a plan that differs between two calls.

    Attributes:
        what: such as ``"dtype of the input"`` or ``"training of op 3 (Dropout)"``.
        before, after: its values, as text.
    """

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class PlanInvalidated(Event):
    """The plan of the last call does not hold for this one, and a new plan is made.

    ``Sequential.plan`` counts as a call. Going back to a plan that is still cached is no event.

    Attributes:
        plan: number of the plan that no longer holds.
        operations: types of its basic operations.
        changes: what differs, from the input to the operations to the fusions.
    """

    plan: int
    operations: tuple[str, ...]
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return f"[plan {self.plan}] invalidated: {'; '.join(map(str, self.changes))}"


@dataclass(frozen=True)
class FusionMatched(Event):
    """A fusion replaced operations in a plan.

    Attributes:
        plan: number of the plan.
        fusion, stage: of the fusion.
        indices: the basic operations.
    """

    plan: int
    fusion: str
    stage: str
    indices: tuple[int, ...]

    def __str__(self) -> str:
        where = ", ".join(map(str, self.indices))
        return f"[plan {self.plan}] {self.fusion} ({self.stage}) matched at {where}"


@dataclass(frozen=True)
class FusionRefused(Event):
    """A fusion found its pattern and declined.

    Attributes:
        plan: number of the plan.
        fusion, stage: of the fusion.
        index: the first basic operation of the place.
        code, detail: the reason, as of :class:`opfuser.Refusal`.
    """

    plan: int
    fusion: str
    stage: str
    index: int
    code: str
    detail: str

    def __str__(self) -> str:
        what = f"{self.fusion} ({self.stage}) refused at {self.index}"
        return f"[plan {self.plan}] {what}: {self.code}: {self.detail}"


@dataclass(frozen=True)
class FallbackTaken(Event):
    """Something else ran, or will run, than what was asked for or would be faster.

    Told of a plan when it is made; of replay and of attention when a call differs from the one
    before, and once more to whoever subscribes later.

    Attributes:
        what: the computation, such as ``"fprop of op 3"`` or ``"replay"``.
        instead_of: what was asked for, or would be faster.
        taken: what runs.
        code, detail: the reason, as of :class:`opfuser.Refusal`.
        plan: number of the plan; 0 where it is unknown.
    """

    what: str
    instead_of: str
    taken: str
    code: str
    detail: str
    plan: int = 0

    def __str__(self) -> str:
        place = f"[plan {self.plan}] " if self.plan else ""
        reason = f"{self.code}: {self.detail}"
        return f"{place}{self.what}: {self.taken} instead of {self.instead_of}; {reason}"


@dataclass(frozen=True)
class AttentionKernelTaken(Event):
    """The kernel of a call of :class:`opfuser.DotProductAttention` in eager mode.

    Told when a call differs from the operation's last one in what the choice depends on, and once
    more to whoever subscribes later.

    Attributes:
        operation: the operation with its arguments.
        kernel: its name.
        passed_over: every kernel before it in order of preference, and why it was not taken.
        note: what is wrong with this process, if something keeps a faster kernel away.
    """

    operation: str
    kernel: str
    passed_over: tuple[tuple[str, str], ...]
    note: str = ""

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.passed_over)
        text = f"[attention] {self.operation}: {self.kernel}"
        text += f" (not {reasons})" if reasons else ""
        return f"{text}. {self.note}" if self.note else text


@dataclass(frozen=True)
class KernelCompiled(Event):
    """A Triton kernel was launched for the first time with arguments of this kind.

    Attributes:
        kernel: ``"family:function"``, below ``opfuser.kernels.device``.
        launch: the same with its constants, warps and stages.
        arguments: the kind of each: ``"bfloat16*"`` is a pointer, ``"None"`` none, ``"1"`` and
            ``"16n"`` are integers that Triton treats as such.
        device: of the tensors.
        seconds: what the host took: for compiling, or for loading what Triton has on disk.
    """

    kernel: str
    launch: str
    arguments: tuple[str, ...]
    device: torch.device
    seconds: float

    def __str__(self) -> str:
        return f"[kernel] {self.kernel}({', '.join(self.arguments)}) took {self.seconds:.2f} s"


@dataclass(frozen=True)
class BytesSaved(Event):
    """What one eager call of a group of operations keeps for its backward pass.

    A call that is replayed keeps it in its recording: see ``plan.replays``.

    Attributes:
        plan: number of the plan that the call follows.
        bytes: of all storages, each counted once, without those of parameters and sparse tensors.
            One of which only a part is saved counts as a whole, for it stays allocated.
        tensors: how many these are.
        checkpointed: whether a checkpoint drops them, to compute them again in backward.
    """

    plan: int
    bytes: int
    tensors: int
    checkpointed: bool

    def __str__(self) -> str:
        dropped = ", dropped by a checkpoint" if self.checkpointed else ""
        what = f"{self.bytes} bytes in {counted(self.tensors, 'tensor')}"
        return f"[plan {self.plan}] saved {what}{dropped}"


@dataclass(frozen=True)
class ScalesUpdated(Event):
    """Scales of quantised tensors that operations keep from call to call got new values.

    The values are on the device, and not told: reading them would wait for it.

    Attributes:
        operations: how many have new scales.
        roles: whose scales: of ``"input"``, ``"weight"``, ``"grad_output"``.
        reason: ``"region"``, from the largest values of earlier calls, as a region opens;
            ``"first value"``, from the values themselves; or ``"state dict"``, from its history.
    """

    operations: int
    roles: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        count = counted(self.operations, "operation")
        return f"[scales] {count}: {', '.join(self.roles)} ({self.reason})"


_KINDS: tuple[type[Event], ...] = (
    PlanCreated,
    PlanInvalidated,
    FusionMatched,
    FusionRefused,
    FallbackTaken,
    AttentionKernelTaken,
    KernelCompiled,
    BytesSaved,
    ScalesUpdated,
)


class _State:
    """Who is told; replaced as a whole, so that telling needs no lock."""

    subscriptions: tuple[Subscription, ...] = ()
    generation = 0


class _Telling(threading.local):
    """The subscriptions whose callbacks run on this thread."""

    now: tuple[Subscription, ...] = ()


_lock = threading.Lock()
_telling = _Telling()


class Subscription:
    """A callback that is told of events until :meth:`remove`, or until its ``with`` block ends.

    Made by :func:`subscribe`.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        for kind in _KINDS:
            kind.wanted = any(issubclass(kind, s._only) for s in now)
        # One flag for attention, which tells of both at once.
        AttentionKernelTaken.wanted |= FallbackTaken.wanted
        launch.tell_compilations(_tell_compilation if KernelCompiled.wanted else None)


def generation() -> int:
    """A number that differs once anybody has subscribed; who tells of changes alone reads it."""
    return _State.generation


def emit(event: Event) -> None:
    """Tells an event; the caller has looked at ``wanted``, so that nothing is made in vain."""
    for subscription in _State.subscriptions:
        subscription._tell(event)


def _tell_compilation(
    what: launch.Launch, arguments: tuple[str, ...], device: torch.device, seconds: float
) -> None:
    emit(KernelCompiled(what.name, repr(what), arguments, device, seconds))


def _checked(only: Any, where: str) -> tuple[type[Event], ...]:
    kinds = only if isinstance(only, tuple) else (only,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, Event) for kind in kinds):
        return kinds
    raise ArgumentError(
        explain(
            "Events are chosen by their classes",
            where=where,
            received=repr(only),
            remedy=f"Choose among: {', '.join(kind.__name__ for kind in _KINDS)}",
        )
    )


def subscribe(
    callback: Callable[[Event], object], *, only: type[Event] | tuple[type[Event], ...] = Event
) -> Subscription:
    """Calls ``callback`` with every event from now on, wherever in the process it happens.

    It is called where the event happens: on the thread of the call, or on that of autograd for a
    backward pass, amidst planning or a pass. It should be short, and must not wait for the device.
    What it raises is logged, once, and goes no further. Events that it causes itself, such as by
    calling a model, are not told to it.

    Args:
        callback: takes an event; what it returns is ignored.
        only: the kinds that it is told of. All are not more than these cost.

    Returns:
        A handle with ``remove()``; as a context manager it ends the subscription with the block.

    Raises:
        ArgumentError: ``callback`` cannot be called, or ``only`` holds something else than kinds
            of events.
    """
    if not callable(callback):
        raise ArgumentError(
            explain(
                "A subscriber of events is a function of an event",
                where="opfuser.events.subscribe",
                received=repr(callback),
            )
        )
    subscription = Subscription(callback, _checked(only, "opfuser.events.subscribe"))
    _change(lambda now: (*now, subscription))
    return subscription


class EventLog(Sequence[Event]):
    """The events of a block, in their order; of more than ``limit`` the last ones.

    Made by :func:`record_events`.

    Args:
        limit: how many are kept at most.
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
        """How many events are not kept, since more than ``limit`` came after them."""
        with self._lock:
            return self._count - len(self._events)

    def of(self, *kinds: type[_Kind]) -> list[_Kind]:
        """Those of some kinds.

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
        return f"EventLog({len(self)} events, {self.dropped} dropped)"


@contextmanager
def record_events(
    *, limit: int = 10_000, only: type[Event] | tuple[type[Event], ...] = Event
) -> Iterator[EventLog]:
    """Within it, events are collected, those of other threads too.

    Args:
        limit: how many are kept at most: the last ones.
        only: the kinds that are collected.

    Yields:
        The log: a sequence of events, also once the block has ended.

    Raises:
        ArgumentError: ``limit`` is not positive, or ``only`` holds something else than kinds of
            events.
    """
    kinds = _checked(only, "opfuser.record_events")
    if not isinstance(limit, int) or limit < 1:
        raise ArgumentError(
            explain(
                "A log keeps a positive number of events",
                where="opfuser.record_events",
                received=f"limit={limit!r}",
            )
        )
    log = EventLog(limit)
    with subscribe(log._append, only=kinds):
        yield log
