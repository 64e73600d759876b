"""OperationFuser: finds the plan of a call, cached under a complete key, and executes it."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from .core.change_tracking import Clock, active_calls, signature
from .core.context import TensorFacts, autocast_dtype
from .core.fusion import Env, FusionFunction, Stage
from .core.op_base import BasicOperation, FusedOperation, FusibleOperation
from .core.traced_calls import Functions, TracedCalls, TracedParameter, parameters_at
from .distributed.local_parameters import local_places, local_values
from .engine.autograd import Kwargs, execute_eagerly
from .engine.compiled import in_graph
from .engine.compiled.traced import execute
from .engine.guards import Recent, guard_of
from .engine.limits import Limits, facts_of_operations
from .engine.parametrizations import fake_value, one_value_each, read_through, refuse_impure
from .engine.plan import Plan, Planned, Wiring, expand
from .engine.plan_changes import invalidated
from .engine.plan_key import CallFacts, PlanKey, call_facts
from .engine.planning import grad_needs, make_plan
from .engine.program import Program
from .engine.replayed.graphs import graph_type
from .engine.replayed.options import current
from .engine.routing import RoutedGroup, Routing, describe, output_dtypes, route, wrong_count
from .errors import ArgumentTypeError, NotSupportedError
from .events.kinds import PlanInvalidated
from .events.telling import emit
from .quantization.region import open_regions, recipe_of_call, refuse_to_trace
from .quantization.weights import is_fp8
from .registry import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    registry,
)
from .registry.configuration import Place
from .runtime.tracing import exporting

if TYPE_CHECKING:
    from .engine.replayed.replay import Replays

__all__ = [
    "OperationFuser",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]

# A plan is small, but a flag that a user changes at every call must not accumulate plans.
_MAX_PLANS = 64


def units(modules: Iterable[FusibleOperation]) -> list[FusibleOperation]:
    """The operations that a plan starts from: compounds are replaced by their basic operations."""
    out: list[FusibleOperation] = []
    for op in modules:
        out.extend(op.basic_ops if isinstance(op, FusedOperation) and op.is_compound() else [op])
    return out


class _FusionFunctions:
    """Read-only view of the registered functions of one stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage: Stage = stage

    def __get__(self, instance: object, owner: type | None = None) -> tuple[FusionFunction, ...]:
        return tuple(handle.function for handle in registry.handles[self.stage])


