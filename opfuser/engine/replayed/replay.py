"""Which calls of a fuser are replayed, and why others are not."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import gemm_providers
from ... import torch_internals as internals
from ...attention import context_parallel
from ...core.change_tracking import Clock
from ...core.fusion import Refusal
from ...core.op_base.kinds import is_built_in
from ...core.recomputation import computed_again, parts_under_way
from ...events.kinds import BytesSaved, FallbackTaken
from ...events.telling import emit, generation
from ...quantization.region import kept_weights
from ...quantization.watch import is_watched
from ...recipe import DelayedScaling, Recipe
from ..autograd import Kwargs, execute_eagerly
from ..plan import ReplayRecord
from ..program import Program
from ..threads import thread_that_may_wait
from .captured import TOO_LARGE, Captured, Flight, lock, make_room, refusal_of_capture, taken
from .decision import Costs
from .graphs import CudaGraph, graph_type
from .options import ReplayOptions
from .replayed_call import replayed
from .trial import Trial

logger = logging.getLogger("opfuser")

# Kinds of calls that are told apart. One of them is a call with other addresses of parameters; if
# there are many of those, nothing is ever replayed often enough.
_MAX_KINDS = 64
_MAX_ADDRESSES = 8

# Recordings of one kind. If it had to be recorded as often, others take its memory in turns.
_MAX_CAPTURES = 16

# In mode "auto", refused calls in a row before one is passed over, and most that are before the
# next one is looked at.
_PATIENCE = 8
_LONGEST_PAUSE = 1024

_told: set[Refusal | str] = set()


@dataclass
class _Alike:
    """Calls that launch the same kernels.

    Attributes:
        unproven: addresses of parameters for which there was no recording yet.
        trial: decides in mode "auto".
    """

    unproven: set[Hashable] = field(default_factory=set)
    trial: Trial | None = None


@dataclass
class _Kind:
    """Calls that launch the same kernels on parameters at the same addresses.

    Attributes:
        addresses: of the parameters and buffers.
        alike: those with the same and with other addresses.
        states: of the :class:`Clock`, when it was last looked whether calls are replayed.
    """

    addresses: Hashable
    alike: _Alike
    calls: int = 0
    captures: int = 0
    captured: list[Captured] = field(default_factory=list)
    refusal: Refusal | None = None
    states: int = field(default_factory=lambda: Clock.states)


class ReplayCall(NamedTuple):
    """A call of ``program``, with arguments as for :func:`execute_eagerly`."""

    program: Program
    input_: Tensor
    parameters: Sequence[Tensor]
    extra_inputs: Sequence[Tensor]
    kwargs: Kwargs


class Replays:
    """The recorded calls of one fuser."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._alike: dict[Hashable, _Alike] = {}
        self._count = 0
        self._looked = False
        self._refusal: Refusal | None = None
        self._told: Hashable = None
        self._refused = self._pause = 0

    def pauses(self) -> bool:
        """Whether a call is passed over, as those before it were refused."""
        if self._pause:
            self._pause -= 1
            return True
        return False

    def call(
        self,
        options: ReplayOptions,
        program: Program,
        input_: Tensor,
        parameters: Sequence[Tensor],
        extra_inputs: Sequence[Tensor],
        kwargs: Kwargs,
    ) -> Any:
        """The output of a call, or a tuple of it and the extra outputs."""
        call = ReplayCall(program, input_, parameters, extra_inputs, kwargs)
        self._looked = True
        graphs = graph_type(input_.device)
        found: Flight | Refusal | None
        trial = None
        if graphs is None:
            found = Refusal("DEVICE", f"launches on {input_.device.type} are not recorded")
        else:
            found, trial = self._find(graphs, options, call)
        self._refusal = found if isinstance(found, Refusal) else None
        if self._refusal is not None:
            self._tell(options, self._refusal, program)
        self._rest(options)

        def run() -> Any:
            if not isinstance(found, Flight):
                return execute_eagerly(program, input_, parameters, extra_inputs, kwargs)
            for op, needed in program.prepared_ops:
                op.pre_fuser_forward(requires_grad=needed)
            return replayed(found, input_, parameters, extra_inputs)

        if trial is None or graphs is None:
            return run()
        inputs = [input_, *extra_inputs]
        return trial.call(graphs, [*inputs, *parameters], len(inputs), run)

    def _rest(self, options: ReplayOptions) -> None:
        """Looks at ever fewer calls, in mode "auto", where all are refused."""
        if self._refusal is None or self._refusal is _IN_FLIGHT or options.mode != "auto":
            self._refused = 0
            return
        self._refused += 1
        if self._refused >= _PATIENCE:
            self._pause = min(self._refused, _LONGEST_PAUSE)
            self._refused += self._pause

    def _tell(self, options: ReplayOptions, refusal: Refusal, program: Program) -> None:
        """Tells the log of a call that is not replayed, and subscribers if it was asked for."""
        wanted = FallbackTaken.wanted and options.mode == "on"
        if wanted and self._told != (refusal, program, generation()):
            self._told = refusal, program, generation()
            place, (number,) = _place(program), program.plan.numbers
            emit(FallbackTaken(f"replay of {place}", "replay", "eager", *refusal, plan=number))
        # Of measured times, each is another text.
        told = refusal if options.mode == "on" else refusal.code
        if told not in _told:
            _told.add(told)
            level = logging.WARNING if options.mode == "on" else logging.INFO
            logger.log(level, "[replay] steps aside: %s", refusal)

    def _find(
        self, graphs: type[CudaGraph], options: ReplayOptions, call: ReplayCall
    ) -> tuple[Flight | Refusal | None, Trial | None]:
        """A recording for a call, or why there is none; None if there may be one later.

        And what is to measure the call, in mode "auto".
        """
        is_auto = options.mode == "auto"
        refusal = _refusal_of_call(graphs, call)
        if refusal is None and is_auto:
            refusal = _refusal_unless_asked(graphs)
        if refusal is not None:
            return refusal, None
        with lock:
            kind = self._kind(graphs, call, is_auto)
            if kind.states != Clock.states:  # some forward has set numbers, maybe of these
                kind.states = Clock.states
                kind.refusal = kind.refusal or _refusal_of_program(call.program)
            trial = kind.alike.trial
            refusal = kind.refusal or (None if trial is None else trial.refusal)
            if refusal is not None:
                return refusal, None
            kind.calls += 1
            refusals = [c.refusal for c in kind.captured if c.refusal is not None]
            if refusals or kind.captures > _MAX_CAPTURES:
                kind.captured, kind.refusal = [], [*refusals, TOO_LARGE][0]
                return kind.refusal, None
            kind.captured = [c for c in kind.captured if c.is_of(call.parameters)]
            if not kind.captured and kind.calls <= options.calls_before:
                return None, None
            if trial is None or trial.is_over:
                return self._take(options, kind, call), None
            return self._on_trial(graphs, options, kind, call, trial)

    def _on_trial(
        self,
        graphs: type[CudaGraph],
        options: ReplayOptions,
        kind: _Kind,
        call: ReplayCall,
        trial: Trial,
    ) -> tuple[Flight | Refusal | None, Trial | None]:
        """As :meth:`_find`, while it is not decided whether calls are replayed."""
        if internals.is_profiled():  # calls take longer
            return None, None
        kind.refusal = _refusal_of_program(call.program)
        if kind.refusal is not None:
            return kind.refusal, None
        trial.proceed(lambda: _costs(graphs, options, trial, call.input_.device))
        if trial.refusal is not None:
            for other in self._kinds.values():
                if other.alike is kind.alike:
                    other.captured = []
            return trial.refusal, None
        found = self._take(options, kind, call) if trial.replays else None
        is_measured = found is None or (isinstance(found, Flight) and found.captured.is_complete)
        return found, trial if is_measured else None

    def _take(self, options: ReplayOptions, kind: _Kind, call: ReplayCall) -> Flight | Refusal:
        """A recording that is free, made if need be, or why there is none."""
        for captured in kind.captured:
            if captured.is_free():
                self._count += 1
                return captured.take(call.parameters)
        kind.refusal = _refusal_of_program(call.program)
        if kind.refusal is not None:
            return kind.refusal
        if len(kind.captured) >= options.instances:
            return _IN_FLIGHT
        return self._capture(options, kind, call)

    def _kind(self, graphs: type[CudaGraph], call: ReplayCall, is_auto: bool) -> _Kind:
        """What is known of calls like this one.

        Args:
            graphs: how launches on this device are recorded.
            call: its launches read parameters and buffers where they are.
            is_auto: whether recordings are those of mode "auto".
        """
        input_, program = call.input_, call.program
        kept = [*call.parameters, *program.specializations.buffers(scales=True)]
        layouts = [(t.shape, t.stride()) for t in (input_, *call.extra_inputs)]
        key = program, tuple(layouts), graphs.stream(input_.device), _modes(), is_auto
        addresses = tuple([t.data_ptr() for t in kept])
        kind = self._kinds.get((key, addresses))
        if kind is None:
            alike = self._alike.setdefault(key, _Alike(trial=Trial() if is_auto else None))
            kind = _Kind(addresses, alike)
            if len(alike.unproven) < _MAX_ADDRESSES:
                alike.unproven.add(addresses)
            elif addresses not in alike.unproven:
                kind.refusal = _ADDRESSES_MOVE
                return kind
            _shorten(self._alike)
            _shorten(self._kinds)
            self._kinds[key, addresses] = kind
            if any(t.device != input_.device for t in kept):
                kind.refusal = _SEVERAL_DEVICES
        return kind

    def _capture(self, options: ReplayOptions, kind: _Kind, call: ReplayCall) -> Flight | Refusal:
        program, input_, parameters, extra_inputs, _ = call
        other = None if options.mode == "on" else thread_that_may_wait()
        if other is not None:  # not for ever: threads end
            why = f"{other}, another thread, may wait for the device while a call is recorded"
            return Refusal("THREADS", why)
        kind.captures += 1
        try:
            captured = Captured(
                program, input_, parameters, extra_inputs, options.share, asked=options.mode == "on"
            )
        except Exception as error:  # noqa: BLE001 - whatever a capture does not allow
            kind.refusal = refusal_of_capture(error)
        else:
            if make_room(captured):
                kind.captured.append(captured)
                kind.alike.unproven.discard(kind.addresses)
                self._count += 1
                logger.info("[replay] captured %s: %d bytes", _place(program), captured.bytes)
                return captured.take(parameters)
            kind.refusal = TOO_LARGE
        return kind.refusal

    def records(self, program: Program) -> tuple[ReplayRecord, ...]:
        """What became of the calls that followed ``program``; empty if nobody looked at any."""
        if not self._looked:
            return ()
        own = [kind for key, kind in self._kinds.items() if key[0][0] is program]  # type: ignore[index]
        captured = [c for kind in own for c in kind.captured if not c.released]
        indices = tuple(range(len(program.plan.basic_ops)))
        size = sum(c.bytes for c in captured)
        return (ReplayRecord(indices, len(captured), size, self._count, self._refusal),)


