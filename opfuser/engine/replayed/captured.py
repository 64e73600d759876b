"""A call of a program whose launches were recorded.

What a replay writes is memory of the graph, and is overwritten by the next one. Outputs and
gradients of inputs are therefore copied for the caller. Gradients of parameters, which are large,
are handed out as they are. Before a replay writes them again, the number of references to their
memory tells whether anybody still holds one.
"""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from collections.abc import Iterable, Sequence
from itertools import count

import torch
from torch import Tensor

from ... import torch_internals as internals
from ...core.buffer_reuse import references
from ...core.context import held
from ...core.fusion import Refusal
from ...runtime.recording import Assumptions, recorded
from ...torch_internals import memory_of
from ..autograd import separate
from ..passes import Tape, execute_backward, execute_forward
from ..program import Program
from ..ranges import replay_range
from ..threads import thread_that_may_wait
from .captured_backward import BackwardGraph, Forwarded, room_for, uncached_casts
from .graphs import Graph, graph_type

logger = logging.getLogger("opfuser")
_clock = count()

# Per recorded forward pass and kind of gradients. They differ in where gradients are accumulated.
_MAX_BACKWARDS = 4

# Backward passes in a row that find a gradient held. From then on all gradients are copied.
_PATIENCE = 2


class Flight:
    """A forward pass whose backward pass may still come."""

    __slots__ = ("__weakref__", "captured", "parameters")

    def __init__(self, captured: Captured, parameters: Sequence[Tensor]) -> None:
        self.captured = captured
        self.parameters = parameters


