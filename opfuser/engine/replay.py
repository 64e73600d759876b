"""Which calls of a fuser are replayed, and why others are not."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import gemm_providers
from ..attention import context_parallel
from ..events.kinds import FallbackTaken
from ..events.telling import emit, generation
from ..fusion import Refusal
from ..op.kinds import is_built_in
from ..quantization.quantizers import kept_weights
from ..quantization.state import Stateful
from ..quantization.watch import is_watched
from ..recipe import Recipe
from ..recomputation import computed_again, parts_under_way
from .autograd import Kwargs, execute_eagerly
from .captured import (
    TOO_LARGE,
    Captured,
    Flight,
    lock,
    make_room,
    refusal_of_capture,
)
from .graphs import Graph, graph_type
from .plan import ReplayRecord
from .program import Program
from .replay_options import ReplayOptions
from .replayed_call import replayed

__all__ = ["ReplayCall", "Replays"]

logger = logging.getLogger("opfuser")

# Kinds of calls that are told apart. One of them is a call with other addresses of parameters; if
# there are many of those, nothing is ever replayed often enough.
_MAX_KINDS = 64
_MAX_ADDRESSES = 8

# Recordings of one kind. If it had to be recorded as often, others take its memory in turns.
_MAX_CAPTURES = 16

_told: set[Refusal] = set()


@dataclass
class _Kind:
    """Calls that launch the same kernels on parameters at the same addresses.

    Attributes:
        addresses: of the parameters and buffers.
        unproven: all such addresses for which there was no recording yet.
    """

    addresses: Hashable
    unproven: set[Hashable]
    calls: int = 0
    captures: int = 0
    captured: list[Captured] = field(default_factory=list)
    refusal: Refusal | None = None


class ReplayCall(NamedTuple):
    """A call of ``program``, with arguments as for :func:`execute_eagerly`.

    Attributes:
        buffers: of the operations.
    """

    program: Program
    input_: Tensor
    parameters: Sequence[Tensor]
    buffers: Sequence[Tensor]
    extra_inputs: Sequence[Tensor]
    kwargs: Kwargs


class Replays:
    """The recorded calls of one fuser."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._unproven: dict[Hashable, set[Hashable]] = {}
        self._count = 0
        self._refusal: Refusal | None = None
        self._told: Hashable = None

    def call(self, options: ReplayOptions, call: ReplayCall) -> Any:
        """The output of a call, or a tuple of it and the extra outputs."""
        program, input_, parameters, _, extra_inputs, kwargs = call
        found = self._find(options, call)
        if isinstance(found, Flight):
            self._refusal = None
            for op, needed in program.prepared_ops:
                op.pre_fuser_forward(requires_grad=needed)
            return replayed(found, input_, parameters, extra_inputs)
        if found is not None:
            self._tell(options, found, program)
        self._refusal = found
        return execute_eagerly(program, input_, parameters, extra_inputs, kwargs)

    def _tell(self, options: ReplayOptions, refusal: Refusal, program: Program) -> None:
        """Tells subscribers and the log of a call that is not replayed."""
        if FallbackTaken.wanted and self._told != (refusal, program, generation()):
            self._told = refusal, program, generation()
            place, (number,) = _place(program), program.plan.numbers
            emit(FallbackTaken(f"replay of {place}", "replay", "eager", *refusal, plan=number))
        if refusal not in _told:
            _told.add(refusal)
            level = logging.WARNING if options.mode == "on" else logging.INFO
            logger.log(level, "[replay] steps aside: %s", refusal)

    def _find(self, options: ReplayOptions, call: ReplayCall) -> Flight | Refusal | None:
        """A recording for a call, or why there is none; None if there may be one later."""
        device = call.input_.device
        graphs = graph_type(device)
        if graphs is None:
            return Refusal("DEVICE", f"launches on {device.type} are not recorded")
        refusal = _refusal_of_call(graphs, call)
        if refusal is not None:
            return refusal
        with lock:
            kind = self._kind(graphs, call)
            if kind.refusal is not None:
                return kind.refusal
            kind.calls += 1
            refusals = [c.refusal for c in kind.captured if c.refusal is not None]
            if refusals or kind.captures > _MAX_CAPTURES:
                kind.captured, kind.refusal = [], [*refusals, TOO_LARGE][0]
                return kind.refusal
            kind.captured = [c for c in kind.captured if c.is_of(call.parameters)]
            for captured in kind.captured:
                if captured.is_free():
                    self._count += 1
                    return captured.take(call.parameters)
            if kind.calls <= options.calls_before:
                return None
            kind.refusal = _refusal_of_program(call.program)
            if kind.refusal is not None:
                return kind.refusal
            if len(kind.captured) >= options.instances:
                return Refusal("IN_FLIGHT", "all recordings wait for their backward pass")
            return self._capture(options, kind, call)

    def _kind(self, graphs: type[Graph], call: ReplayCall) -> _Kind:
        """What is known of calls like this one.

        Args:
            graphs: how launches on this device are recorded.
            call: its launches read parameters and buffers where they are.
        """
        input_, kept = call.input_, [*call.parameters, *call.buffers]
        layouts = [(t.shape, t.stride()) for t in (input_, *call.extra_inputs)]
        alike = call.program, tuple(layouts), graphs.stream(input_.device), _modes()
        addresses = tuple([t.data_ptr() for t in kept])
        key = alike, addresses
        kind = self._kinds.get(key)
        if kind is None:
            unproven = self._unproven.setdefault(alike, set())
            kind = _Kind(addresses, unproven)
            if len(unproven) < _MAX_ADDRESSES:
                unproven.add(addresses)
            elif addresses not in unproven:
                kind.refusal = _ADDRESSES_MOVE
                return kind
            _shorten(self._unproven)
            _shorten(self._kinds)
            self._kinds[key] = kind
            if any(t.device != input_.device for t in kept):
                kind.refusal = _SEVERAL_DEVICES
        return kind

    def _capture(self, options: ReplayOptions, kind: _Kind, call: ReplayCall) -> Flight | Refusal:
        program, input_, parameters, _, extra_inputs, _ = call
        kind.captures += 1
        try:
            captured = Captured(program, input_, parameters, extra_inputs, options.memory)
        except Exception as error:  # noqa: BLE001 - whatever a capture does not allow
            kind.refusal = refusal_of_capture(error)
        else:
            if make_room(captured):
                kind.captured.append(captured)
                kind.unproven.discard(kind.addresses)
                self._count += 1
                logger.info("[replay] captured %s: %d bytes", _place(program), captured.bytes)
                return captured.take(parameters)
            kind.refusal = TOO_LARGE
        return kind.refusal

    def record(self, program: Program) -> ReplayRecord:
        """What became of the calls that followed ``program``."""
        own = [kind for key, kind in self._kinds.items() if key[0][0] is program]  # type: ignore[index]
        captured = [c for kind in own for c in kind.captured if not c.released]
        size = sum(c.bytes for c in captured)
        return ReplayRecord(
            tuple(range(len(program.plan.basic_ops))),
            len(captured),
            size,
            self._count,
            self._refusal,
        )