_ADDRESSES_MOVE = Refusal("ADDRESSES_MOVE", "parameters are elsewhere at every call")
_IN_FLIGHT = Refusal("IN_FLIGHT", "all recordings wait for their backward pass")
_SEVERAL_DEVICES = Refusal("DEVICE", "the tensors of the call are on several devices")
_PLAIN = {Tensor, nn.Parameter}


def _shorten(kinds: dict[Hashable, Any]) -> None:
    """Forgets the oldest entry if there are too many; one with recordings last."""
    if len(kinds) >= _MAX_KINDS:
        idle = (key for key, kind in kinds.items() if not getattr(kind, "captured", None))
        del kinds[next(idle, next(iter(kinds)))]


def _refusal_of_call(graphs: type[CudaGraph], call: ReplayCall) -> Refusal | None:
    """Why a call is not replayed whatever its plan."""
    inputs, parameters = [call.input_, *call.extra_inputs], call.parameters
    if not inputs[0].numel():
        return Refusal("SHAPE", "an empty tensor launches nothing")
    if call.kwargs is not None:
        return Refusal("OP_KWARGS", "keyword arguments of operations are not recorded")
    if not (_PLAIN.issuperset(map(type, inputs)) and _PLAIN.issuperset(map(type, parameters))):
        return Refusal("TENSOR_TYPE", "tensors of a subclass may do more than launch kernels")
    if internals.dispatch_modes() or internals.function_modes():
        return Refusal("TORCH_MODE", "a TorchDispatchMode or TorchFunctionMode is to see all calls")
    if context_parallel.is_active():
        return Refusal("TORCH_MODE", "torch's context_parallel has attention exchange tensors")
    if internals.transforms_active() or internals.in_forward_mode():
        return Refusal("TRANSFORM", "a transform of torch.func, or forward mode, is under way")
    if internals.saved_tensors_hooks(False) is not None:
        return Refusal(
            "SAVED_TENSOR_HOOKS", "hooks, such as those of a checkpoint, must see saved tensors"
        )
    if torch.is_anomaly_enabled():
        return Refusal("ANOMALY_MODE", "errors must be traced to operations")
    if graphs.under_way():
        return Refusal("CAPTURING", "the caller captures a graph of its own")
    quantized = _refusal_of_quantization(call.program.plan.env.recipe)
    if quantized is not None:
        return quantized
    if len(inputs) > 1 and any(t.device != inputs[0].device for t in inputs):
        return _SEVERAL_DEVICES
    return None