class Captured:
    """One recorded forward pass, with the memory of what it saves, and its backward passes.

    Args:
        program: what is recorded.
        input_, extra_inputs: of a call like those to come.
        parameters: which must stay where they are.
        memory: for all recordings on the device, as a fraction of the device's.
        asked: whether the caller wants replayed calls, and knows what they ask of a program.
            Otherwise it gets all gradients as copies, and no other recording makes way.
    """

    def __init__(
        self,
        program: Program,
        input_: Tensor,
        parameters: Sequence[Tensor],
        extra_inputs: Sequence[Tensor],
        memory: float,
        *,
        asked: bool = True,
    ) -> None:
        self.program = program
        self.parameters = list(parameters)
        self.device = input_.device
        kind = graph_type(self.device)
        assert kind is not None
        self.graph_type = kind
        self.limit = memory * kind.memory(self.device)
        self.released = False
        self.used = next(_clock)
        self.flight: weakref.ref[Flight] | None = None
        self.asked = asked
        self._times_held = 0 if asked else _PATIENCE
        self.refusal: Refusal | None = None
        self._backwards: dict[tuple[bool, ...], list[BackwardGraph]] = {}
        self._graph: Graph = kind(self.device)
        tape = Tape() if program.needs_backward else None
        # Memory of others that the graphs must not be deprived of.
        self._tables = program.specializations.cached()
        with torch.inference_mode(False):
            self._inputs = [room_for(t) for t in (input_, *extra_inputs)]
        self._noted = Assumptions(kind.stream(self.device))
        with uncached_casts(), torch.no_grad(), recorded(self._noted):
            self._output, self._outputs = self._graph.capture(
                lambda: execute_forward(program, None, self._inputs[0], self._inputs[1:], tape)
            )
        if len(program.specializations.cached()) != len(self._tables):
            raise RuntimeError("an operation has cached what exists once the graph was replayed")
        self._saved = [] if tape is None else [*tape.saved, *program.kept(parameters)]
        self._contexts = [] if tape is None else tape.contexts
        # The parameters that backward reads, and which of the saved tensors they, or views, are.
        numbers = {_memory_read(p): n for n, p in reversed(list(enumerate(parameters)))}
        read = {n: _memory_read(t) for n, t in enumerate(self._saved) if t is not None}
        self._read = {
            n: (numbers[memory], self._saved[n] is not parameters[numbers[memory]])
            for n, memory in read.items()
            if memory in numbers
        }
        self._read_parameters = sorted(set(self._read.values()))  # and whether their data are held
        self.num_read = len(self._read_parameters)
        self._addresses = [parameters[n].data_ptr() for n, _ in self._read_parameters]

    @property
    def tensors(self) -> list[Tensor | None]:
        """Its memory, as far as it outlives a pass."""
        return [*self._inputs, self._output, *self._outputs, *self._saved]

    @property
    def is_complete(self) -> bool:
        """Whether both passes were recorded, if there are two."""
        return not self.program.needs_backward or any(self._backwards.values())

    @property
    def bytes(self) -> int:
        """Memory that it keeps from others."""
        inputs = sum(t.untyped_storage().nbytes() for t in self._inputs)
        backwards = [b.graph.bytes for own in self._backwards.values() for b in own]
        return inputs + self._graph.bytes + sum(backwards)

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether it was recorded with these very parameters, and still has its memory."""
        return not self.released and all(map(operator.is_, self.parameters, parameters))

    def is_free(self) -> bool:
        """Whether no backward pass can still come for the last forward pass."""
        return self.flight is None or self.flight() is None

    def take(self, parameters: Sequence[Tensor]) -> Flight:
        """Reserves it for one call."""
        flight = Flight(self, parameters)
        self.flight = weakref.ref(flight)
        self.used = next(_clock)
        return flight

    def forward(self, inputs: Iterable[Tensor]) -> list[Tensor]:
        """Output and extra outputs, in memory of their own."""
        if internals.is_profiled():
            with replay_range(self.program.plan, self.program.paths, "forward"):
                return self._replay_forward(inputs)
        return self._replay_forward(inputs)

    def _replay_forward(self, inputs: Iterable[Tensor]) -> list[Tensor]:
        for own, given in zip(self._inputs, inputs):
            if own.data_ptr() != given.data_ptr():
                own.copy_(given)
        self._graph.replay()
        self._noted.repeat_effects()
        return [y.clone() for y in (self._output, *self._outputs)]

    def release(self) -> None:
        """Gives its memory back."""
        self.released = True
        self._backwards.clear()
        self._inputs, self._outputs, self._saved, self._tables = [], [], [], []
        self._graph = self._output = None  # type: ignore[assignment]

    def saves(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The parameters that backward reads, so that autograd notices when they are changed."""
        read = self._read_parameters
        return [held(parameters[n]) if holds else parameters[n] for n, holds in read]

    def backward(
        self,
        flight: Flight,
        read: Sequence[Tensor],
        grad_output: Tensor,
        grad_outputs: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Gradients of input, parameters and extra inputs.

        Args:
            flight: the forward pass.
            read: the parameters that :meth:`saves` named, as they are now.
            grad_output, grad_outputs: of output and extra outputs.
        """
        received = grad_output, *grad_outputs
        watched = self._graph.under_way() or internals.dispatch_modes()
        if watched or [p.data_ptr() for p in read] != self._addresses:
            return self._eager_backward(read, received)
        found = self._recorded_backward(received)
        if found is None or not self._make_way(found, flight.parameters):
            return self._eager_backward(read, received)
        if internals.is_profiled():
            with replay_range(self.program.plan, self.program.paths, "backward"):
                return self._replay_backward(found, received)
        return self._replay_backward(found, received)

    def _replay_backward(
        self, found: BackwardGraph, received: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        for own, grad in zip(found.received, received):
            if own is not None and grad is not None and own.data_ptr() != grad.data_ptr():
                own.copy_(grad)
        found.graph.replay()
        found.assumptions.repeat_effects()
        return found.results(copies=self._times_held >= _PATIENCE)

    def _recorded_backward(self, received: Sequence[Tensor | None]) -> BackwardGraph | None:
        """A recorded backward pass for these gradients of the outputs, made if need be.

        None for the first one, which is to compile and load its kernels: a capture cannot.
        """
        given = tuple(g is not None for g in received)
        if given not in self._backwards:
            self._backwards[given] = []
            return None
        known = self._backwards[given]
        for found in known:
            if found.assumptions.hold():
                return found
        may = self.asked or thread_that_may_wait() is None
        if may and self.refusal is None and len(known) < _MAX_BACKWARDS:
            try:
                found = self._record(received)
            except Exception as error:  # noqa: BLE001 - whatever a capture does not allow
                self.refusal = refusal_of_capture(error)
            else:
                known.append(found)
                if not make_room(self):
                    self.refusal = TOO_LARGE
                return found
        return None

    def _record(self, received: Sequence[Tensor | None]) -> BackwardGraph:
        graph = self.graph_type(self.device)
        return BackwardGraph(graph, self._forwarded(self._saved), self.tensors, received)

    def _forwarded(self, saved: Sequence[Tensor | None]) -> Forwarded:
        return Forwarded(saved, (self.program, self._contexts, False, False, None, None))

    def _make_way(self, found: BackwardGraph, parameters: Sequence[Tensor]) -> bool:
        """Whether nobody holds the gradients that a replay writes over.

        What only ``parameter.grad`` holds moves to other memory. Nobody else can notice: backward
        accumulates into it, on this stream, in any case.
        """
        now_held = references(found.storages)
        if now_held != found.references:
            held = zip(found.handed_out, found.storages, now_held, found.references)
            for n, storage, now, alone in held:
                if now == alone:
                    continue
                theirs = parameters[n - 1].grad
                if now > alone + 1 or theirs is None or memory_of(theirs) != storage:
                    self._times_held += 1
                    return False
                theirs.data = theirs.clone()
        if self._times_held < _PATIENCE:
            self._times_held = 0
        return True

    def _eager_backward(
        self, read: Sequence[Tensor], received: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """As :meth:`backward`, of what the last replay has saved, with launches of its own."""
        saved = list(self._saved)
        now = dict(zip(self._read_parameters, read))
        for n, place in self._read.items():
            t, parameter = saved[n], now[place]
            assert t is not None
            saved[n] = parameter.as_strided(t.shape, t.stride()) if place[1] else parameter
        dy, *dys = received
        grads = execute_backward(self._forwarded(saved), dy, dys, keep=True)
        separate(grads, received)
        own = {memory_of(t) for t in self.tensors if t is not None}
        return [g.clone() if g is not None and memory_of(g) in own else g for g in grads]


def _memory_read(t: Tensor) -> tuple[int, int, torch.dtype]:
    """Equal for a parameter and a view of all of it, such as its transpose."""
    return t.data_ptr(), t.nbytes, t.dtype


TOO_LARGE = Refusal("MEMORY", "recordings would take more than opfuser.replay(memory=...) allows")


def refusal_of_capture(error: Exception) -> Refusal:
    """Why launches could not be recorded."""
    text = str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return Refusal("MEMORY", text)
    return Refusal("CAPTURE", f"{type(error).__name__}: {text}")


# Guards which recordings are taken and which are released.
lock = threading.RLock()
_all: weakref.WeakSet[Captured] = weakref.WeakSet()


def taken(device: torch.device) -> int:
    """Bytes of memory of all recordings on a device."""
    with lock:
        return sum(c.bytes for c in _alive(device))


def _alive(device: torch.device) -> list[Captured]:
    return [c for c in _all if c.device == device and not c.released]


def make_room(new: Captured) -> bool:
    """Whether ``new`` fits into its limit.

    If it was asked for and does not, others that are free are released.
    """
    with lock:
        _all.add(new)
        alive = _alive(new.device)
        size = sum(c.bytes for c in alive)
        for other in sorted(alive, key=lambda c: c.used):
            if size <= new.limit or not new.asked:
                break
            if other is not new and other.is_free():
                logger.info("[replay] evicted: %d bytes", other.bytes)
                size -= other.bytes
                other.release()
        return size <= new.limit