_ADDRESSES_MOVE = Refusal("ADDRESSES_MOVE", "parameters are elsewhere at every call")
_SEVERAL_DEVICES = Refusal("DEVICE", "the tensors of the call are on several devices")
_PLAIN = {Tensor, nn.Parameter}


def _shorten(kinds: dict[Hashable, Any]) -> None:
    """Forgets the oldest entry if there are too many; one with recordings last."""
    if len(kinds) >= _MAX_KINDS:
        idle = (key for key, kind in kinds.items() if not getattr(kind, "captured", None))
        del kinds[next(idle, next(iter(kinds)))]


def _refusal_of_call(graphs: type[Graph], call: ReplayCall) -> Refusal | None:
    """Why a call is not replayed whatever its plan."""
    inputs, parameters = [call.input_, *call.extra_inputs], call.parameters
    if not inputs[0].numel():
        return Refusal("SHAPE", "an empty tensor launches nothing")
    if call.kwargs is not None:
        return Refusal("OP_KWARGS", "keyword arguments of operations are not recorded")
    if not (_PLAIN.issuperset(map(type, inputs)) and _PLAIN.issuperset(map(type, parameters))):
        return Refusal("TENSOR_TYPE", "tensors of a subclass may do more than launch kernels")
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return Refusal("TORCH_MODE", "a TorchDispatchMode or TorchFunctionMode is to see all calls")
    if context_parallel.is_active():
        return Refusal("TORCH_MODE", "torch's context_parallel has attention exchange tensors")
    if torch._C._are_functorch_transforms_active():
        return Refusal("TRANSFORM", "a transform of torch.func is under way")
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return Refusal("SAVED_TENSOR_HOOKS", "hooks, as of a checkpoint, are to see saved tensors")
    if torch.is_anomaly_enabled():
        return Refusal("ANOMALY_MODE", "errors are to be traced to operations")
    if graphs.under_way():
        return Refusal("CAPTURING", "the caller captures a graph of its own")
    quantized = _refusal_of_quantization(call.program.plan.env.recipe)
    if quantized is not None:
        return quantized
    if len(inputs) > 1 and any(t.device != inputs[0].device for t in inputs):
        return _SEVERAL_DEVICES
    return None


def _refusal_of_quantization(recipe: Recipe | None) -> Refusal | None:
    """Why a call is not replayed because of what quantised compute keeps or tells around it."""
    if isinstance(recipe, Stateful) and (computed_again() is not None or parts_under_way()):
        return Refusal("CHECKPOINT", "what is computed twice has the scales of the first time")
    if kept_weights() is not None:
        return Refusal("KEPT_WEIGHTS", "quantised weights are kept for calls outside of recordings")
    if is_watched():
        return Refusal("WATCHED", "what is quantised is to be told")
    return None


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
    c = torch._C
    return (
        torch.is_inference_mode_enabled(),
        c._get_deterministic_algorithms(),
        # The older getter raises once the newer setter was used.
        c._get_fp32_precision_getter("cuda", "matmul"),
        c._get_cublas_allow_bf16_reduced_precision_reduction(),
        c._get_cublas_allow_fp16_reduced_precision_reduction(),
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
        tuple(c._get_sdp_priority_order()),
        # Without it collectives are identities.
        dist.is_available() and dist.is_initialized(),
    )


def _place(program: Program) -> str:
    ops = program.plan.basic_ops
    return f"{type(ops[0]).__name__} to {type(ops[-1]).__name__} ({len(ops)} operations)"
