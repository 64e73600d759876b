"""Sequential: the container of operations and plain modules."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn

from .basic import AddExtraInput, MakeExtraOutput
from .core.change_tracking import DERIVED, Clock, has_hooks, is_compiled, replaces_forward
from .core.traced_calls import ModulesInside
from .engine.autograd import Kwargs
from .engine.plan import Plan, Planned
from .engine.replayed.options import check_mode
from .engine.routing import CLOSED, Channels, PrivateChannel, Routes, wrong_count
from .errors import ArgumentTypeError, ConfigError
from .events.kinds import PlanInvalidated
from .fuser import OperationFuser, call_traced
from .quantization.recipe_state import init_recipe_state
from .quantization.region import active_recipe, check_recipe, region, region_of_call
from .recipe import Recipe
from .registry import registry
from .registry.configuration import FusionConfig
from .sequence.groups import Group, call, make_groups, own_channels, stretches, tell_regrouped
from .sequence.joined import join_plans, plan_groups
from .sequence.keywords import resolve_op_kwargs
from .sequence.module_sequence import Facts, ModuleSequence, flatten
from .sequence.placement import module_at, paths_of, place_operations, standing
from .sequence.tied_parameters import load_as_one, tie, tied_places
from .torch_internals import constant_result

# What is derived from the modules of a Sequential, before that is done.
_UNRESOLVED: dict[str, Any] = {
    "_groups": (),
    "_routes": Routes((), ()),
    "_calls": (),
    "_structure": None,
    "_single": None,
    "_called": (),
    "_seen": -1,
    "_within": None,
    "_crossing": None,
    "_nested": (),
    "_stands": ("", ()),
}


class Sequential(ModuleSequence):
    """A sequence of operations and modules, run in order, with groups of operations fused.

    A drop-in for ``torch.nn.Sequential`` with the interface of a Python list. Consecutive
    operations form a group that is planned, fused and differentiated as one; a plain module
    separates groups. The operations of a nested Sequential join the groups of its parent, unless it
    is a subclass or has hooks.

    Args:
        *args: operations and modules, or one dict from names to them.
        replay: "off", "on" or "auto": whether its calls are recorded and replayed, regardless of
            :class:`opfuser.replay`; None follows that. The outermost of nested sequences decides.
        recipe: of quantized compute, for its calls, regardless of the region; None follows
            :class:`opfuser.autocast`. A nested sequence with a recipe is called, not fused with its
            neighbors.
        fusion_config: a configuration of fusions for its operations. It has precedence over
            :class:`opfuser.fusion_config`, and the configuration of a nested sequence over that of
            the outer one. It does not apply to Sequentials in plain modules.

    Call:
        ``seq(input, *extra_inputs, op_kwargs=None)``. Extra inputs are passed in operation order;
        extra outputs are returned after the output, in operation order. ``op_kwargs`` maps a basic
        operation, or its index in this Sequential (negative ones too), to keyword arguments of its
        forward.

    Raises:
        ConfigError: ``fusion_config`` does not follow its schema, or states an order.
        ExtraInputCountError: a call passed more or fewer extra inputs than the operations read.
        OpKwargsError: a key of ``op_kwargs`` is not a basic operation of this Sequential.
        ChannelError: a channel has no producer, a producer after its reader, or several.
    """

    replay: str | None
    recipe: Recipe | None
    fusion_config: FusionConfig | None

    def __init__(
        self,
        *args: nn.Module | Mapping[str, nn.Module],
        replay: str | None = None,
        recipe: Recipe | None = None,
        fusion_config: FusionConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self._forget()
        self.replay = replay
        self.recipe = recipe
        self.fusion_config = fusion_config  # type: ignore[assignment]  # read when set
        if len(args) == 1 and isinstance(args[0], Mapping):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            self.extend(cast("tuple[nn.Module, ...]", args))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "replay" and value is not None:
            check_mode(value, type(self).__name__)
        if name == "recipe" and value is not None:
            check_recipe(value, type(self).__name__)
        if name == "fusion_config" and value is not None:
            value = registry.read(value, f"{type(self).__name__}.fusion_config")
            if value.orders:
                raise ConfigError.explained(
                    "The order of fusions is that of the program",
                    where=f"{type(self).__name__}.fusion_config",
                    received="order: listed",
                    remedy="State it in the file of OPFUSER_CONFIG or in opfuser.fusion_config",
                )
        super().__setattr__(name, value)
        if name == "recipe":
            self._init_recipe_state(self)
        elif isinstance(value, nn.Module):
            self._init_recipe_state(value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        self._init_recipe_state(module)

    def _init_recipe_state(self, module: nn.Module | None) -> None:
        recipe = self.__dict__.get("recipe")
        if recipe is not None and module is not None:
            init_recipe_state(module, recipe)

    def _like(self, modules: Mapping[str, nn.Module]) -> Sequential:
        return Sequential(modules, recipe=self.recipe, fusion_config=self.fusion_config)

    def __add__(self, modules: Iterable[nn.Module]) -> Sequential:
        return Sequential(*self, *modules)

    _groups: Sequence[Group]
    _routes: Routes
    _calls: Sequence[tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]]
    _structure: list[tuple[str, list[tuple[int, Hashable]]]] | None
    _single: OperationFuser | None
    _called: tuple[Group, ...]  # because of a hook or a forward, whose removal is not noticed
    _nested: Sequence[tuple[ModuleSequence, Channels]]  # with what crosses their borders
    # What calls it as a module, the path there, and the channels that cross its border.
    _crossing: tuple[weakref.ref[ModuleSequence], str, Channels] | None

    def _forget(self) -> None:
        """Drops everything derived from the modules."""
        self.__dict__.update(_UNRESOLVED)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As of any module; a parameter that is replaced, as by ``to_empty``, stays tied."""
        tied = tied_places(self)
        out = super()._apply(fn, recurse)
        for places in tied:
            tie(places)
        return out

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            for places in tied_places(self):
                load_as_one(places, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        derived = _UNRESOLVED.keys() | DERIVED
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = {"replay": None, "recipe": None, "fusion_config": None}
        super().__setstate__({**defaults, **state})
        self._forget()

    def own_channels(self) -> Channels:
        return own_channels(stretches(flatten(self)))

    def connect(self, crossing: Channels, outer: ModuleSequence) -> None:
        around = self._around()
        if crossing == around and (self._crossing is None or self._crossing[0]() is outer):
            return
        own = None
        if any(crossing):
            path = next(path for path, module in outer.named_modules() if module is self)
            own = weakref.ref(outer), path, crossing
        self.__dict__["_crossing"] = own
        if crossing != around:
            self.__dict__["_structure"] = None
            Clock.now += 1  # another one that calls it looks again

    def resolved_routes(self) -> Routes:
        self._resolve()
        return self._routes

    def _around(self) -> Channels:
        """The channels that cross its border, as long as a Sequential calls it as a module."""
        if self._crossing is None:
            return CLOSED
        ref, path, crossing = self._crossing
        outer = ref()
        if outer is not None and module_at(outer, path) is self:
            return crossing
        self.__dict__.update(_crossing=None, _structure=None)  # it was taken away since
        return CLOSED

    def _resolve(self) -> bool:
        """Groups the modules and routes extra tensors, if anything has changed."""
        now = Clock.now
        around = self._around()
        found = stretches(flatten(self))
        structure = [(split, [(id(m), scope) for m, scope in part]) for split, part in found]
        changed = structure != self._structure
        if changed:
            if PlanInvalidated.wanted:
                tell_regrouped(self._groups, found)
            groups, routes, nested = make_groups(found, self, around)
            only = groups[0].callee if len(groups) == 1 else None
            self.__dict__.update(
                _groups=groups,
                _routes=routes,
                _calls=[(group, path.takes, path.gives) for group, path in zip(groups, routes[0])],
                _nested=nested,
                _structure=structure,
                _single=only if isinstance(only, OperationFuser) else None,
                _called=tuple(g for g in groups if g.split in ("HOOK", "FORWARD")),
            )
        else:  # another Sequential may hold the nested ones too
            for module, crossing in self._nested:
                module.connect(crossing, self)
        for group in self._groups:
            if isinstance(group.callee, OperationFuser):
                group.callee.replay = self.replay
        if changed or self._seen != now:
            stands = standing(self)
            if changed or stands != self._stands:
                self.__dict__["_stands"] = stands
                place_operations(self, self._groups, *stands)
        self.__dict__["_seen"] = now
        return True

    def _describe(self) -> str:
        # Modules are told by their classes: layers that are alike share traced code.
        children = [(name, id(type(m)), has_hooks(m)) for name, m in self.named_children()]
        return repr((children, self.fusion_config))

    def _prepare_tracing(self) -> None:
        self._resolve()

    def _fuser_of(self, group: int) -> Any:
        return self._groups[group].callee

    @constant_result
    def _groups_for_tracing(self, extra_inputs: int) -> tuple[Any, ...]:
        """For each group the number of the module that is called, or None; and its route."""
        self._check_count(extra_inputs)
        numbers = ModulesInside(self).numbers
        groups = []
        for group, route in zip(self._groups, self._routes.groups):
            fused = isinstance(group.callee, OperationFuser)
            number = None if fused else numbers[id(group.callee)]
            takes = tuple(t if isinstance(t, int) else str(t) for t in route.takes)
            gives = tuple((None if key is None else str(key), to) for key, to in route.gives)
            groups.append((number, takes, gives))
        return tuple(groups)

    def _calls_to_trace(self, modules: list[Any], extra_inputs: int) -> list[Any]:
        """The calls of :meth:`_walk`, given the modules inside."""
        calls = []
        for n, (number, takes, gives) in enumerate(self._groups_for_tracing(extra_inputs)):
            if number is None:
                calls.append((functools.partial(call_traced, self, modules, n), takes, gives))
            else:
                calls.append((functools.partial(call, modules[number]), takes, gives))
        return calls

    @property
    def num_extra_inputs(self) -> int:
        """Number of extra inputs that the caller passes."""
        self._resolve()
        return len(self._routes.expects)

    @property
    def num_extra_outputs(self) -> int:
        """Number of extra outputs that the caller receives."""
        self._resolve()
        return sum(to_caller for path in self._routes.groups for _, to_caller in path.gives)

    @property
    def _module_groups(self) -> list[OperationFuser | nn.Module] | None:
        if self._structure is None:
            return None
        return [group.callee for group in self._groups]

    def forward(
        self,
        input: Any,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None = None,
    ) -> Any:
        """Runs the operations and modules in order, fused according to the plan for these tensors.

        The plan is looked up in a cache, or made if it is the first for this kind of tensors, these
        operations and these fusions. If a gradient is needed, each group of operations is one node
        of the autograd graph, whose backward runs the plan's backward steps.

        Args:
            input: the input of the first operation or module, which documents shapes and dtypes.
            *extra_inputs: the extra inputs of all operations that read one from the caller, in
                operation order.
            op_kwargs: keyword arguments of the forward of basic operations, by operation or by
                index in this Sequential; negative indices count from the end.

        Returns:
            The output of the last operation or module. If operations return extra outputs to the
            caller, a tuple of the output and these, in operation order.

        Raises:
            ArgumentTypeError: an input or extra input of operations is not a tensor.
            ExtraInputCountError: more or fewer extra inputs than the operations read.
            OpKwargsError: a key of ``op_kwargs`` is not a basic operation of this Sequential, or
                the operation does not accept a keyword.
            ChannelError: a channel has no producer, a producer after its reader, or several.
        """
        if self.recipe is not None and self.recipe is not active_recipe():
            with region_of_call(self.recipe):
                # Not self.forward: a wrapper or a subclass that called this is not called again.
                return Sequential.forward(self, input, *extra_inputs, op_kwargs=op_kwargs)
        if torch.compiler.is_compiling():
            return self._forward_traced(input, extra_inputs, op_kwargs)
        if self._seen != Clock.now or (
            self._called and not all(group.stays_called() for group in self._called)
        ):
            self._resolve()
        if not op_kwargs:
            if self._single is not None:
                return self._single(input, *extra_inputs)
            self._check_count(len(extra_inputs))
            return self._walk(self._calls, input, extra_inputs, None)
        kwargs, caches = resolve_op_kwargs(self, self._groups, op_kwargs)
        if self._single is not None:
            result = self._single(input, *extra_inputs, basic_op_kwargs=kwargs[0])
        else:
            self._check_count(len(extra_inputs))
            result = self._walk(self._calls, input, extra_inputs, kwargs)
        for cache in caches:  # only now: a call that raises must store nothing
            cache.keep()
        return result

    def _forward_traced(
        self,
        input_: Any,
        extra_inputs: Sequence[Tensor],
        op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None,
    ) -> Any:
        """As :meth:`forward`, for torch.compile to trace."""
        modules = self._guard_trace()
        calls = self._calls_to_trace(modules, len(extra_inputs))
        if not op_kwargs:
            return self._walk(calls, input_, extra_inputs, None)
        self._guard_identity(modules)
        kwargs, caches = resolve_op_kwargs(self, self._groups, op_kwargs)
        result = self._walk(calls, input_, extra_inputs, kwargs)
        for cache in caches:
            cache.keep()
        return result

    def _walk(
        self,
        calls: Sequence[tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]],
        x: Any,
        extra_inputs: Sequence[Tensor],
        kwargs: list[Kwargs] | None,
    ) -> Any:
        """Calls the groups in order and passes extra tensors between them.

        Args:
            calls: for each group what calls it, and where its extra tensors come from and go to.
            x: the input.
            extra_inputs: those that the caller passes.
            kwargs: those of each group.
        """
        to_caller: list[Tensor] = []
        stored: dict[Hashable, Tensor] = {}
        for n, (group, takes, gives) in enumerate(calls):
            extras = [
                extra_inputs[take] if isinstance(take, int) else stored[take] for take in takes
            ]
            y = group(x, extras, None if kwargs is None else kwargs[n])
            if not gives:
                x = y
                continue
            x = y[0]
            for (key, public), extra_output in zip(gives, y[1:]):
                if key is not None:
                    stored[key] = extra_output
                if public:
                    to_caller.append(extra_output)
        return (x, *to_caller) if to_caller else x

    def _check_count(self, extra_inputs: int) -> None:
        expects = self._routes.expects
        if extra_inputs != len(expects):
            raise wrong_count(expects, extra_inputs)

    def to_torch(self) -> nn.Module:
        """A ``torch.nn.Sequential`` with the same parameters; see :func:`opfuser.to_torch`."""
        module: nn.Module = import_module("opfuser.integrations.torch_nn").to_torch(self)
        return module

    def plan(self, input: Tensor, *extra_inputs: Tensor) -> Plan:
        """The plan that a call with these tensors would follow, as data.

        Nothing runs: operations declare the dtypes that they return (``output_dtype``). A plain
        module between groups is assumed to return its input's dtype, or the autocast dtype;
        ``plan.assumed`` lists this for modules that are not torch's own. :attr:`last_plan` reflects
        what the last call really returned.

        Args:
            input: as in a call; dtype, device and ``requires_grad`` are read, the shape is not.
            *extra_inputs: as in a call.

        Raises:
            ArgumentTypeError: an argument is not a tensor, or this Sequential holds no operations.
            ExtraInputCountError: more or fewer extra inputs than the operations read.
        """
        for t in (input, *extra_inputs):
            if not isinstance(t, Tensor):
                raise ArgumentTypeError.explained(
                    "A plan is made for tensors", received=type(t).__name__
                )
        self._resolve()
        self._check_count(len(extra_inputs))
        plans = self.planned_groups(input, extra_inputs).plans
        if not plans:
            raise ArgumentTypeError.explained(
                "This Sequential holds no operations, so it has no plan"
            )
        return self._named(plans[0])

    def planned_groups(self, x: Facts, extra_inputs: Sequence[Facts]) -> Planned:
        if self.recipe is not None and self.recipe is not active_recipe():
            with region(self.recipe):
                return self.planned_groups(x, extra_inputs)
        self._resolve()
        return plan_groups(self._groups, self._routes, x, extra_inputs)

    def joins_outer(self) -> bool:
        if self.recipe is not None or is_compiled(self) or has_hooks(self):
            return False
        return type(self) is Sequential and not self.overrides_forward()

    def overrides_forward(self) -> bool:
        return replaces_forward(self) or type(self).forward is not Sequential.forward

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the last call, or None before the first call."""
        plans = [group.last_plans() for group in self._groups]
        plan = join_plans(self._groups, plans, torch.is_grad_enabled())
        return None if plan is None else self._named(plan)

    def _named(self, plan: Plan) -> Plan:
        paths = paths_of(self)
        forward, backward = (
            tuple(s if s.indices else replace(s, path=paths.get(id(s.op), "")) for s in steps)
            for steps in (plan.forward, plan.backward)
        )
        names = tuple(paths.get(id(op), "") for op in plan.basic_ops)
        return replace(plan, forward=forward, backward=backward, names=names)


def Residual(*ops: nn.Module) -> Sequential:  # noqa: N802 - reads as the module that it makes
    """``y = x + ops(x)`` as operations: MakeExtraOutput, ``ops``, AddExtraInput.

    The skip connection is a channel that is private to this residual, so copies, nested and
    neighboring residuals do not interfere.

    Args:
        *ops: operations and modules of the branch.
    """
    channel = PrivateChannel("residual")
    make, add = MakeExtraOutput(), AddExtraInput()
    make.set_extra_output_channel(0, channel, output_to_caller=False)
    add.set_extra_input_channel(0, channel)
    return Sequential(make, *ops, add)
