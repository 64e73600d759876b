"""A call of a schedule whose launches were recorded, and the autograd.Function that repeats them.

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fusion import Refusal
from ..recording import Assumptions, recorded
from .autograd import differentiate, separate
from .backward_pass import execute_backward, zeros
from .forward_pass import Tape, execute_forward
from .graphs import Graph, graph_type
from .schedule import Schedule

__all__ = [
    "TOO_LARGE",
    "Captured",
    "Flight",
    "lock",
    "make_room",
    "refusal_of_capture",
    "replayed",
]

logger = logging.getLogger("opfuser")
_clock = count()

# Per recorded forward pass and kind of gradients. They differ in where gradients are accumulated.
_MAX_BACKWARDS = 4

# Backward passes in a row that find a gradient held. From then on all gradients are copied.
_PATIENCE = 2

_references_to = torch._C._storage_Use_Count


class Flight:
    """A forward pass whose backward pass may still come."""

    __slots__ = ("__weakref__", "captured", "parameters")

    def __init__(self, captured: Captured, parameters: Sequence[Tensor]) -> None:
        self.captured = captured
        self.parameters = parameters


class _BackwardGraph:
    """The recorded backward pass for one choice of gradients that came in.

    Attributes:
        received: where they are copied to.
        grads: of input, parameters and extra inputs.
        handed_out: positions of the gradients that callers get without a copy, of parameters.
        copied: of the others.
        storages, references: addresses of the memory of those handed out, and the numbers of
            references while nobody else has any.
    """

    def __init__(self, captured: Captured, received: Sequence[Tensor | None]) -> None:
        schedule, device = captured.schedule, captured.device
        with torch.inference_mode(False):
            self.received = [None if g is None else _room_for(g) for g in received]
        self.graph = captured.graph_type(device)
        self.assumptions = Assumptions(self.graph.stream(device))

        def backward() -> list[Tensor | None]:
            dy, *dys = self.received
            saved = [*captured.saved, *captured.kept_parameters]
            forwarded = schedule, captured.contexts, False
            grads = execute_backward(_Forwarded(saved, forwarded), dy, dys, keep=True)
            separate(grads, self.received)
            return grads

        with _uncached_casts(), recorded(self.assumptions):
            self.grads = self.graph.capture(backward)
        others = [*self.received, *captured.tensors]
        own = [g for g in self.grads if g is not None]
        taken = [_memory(t) for t in (*others, *own) if t is not None]
        self.handed_out: list[int] = []
        self.copied: list[int] = []
        self.storages: list[int] = []
        for n, grad in enumerate(self.grads):
            if grad is None:
                continue
            storage = _memory(grad)
            if 0 < n <= schedule.num_parameters and taken.count(storage) == 1:
                self.handed_out.append(n)
                self.storages.append(storage)
            else:
                self.copied.append(n)
        self.references = list(map(_references_to, self.storages))

    def results(self, *, copies: bool) -> list[Tensor | None]:
        """The gradients, for the caller; all of them as copies if asked for."""
        grads = list(self.grads)
        for n in self.copied:
            grads[n] = grads[n].clone()  # type: ignore[union-attr]
        if not copies:
            for n in self.handed_out:
                grads[n] = grads[n].detach()  # type: ignore[union-attr]
        elif self.handed_out:
            memory = [grads[n] for n in self.handed_out]
            given = [torch.empty_like(grad) for grad in memory]  # type: ignore[arg-type]
            torch._foreach_copy_(given, memory)  # type: ignore[arg-type]
            for n, grad in zip(self.handed_out, given):
                grads[n] = grad
        return grads


class _Forwarded(NamedTuple):
    """What :func:`execute_backward` reads of the context of an autograd.Function."""

    saved_tensors: Sequence[Tensor | None]
    forwarded: tuple[Schedule, Sequence[Any], bool]


class Captured:
    """One recorded forward pass, with the memory of what it saves, and its backward passes.

    Args:
        schedule: what is recorded.
        input_, extra_inputs: of a call like those to come.
        parameters: which must stay where they are.
        memory: for all recordings on the device, as a fraction of the device's.
    """

    def __init__(
        self,
        schedule: Schedule,
        input_: Tensor,
        parameters: Sequence[Tensor],
        extra_inputs: Sequence[Tensor],
        memory: float,
    ) -> None:
        self.schedule = schedule
        self.parameters = list(parameters)
        self.device = input_.device
        kind = graph_type(self.device)
        assert kind is not None
        self.graph_type = kind
        self.limit = memory * kind.memory(self.device)
        self.released = False
        self.used = next(_clock)
        self.flight: weakref.ref[Flight] | None = None
        self._times_held = 0
        self.refusal: Refusal | None = None
        self._backwards: dict[tuple[bool, ...], list[_BackwardGraph]] = {}
        self._graph: Graph = kind(self.device)
        tape = Tape() if schedule.needs_backward else None
        # Memory of others that the graphs must not be deprived of.
        self._tables = _cached_tensors(schedule)
        with torch.inference_mode(False):
            self._inputs = [_room_for(t) for t in (input_, *extra_inputs)]
        with _uncached_casts(), torch.no_grad():
            self._output, self._outputs = self._graph.capture(
                lambda: execute_forward(schedule, None, self._inputs[0], self._inputs[1:], tape)
            )
        if len(_cached_tensors(schedule)) != len(self._tables):
            raise RuntimeError("an operation has cached what exists once the graph was replayed")
        self.saved = [] if tape is None else tape.saved
        self.contexts = [] if tape is None else tape.contexts
        self.kept_parameters = [parameters[n] for n in schedule.kept_parameters]
        numbers = {id(p): n for n, p in reversed(list(enumerate(parameters)))}
        read = [*self.saved, *self.kept_parameters]
        # The parameters that backward reads, and which of the saved tensors they are.
        self._read = [(n, numbers[id(t)]) for n, t in enumerate(read) if id(t) in numbers]
        self._read_parameters = sorted({number for _, number in self._read})
        self._addresses = [parameters[n].data_ptr() for n in self._read_parameters]

    @property
    def tensors(self) -> list[Tensor | None]:
        """Its memory, as far as it outlives a pass."""
        return [*self._inputs, self._output, *self._outputs, *self.saved, *self.kept_parameters]

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
        for own, given in zip(self._inputs, inputs):
            if own.data_ptr() != given.data_ptr():
                own.copy_(given)
        self._graph.replay()
        return [y.clone() for y in (self._output, *self._outputs)]

    def release(self) -> None:
        """Gives its memory back."""
        self.released = True
        self._backwards.clear()
        self._inputs, self._outputs, self.saved, self._tables = [], [], [], []
        self._graph = self._output = None  # type: ignore[assignment]

    def saves(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The parameters that backward reads, so that autograd notices when they are changed."""
        return [parameters[n] for n in self._read_parameters]

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
        if self._graph.under_way() or [p.data_ptr() for p in read] != self._addresses:
            return self._eager_backward(read, received)
        found = self._recorded_backward(received)
        if found is None or not self._make_way(found, flight.parameters):
            return self._eager_backward(read, received)
        for own, grad in zip(found.received, received):
            if own is not None and grad is not None and own.data_ptr() != grad.data_ptr():
                own.copy_(grad)
        found.graph.replay()
        found.assumptions.repeat_effects()
        return found.results(copies=self._times_held >= _PATIENCE)

    def _recorded_backward(self, received: Sequence[Tensor | None]) -> _BackwardGraph | None:
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
        if self.refusal is None and len(known) < _MAX_BACKWARDS:
            try:
                found = _BackwardGraph(self, received)
            except Exception as error:  # noqa: BLE001 - whatever a capture does not allow
                self.refusal = refusal_of_capture(error)
            else:
                known.append(found)
                if not make_room(self):
                    self.refusal = TOO_LARGE
                return found
        return None

    def _make_way(self, found: _BackwardGraph, parameters: Sequence[Tensor]) -> bool:
        """Whether nobody holds the gradients that a replay writes over.

        What only ``parameter.grad`` holds moves to other memory. Nobody else can notice: backward
        accumulates into it, on this stream, in any case.
        """
        references = list(map(_references_to, found.storages))
        if references != found.references:
            held = zip(found.handed_out, found.storages, references, found.references)
            for n, storage, now, alone in held:
                if now == alone:
                    continue
                theirs = parameters[n - 1].grad
                if now > alone + 1 or theirs is None or _memory(theirs) != storage:
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
        saved = [*self.saved, *self.kept_parameters]
        now = dict(zip(self._read_parameters, read))
        for n, number in self._read:
            saved[n] = now[number]
        dy, *dys = received
        forwarded = _Forwarded(saved, (self.schedule, self.contexts, False))
        grads = execute_backward(forwarded, dy, dys, keep=True)
        separate(grads, received)
        own = {_memory(t) for t in self.tensors if t is not None}
        return [g.clone() if g is not None and _memory(g) in own else g for g in grads]