class OperationFuser(TracedCalls):
    """Runs a list of operations as one differentiable function, fused as the plan says.

    Args:
        ops: operations in forward order.
        routing: of extra tensors; a Sequential states it. None: channels among ``ops``, all else
            from the caller and to it.

    A call passes the input and all extra inputs in operation order. It returns the output, or a
    tuple of it and the public extra outputs.

    Raises:
        ArgumentTypeError: an input or extra input is no tensor.
        ExtraInputCountError: a call passed more or fewer extra inputs than the operations read.
        NotSupportedError: torch.compile traces a call that computes quantised.
    """

    forward_fusion_functions = _FusionFunctions("forward")
    backward_fusion_functions = _FusionFunctions("backward")
    forward_backward_fusion_functions = _FusionFunctions("joint")

    def __init__(self, ops: Sequence[FusibleOperation], *, routing: Routing | None = None) -> None:
        self._given_ops = tuple(ops)
        self._units = units(ops)
        self._basic_ops: list[BasicOperation] = [b for unit in self._units for b in expand(unit)]
        if routing is None:
            group = RoutedGroup(tuple(self._basic_ops), (0,) * len(self._basic_ops))
            routing = route([group]).groups[0].routing
            assert routing is not None
            for op in self._basic_ops:
                op.__dict__["_routing_captured"] = True
        self.routing = routing
        self.num_extra_inputs = len(routing.inputs)
        self._without_keywords = [
            n for n, op in enumerate(self._basic_ops) if not op.takes_keywords
        ]
        self._programs: dict[PlanKey, Program] = {}
        self._traced = Functions()
        self._recent = Recent[Program]()
        self._key: PlanKey | None = None
        self._used: Program | None = None
        self.replay: str | None = None
        self._places_of_ops: tuple[Place, ...] = ()
        self._paths: list[str] = []
        self._has_own_configs = False
        self._seen = self._started = -1

    def _refresh(self) -> None:
        """Reads the operations again after any of them may have changed."""
        now = Clock.now
        slots = [op.parameter_slots() for op in self._basic_ops]
        self._num_parameters = tuple(map(len, slots))
        self._slots = [slot for row in slots for slot in row]
        self._parametrized = False
        for module, name in self._slots:
            if name not in module._parameters:
                self._parametrized = True  # or computed by a hook
                if parametrize.is_parametrized(module, name):
                    read_through(module, name)
        self._local = local_places(self._slots)
        self._parametrized = self._parametrized or bool(self._local)
        self._places = [(module._parameters, name) for module, name in self._slots]
        self._signature = tuple(
            map(signature, {id(op): op for op in [*self._units, *self._basic_ops]}.values())
        )
        self._recent = Recent()
        self._seen = now  # last: another thread that reads it then reads all of the above

    def _start(self) -> None:
        """As :meth:`_refresh`, for a call: planning alone starts nothing."""
        if self._started < 0:
            for op in self._basic_ops:
                op.pre_first_fuser_forward()
        self._refresh()
        self._started = self._seen

    def _read_parameters(self) -> list[Tensor]:
        if self._parametrized:
            return [getattr(module, name) for module, name in self._slots]
        return [parameters[name] for parameters, name in self._places]  # type: ignore[misc]

    def _check(self, input_: Tensor, extra_inputs: Sequence[Tensor]) -> None:
        _check_tensors(input_, extra_inputs)
        self._check_count(len(extra_inputs))

    def _check_count(self, extra_inputs: int) -> None:
        if extra_inputs != self.num_extra_inputs:
            asked = [describe(slot.op, self._basic_ops[slot.op]) for slot in self.routing.inputs]
            raise wrong_count(asked, extra_inputs)

    def __call__(self, input: Tensor, *extra_inputs: Tensor, basic_op_kwargs: Kwargs = None) -> Any:
        if extra_inputs or self.num_extra_inputs or not isinstance(input, Tensor):
            self._check(input, extra_inputs)
        if basic_op_kwargs is not None:
            for n in self._without_keywords:
                if basic_op_kwargs[n]:
                    self._basic_ops[n].check_keywords(basic_op_kwargs[n])
        if torch.compiler.is_compiling():
            return call_traced(self, self._guard_trace(), 0, input, extra_inputs, basic_op_kwargs)
        if self._started != Clock.now:
            self._start()
        if self._parametrized:
            with one_value_each(), local_values(self._local):
                return self._call(input, extra_inputs, basic_op_kwargs)
        return self._call(input, extra_inputs, basic_op_kwargs)

    def _call(self, input_: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs) -> Any:
        parameters = self._read_parameters()
        program = self._used = self._program(input_, parameters, extra_inputs)
        options = current()
        if self.replay is not None:
            options = options.of_sequence(self.replay)
        if options.mode == "off" or (options.mode == "auto" and self._is_not_replayed(input_)):
            return execute_eagerly(program, input_, parameters, extra_inputs, kwargs)
        active_calls.depth += 1
        try:
            return self._replays.call(options, program, input_, parameters, extra_inputs, kwargs)
        finally:
            active_calls.depth -= 1

    @functools.cached_property
    def _replays(self) -> Replays:
        """The recorded calls, where a device can record any; loaded there alone."""
        replays: Replays = import_module("opfuser.engine.replayed.replay").Replays()
        return replays

    def _is_not_replayed(self, input_: Tensor) -> bool:
        """Whether nobody looks, in mode "auto", if a call can be replayed."""
        return graph_type(input_.device) is None or self._replays.pauses()

    def _program(
        self,
        input_: Tensor | TensorFacts,
        parameters: Sequence[Tensor],
        extra_inputs: Sequence[Tensor | TensorFacts],
    ) -> Program:
        recipe = recipe_of_call()
        version, recent = registry.version, self._recent
        found = recent.found
        for entry in found:
            found_at, guard, program = entry
            if found_at == version and guard(input_, parameters, extra_inputs, recipe):
                if entry is not found[0]:
                    recent.put_first(entry)
                return program
        facts = CallFacts.frozen(call_facts(input_, parameters, extra_inputs, recipe))
        program = self._find(facts)
        recent.put_first((version, guard_of(facts), program))
        return program

    def _find(self, facts: CallFacts) -> Program:
        """The program of a call, from the cache or made anew."""
        places = self._places_of_ops if self._is_configured() else ()
        key = PlanKey((*registry.state(), places), self._signature, facts)
        program = self._programs.get(key)
        if program is None:
            if PlanInvalidated.wanted and self._key is not None:
                old = self._programs.get(self._key)
                number = 0 if old is None else old.plan.numbers[0]
                emit(invalidated(number, self._key, key, self._units, self._basic_ops))
            program = self._make(facts)
            if len(self._programs) >= _MAX_PLANS:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = program
        self._key = key
        return program

    def stand(self, places: tuple[Place, ...]) -> None:
        """States where the basic operations stand; without, they stand nowhere."""
        self._places_of_ops = places
        self._paths[:] = [place.path for place in places]
        self._has_own_configs = any(place.around for place in places)

    def _is_configured(self) -> bool:
        return self._has_own_configs or bool(registry.configs)

    def _make(self, facts: CallFacts) -> Program:
        flags = iter(facts.parameters_require_grad or [False] * len(facts.parameter_dtypes))
        own = [tuple(next(flags) for _ in range(n)) for n in self._num_parameters]
        extras = [flag for _, flag in facts.extra_inputs]
        needs = grad_needs(own, self.routing, facts.requires_grad, extras)
        env = Env(
            facts.device,
            facts.dtype,
            facts.autocast_dtype,
            facts.grad_enabled,
            tuple(need is not None for need in needs),
            facts.recipe,
        )
        registry.tell_unknown()
        limits = None
        if self._is_configured():
            ops, places = self._basic_ops, self._places_of_ops
            limits = Limits(
                facts_of_operations(ops, self.routing, self._num_parameters, places, facts)
            )
        plan = make_plan(self._units, env, needs, registry, limits)
        wiring = Wiring(self.routing, self._num_parameters, self._paths)
        return Program(dataclasses.replace(plan, wiring=wiring))

    # While torch.compile traces, planning runs as ordinary Python and stores its result under a
    # name; the traced code only looks it up.

    def _fuser_of(self, group: int) -> OperationFuser:
        return self

    def parameters_for_tracing(
        self, numbers: dict[int, int], extra_inputs: int
    ) -> list[TracedParameter]:
        """Where the parameters stand, given the numbers of modules by id.

        Raises:
            ExtraInputCountError: a call with so many extra inputs is no call of the operations.
            NotSupportedError: a parameter is none that torch.compile can trace.
        """
        self._check_count(extra_inputs)
        registry.state()  # loads plug-ins before the traced code is guarded by what is registered
        self._start()
        if self._local:
            raise NotSupportedError.explained(
                "Parameters that are DTensors are not traced by torch.compile",
                received=f"{len(self._local)} of them, as after parallelize",
                remedy="Call the sequence as it is",
            )
        for module, name in self._slots:
            if parametrize.is_parametrized(module, name):
                refuse_impure(module, name)
        places = []
        for op in self._basic_ops:
            own = numbers[id(op)]  # by which the parameters of its compound are found, too
            for module, name in op.parameter_slots():
                number = numbers.get(id(module), own)
                places.append(TracedParameter(number, name, name not in module._parameters))
        return places

    def plan_for_tracing(
        self, registered: str, facts: tuple[Any, ...], without_keywords: bool
    ) -> tuple[str, bool]:
        """The name of a call's program, and whether it is one function of the graph.

        The arguments are constants that guard the traced code.

        Args:
            registered: the stamp of the registry.
            facts: what :func:`call_facts` returns.
            without_keywords: whether the call has none.
        """
        call = CallFacts.frozen(facts)
        trained = zip(call.parameter_dtypes, call.parameters_require_grad or ())
        for n, op in enumerate(self._basic_ops if call.grad_enabled else ()):
            if op.__dict__.get("_delay_wgrad_compute"):
                raise NotSupportedError.explained(
                    "Gradients that wait for backward_dw() are not traced by torch.compile",
                    where=describe(n, op),
                    received="delay_wgrad_compute=True",
                    remedy="Call the sequence as it is",
                )
        if any(is_fp8(dtype) and needed for dtype, needed in trained):
            raise NotSupportedError.explained(
                "Gradients of weights in FP8 are not traced by torch.compile, which would round"
                " them to FP8",
                remedy="Call the sequence as it is, with opfuser.replay, or without grad",
            )
        if exporting():
            # Its program is forward alone, which torch differentiates.
            call = call.without_grad()
        program = self._used = self._find(call)
        # A name of its own, so that code traced before need not be traced again.
        name = f"program_{id(program)}"
        program.prepare_tracing()
        setattr(self._traced, name, program)
        whole = without_keywords and not self._parametrized
        whole = whole and in_graph.fits(program, self._read_parameters())
        if whole:
            me = weakref.ref(self)

            def find() -> tuple[Program, in_graph.Places]:
                own = me()
                assert own is not None  # else the function is gone as well
                return getattr(own._traced, name), own._places

            key = (self._key, self.routing, self._num_parameters)
            return in_graph.name_of(key, self, find), True
        return name, False

    def plan(self, input_: Tensor, *extra_inputs: Tensor) -> Plan:
        """The plan that a call with tensors of these dtypes, and any shapes, would follow."""
        self._check(input_, extra_inputs)
        with self._local_values():
            return self._program(input_, self._fake_parameters(), extra_inputs).plan

    def _local_values(self) -> AbstractContextManager[None]:
        """As :func:`local_values` for the parameters, which are read again after a change."""
        if self._seen != Clock.now:
            self._refresh()
        return local_values(self._local)

    def _fake_parameters(self) -> list[Tensor]:
        """As :meth:`_read_parameters`, with parametrised ones computed by :func:`fake_value`."""
        return [
            fake_value(module, name)
            if name not in module._parameters and parametrize.is_parametrized(module, name)
            else getattr(module, name)
            for module, name in self._slots
        ]

    def planned(
        self, input_: Tensor | TensorFacts, extra_inputs: Sequence[Tensor | TensorFacts]
    ) -> Planned:
        """The plan for tensors of these dtypes, of any shapes, and what their call returns."""
        with self._local_values():
            parameters = self._fake_parameters()
            plan = self._program(input_, parameters, extra_inputs).plan
        dtypes, of_extras = output_dtypes(
            self._basic_ops,
            self.routing,
            self._num_parameters,
            input_.dtype,
            [p.dtype for p in parameters],
            [t.dtype for t in extra_inputs],
            autocast_dtype(input_.device),
        )

        def facts(op: int, dtype: torch.dtype) -> TensorFacts:
            needed = plan.needs[op] is not None if plan.needs else input_.requires_grad
            return TensorFacts(dtype, input_.device, needed and dtype.is_floating_point)

        extra_outputs = [facts(at, of_extras[at][slot]) for at, slot in self.routing.outputs]
        return Planned([plan], facts(-1, dtypes[-1] if dtypes else input_.dtype), extra_outputs)

    @property
    def last_plan(self) -> Plan | None:
        """The plan that was used last, with what was recorded of its calls."""
        used = self._used
        if used is None:
            return None
        recordings = (used.recordings(),)
        replays = self._replays.records(used) if "_replays" in vars(self) else ()
        return dataclasses.replace(used.plan, replays=replays, recordings=recordings)

    def _steps(self, stage: str) -> list[tuple[Any, list[int]]]:
        plan = self.last_plan
        steps = () if plan is None else plan.forward if stage == "forward" else plan.backward
        return [(step.op, list(step.indices)) for step in steps]

    @property
    def _forward_ops(self) -> list[tuple[Any, list[int]]]:
        return self._steps("forward")

    @property
    def _backward_ops(self) -> list[tuple[Any, list[int]]]:
        return self._steps("backward")

    @property
    def _basic_op_extra_input_sources(self) -> list[list[tuple[int, int] | None]]:
        return [
            [None if isinstance(source, int) else (source.op, source.slot) for source in row]
            for row in self.routing.sources
        ]