def _refusal_of_quantization(recipe: Recipe | None) -> Refusal | None:
    """Why a call is not replayed because of what quantized compute keeps or tells around it."""
    if isinstance(recipe, DelayedScaling) and (computed_again() is not None or parts_under_way()):
        return Refusal("CHECKPOINT", "what is computed twice has the scales of the first time")
    if kept_weights() is not None:
        return Refusal("KEPT_WEIGHTS", "quantized weights are kept for calls outside of recordings")
    if is_watched():
        return Refusal("WATCHED", "quantized tensors are being watched")
    return None


def _refusal_unless_asked(graphs: type[CudaGraph]) -> Refusal | None:
    """Why a call is not replayed that nobody asked to replay."""
    objection = graphs.objection()
    if objection is not None:
        return Refusal("DEBUGGING", objection)
    if BytesSaved.wanted:
        return Refusal("WATCHED", "subscribers receive what every call saves")
    if torch.are_deterministic_algorithms_enabled():
        return Refusal("DETERMINISTIC", "which calls are replayed would depend on measured times")
    return None


def _costs(
    graphs: type[CudaGraph], options: ReplayOptions, trial: Trial, device: torch.device
) -> Costs:
    limit = options.share * graphs.memory(device)
    return Costs(trial.copied, trial.memory, taken(device), limit, graphs.free(device))