def replayed(
    flight: Flight,
    input_: Tensor,
    parameters: Sequence[Tensor],
    extra_inputs: Sequence[Tensor],
) -> Any:
    """The output of a call, or a tuple of it and the extra outputs."""
    captured = flight.captured
    if captured.schedule.needs_backward:
        return _apply(flight, input_, *parameters, *extra_inputs)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        results = captured.forward((input_, *extra_inputs))
    return tuple(results) if len(results) > 1 else results[0]


class _ReplayedFunction(torch.autograd.Function):
    """Replays a recorded forward pass, and later the backward pass."""

    @staticmethod
    def forward(func_ctx: Any, flight: Flight, input_: Tensor, *tensors: Tensor) -> Any:
        captured = flight.captured
        schedule = captured.schedule
        extra_inputs = tensors[schedule.num_parameters :]
        results = captured.forward((input_, *extra_inputs))
        # The inputs were copied. They are saved for a second differentiation to be noticed, and so
        # that there always is something that tells a second backward pass.
        inputs = [t for t in (input_, *extra_inputs) if t.requires_grad]
        func_ctx.save_for_backward(*captured.saves(tensors), *(inputs or [input_]))
        func_ctx.flight = flight
        if len(results) == 1:
            return results[0]
        func_ctx.set_materialize_grads(False)
        func_ctx.output_like = (results[0].shape, results[0].dtype, results[0].device)
        if schedule.without_grad:
            func_ctx.mark_non_differentiable(*[results[1 + n] for n in schedule.without_grad])
        return tuple(results)

    @staticmethod
    def backward(func_ctx: Any, grad_output: Tensor | None, *grad_outputs: Tensor | None) -> Any:
        flight: Flight = func_ctx.flight
        captured = flight.captured
        # Raises if this was done before, or if a parameter has changed since.
        read = func_ctx.saved_tensors[: len(captured.saves(flight.parameters))]
        grad = zeros(func_ctx.output_like) if grad_output is None else grad_output

        def compute(keep: bool) -> list[Tensor | None]:
            grads = captured.backward(flight, read, grad, grad_outputs)
            if not keep:
                captured.flight = None
            return grads

        return (None, *differentiate(func_ctx, (grad, *grad_outputs), compute))


# As in engine.autograd, without the wrapper in Python.
_apply = super(torch.autograd.Function, _ReplayedFunction).apply


@contextmanager
def _uncached_casts() -> Iterator[None]:
    """Within it, weights that autocast has cast are not kept: its end would free them."""
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)


def _cached_tensors(schedule: Schedule) -> list[Tensor]:
    return [t for op in schedule.plan.basic_ops for t in op.cached_tensors()]


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


def make_room(new: Captured) -> bool:
    """Whether ``new`` fits into its limit, if need be once others that are free were released."""
    with lock:
        _all.add(new)
        alive = [c for c in _all if c.device == new.device and not c.released]
        size = sum(c.bytes for c in alive)
        for other in sorted(alive, key=lambda c: c.used):
            if size <= new.limit:
                break
            if other is not new and other.is_free():
                logger.info("[replay] evicted: %d bytes", other.bytes)
                size -= other.bytes
                other.release()
        return size <= new.limit


def _memory(t: Tensor) -> int:
    """The address of what counts the references to the memory of ``t``."""
    return int(t.untyped_storage()._cdata)


def _room_for(t: Tensor) -> Tensor:
    """Memory in the layout of ``t``."""
    return torch.empty_like(t, requires_grad=False).copy_(t.detach())