def _check_tensors(input_: Tensor, extra_inputs: Sequence[Tensor]) -> None:
    if not isinstance(input_, Tensor) or not all(isinstance(t, Tensor) for t in extra_inputs):
        got = ", ".join(type(t).__name__ for t in (input_, *extra_inputs))
        raise ArgumentTypeError.explained(
            "Inputs and extra inputs of operations are tensors", received=got
        )


def call_traced(
    root: TracedCalls,
    modules: list[Any],
    group: int,
    input_: Tensor,
    extra_inputs: Sequence[Tensor],
    kwargs: Kwargs,
) -> Any:
    """What a group of operations returns, for torch.compile to trace.

    Args:
        root: what holds them.
        modules: those inside, as ``_guard_trace`` has returned them.
        group: its number there.
        input_: of the group.
        extra_inputs: of the group.
        kwargs: of each operation, or None.
    """
    _check_tensors(input_, extra_inputs)
    places = root._parameters_for_tracing(group, len(extra_inputs))
    parameters = parameters_at(modules, places)
    facts = call_facts(input_, parameters, extra_inputs, None)
    if open_regions.count:
        refuse_to_trace(open_regions.changes)
    name, whole = root._plan_for_tracing(group, registry.stamp, facts, kwargs is None)
    if whole:
        return getattr(in_graph.functions, name)(input_, *parameters, *extra_inputs)
    root._guard_identity(modules)
    program = getattr(root._fuser_of(group)._traced, name)
    return execute(program, input_, parameters, extra_inputs, kwargs)