def _refusal_of_program(program: Program) -> Refusal | None:
    """Why no call of a program is replayed."""
    plan = program.plan
    for choice in plan.gemms:
        provider = gemm_providers.find(choice.provider)
        if choice.refusal is None and provider is not None and not provider.replayable:
            why = f"GEMMs of {provider.name} do not promise that they only launch kernels"
            return Refusal("OPERATION", why)
    for step in (*plan.forward, *plan.backward):
        for op in (step.op, *[plan.basic_ops[i] for i in step.indices]):
            if not _is_replayable(op):
                where = f"op {step.indices[0]}, {type(op).__name__},"
                return Refusal(
                    "OPERATION", f"{where} does not promise that it only launches kernels"
                )
    return None


def _is_replayable(op: nn.Module) -> bool:
    if op.__dict__.get("_state_names"):  # its forward has changed numbers of its own
        return False
    if is_built_in(op):
        return bool(op.replayable)
    # Not inherited: a subclass may do something else.
    return bool(vars(type(op)).get("replayable", False))


def _modes() -> Hashable:
    """States of the process that decide what is launched."""
    return (
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        internals.attention_settings(),
        internals.product_settings(),
        # Without it collectives are identities.
        dist.is_available() and dist.is_initialized(),
    )


def _place(program: Program) -> str:
    ops = program.plan.basic_ops
    return f"{type(ops[0]).__name__} to {type(ops[-1]).__name__} ({len(ops)} operations)"
