"""Sequential: the container of operations and plain modules."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn

from .attention.cache import PendingCache, pending_of
from .basic import AddExtraInput, MakeExtraOutput
from .change_tracking import (
    DERIVED,
    Clock,
    has_hooks,
    is_compiled,
    replaces_forward,
)
from .context import TensorFacts
from .engine.autograd import Kwargs
from .engine.joined import Joint, join_plans
from .engine.plan import Plan, expand
from .engine.replay_options import check_mode
from .engine.routing import CLOSED, Channels, PrivateChannel, Routes, Slot
from .errors import (
    ArgumentTypeError,
    ConfigError,
    ExtraInputCountError,
    OpKwargsError,
    explain,
)
from .events.kinds import PlanInvalidated
from .fuser import OperationFuser, call_traced, check_keywords, count_message
from .fusion_config import FusionConfig, Place, glob_names
from .groups import (
    Facts,
    Group,
    NestedSequential,
    PlannedGroup,
    call,
    make_groups,
    own_channels,
    stretches,
    tell_regrouped,
)
from .op import BasicOperation, FusedOperation, FusibleOperation
from .op.kinds import has_called_parts
from .quantization.recipe_state import init_recipe_state
from .quantization.region import active_recipe, check_recipe, region, region_of_call
from .recipe import Recipe
from .registry import registry
from .tied_parameters import load_as_one, tie, tied_places
from .torch_internals import constant_result
from .traced_calls import ModulesInside

logger = logging.getLogger("opfuser")

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


class Sequential(NestedSequential):
    """A sequence of operations and modules, run in order, with groups of operations fused.

    A drop-in for ``torch.nn.Sequential`` with the interface of a Python list. Consecutive
    operations form a group that is planned, fused and differentiated as one; a plain module
    separates groups. The operations of a nested Sequential join the groups of its parent, unless it
    is of a subclass or carries hooks.

    Args:
        *args: operations and modules, or one dict from names to them.
        replay: "off", "on" or "auto": whether its calls are recorded and replayed, see
            :class:`opfuser.replay`, whatever the program says; None leaves it to the program. The
            outermost of nested sequences decides.
        recipe: of quantised compute, for its calls, whatever the region; None leaves it to
            :class:`opfuser.autocast`. A nested sequence with a recipe is called, not fused with its
            neighbours.
        fusion_config: a configuration of fusions for its operations, as of
            :class:`opfuser.fusion_config`, over which it has precedence; that of a nested sequence
            has precedence over that of the outer one. It does not reach Sequentials in plain
            modules.

    Call:
        ``seq(input, *extra_inputs, op_kwargs=None)``. Extra inputs are passed in operation order;
        extra outputs are returned after the output, in operation order. ``op_kwargs`` maps a basic
        operation, or its index in this Sequential (negative ones too), to keyword arguments of its
        forward.

    Raises:
        ConfigError: ``fusion_config`` is not of its schema, or states an order.
        ExtraInputCountError: a call passed more or fewer extra inputs than the operations read.
        OpKwargsError: a key of ``op_kwargs`` is no basic operation of this Sequential.
        ChannelError: a channel lacks a producer, has a late one, or several.
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

    def _keys(self, index: int | slice) -> list[str]:
        keys = list(self._modules)
        if isinstance(index, slice):
            return keys[index]
        if not isinstance(index, int):
            raise ArgumentTypeError.explained(
                "A Sequential is indexed by int or slice", received=type(index).__name__
            )
        if not -len(keys) <= index < len(keys):
            raise IndexError(
                explain(f"Index {index} is out of range", received=f"a Sequential of {len(keys)}")
            )
        return [keys[index]]

    def _next_key(self) -> str:
        return str(max((int(key) + 1 for key in self._modules if key.isdecimal()), default=0))

    def _rearrange(self, items: Iterable[tuple[str, nn.Module | None]]) -> None:
        """Replaces the modules. They keep their names; 0, 1, 2, … are numbered anew."""
        numbered = list(self._modules) == [str(n) for n in range(len(self._modules))]
        self._modules = {str(n) if numbered else key: m for n, (key, m) in enumerate(items)}
        self._touch()
        self._init_recipe_state(self)

    def _check_module(self, module: object) -> nn.Module:
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError.explained(
                "A Sequential holds operations and modules",
                received=type(module).__name__,
                remedy="Wrap a function in a torch.nn.Module, or write it as an operation",
            )
        return module

    def __getitem__(self, index: int | slice) -> Any:
        keys = self._keys(index)
        if isinstance(index, slice):
            modules = {key: cast(nn.Module, self._modules[key]) for key in keys}
            return Sequential(modules, recipe=self.recipe, fusion_config=self.fusion_config)
        return self._modules[keys[0]]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        if not isinstance(index, int):
            raise ArgumentTypeError.explained(
                "One module of a Sequential is set at a time",
                received=type(index).__name__,
                remedy="Set by int, or build a new Sequential",
            )
        self._modules[self._keys(index)[0]] = self._check_module(module)
        self._touch()
        self._init_recipe_state(module)

    def __delitem__(self, index: int | slice) -> None:
        removed = set(self._keys(index))
        self._rearrange([item for item in self._modules.items() if item[0] not in removed])

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(cast("Iterable[nn.Module]", self._modules.values()))

    def append(self, module: nn.Module) -> Sequential:
        """Adds a module at the end.

        Raises:
            ArgumentTypeError: ``module`` is no ``torch.nn.Module``.
        """
        self.add_module(self._next_key(), self._check_module(module))
        return self

    def extend(self, modules: Iterable[nn.Module]) -> Sequential:
        """Adds modules at the end.

        Raises:
            ArgumentTypeError: one is no ``torch.nn.Module``; those before it have been added.
        """
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> Sequential:
        """Adds a module before the one at ``index``.

        Modules with names keep them, and the new one gets the next free number. If all are named by
        their position, they are renumbered, as in ``torch.nn.Sequential``.

        Raises:
            IndexError: ``index`` is out of range.
            ArgumentTypeError: ``module`` is no ``torch.nn.Module``.
        """
        self._check_module(module)
        size = len(self._modules)
        if not -size <= index <= size:
            raise IndexError(
                explain(f"Index {index} is out of range", received=f"a Sequential of {size}")
            )
        items = list(self._modules.items())
        items.insert(index, (self._next_key(), module))
        self._rearrange(items)
        return self

    def pop(self, index: int | slice = -1) -> Any:
        """Removes and returns the module at ``index``."""
        module = self[index]
        del self[index]
        return module

    def __iadd__(self, modules: Iterable[nn.Module]) -> Sequential:
        return self.extend(modules)

    def __mul__(self, times: int) -> Sequential:
        if not isinstance(times, int) or times < 1:
            raise ArgumentTypeError.explained(
                "A Sequential is repeated a positive number of times", received=repr(times)
            )
        modules = [m for _ in range(times) for m in self]
        return Sequential(*modules, recipe=self.recipe, fusion_config=self.fusion_config)

    __rmul__ = __mul__

    def __imul__(self, times: int) -> Sequential:
        return self.extend(list(self * times)[len(self) :])

    def __add__(self, modules: Iterable[nn.Module]) -> Sequential:
        return Sequential(*self, *modules)

    _groups: Sequence[Group]
    _routes: Routes
    _calls: Sequence[tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]]
    _structure: list[tuple[str, list[tuple[int, Hashable]]]] | None
    _single: OperationFuser | None
    _called: tuple[Group, ...]  # because of a hook or a forward, whose removal is not noticed
    _seen: int
    _within: tuple[weakref.ref[Sequential], str] | None  # what calls it as a module, and the path
    _nested: Sequence[tuple[NestedSequential, Channels]]  # with what crosses their borders
    # What calls it as a module, the path there, and the channels that cross its border.
    _crossing: tuple[weakref.ref[NestedSequential], str, Channels] | None
    _stands: tuple[str, tuple[tuple[str, FusionConfig], ...]]

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

    def connect(self, crossing: Channels, outer: NestedSequential) -> None:
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
        if outer is not None and _module_at(outer, path) is self:
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
            stands = self._standing()
            if changed or stands != self._stands:
                self.__dict__["_stands"] = stands
                self._place_operations(*stands)
        self.__dict__["_seen"] = now
        return True

    def _standing(self) -> tuple[str, tuple[tuple[str, FusionConfig], ...]]:
        """The beginning of the paths of its operations, and the configurations that reach some.

        Both are those of the outermost Sequential that calls it, if one does.
        """
        above = ""
        around: tuple[tuple[str, FusionConfig], ...] = ()
        outer = None if self._within is None else self._within[0]()
        if self._within is not None and outer is not None:
            path = self._within[1]
            if _module_at(outer, path) is self:  # it was not taken away since
                below, configs = outer._stands if outer._seen == Clock.now else outer._standing()
                above = f"{below}{path}."
                around = tuple(c for c in configs if above.startswith(c[0]))
        return above, (*around, *self._configured(above))

    def _configured(self, prefix: str) -> Iterator[tuple[str, FusionConfig]]:
        """The configurations of this Sequential and of those that it takes the operations of.

        Each with the beginning of the paths of their operations, the outer ones first.
        """
        if self.fusion_config is not None:
            yield prefix, self.fusion_config
        for name, module in self._modules.items():
            if type(module) is Sequential and not is_called(module):
                yield from module._configured(f"{prefix}{name}.")

    def _place_operations(self, above: str, configs: Sequence[tuple[str, FusionConfig]]) -> None:
        """Says to the groups where their operations stand, and what configurations hold there."""
        paths = self._paths()
        ops = [op for group in self._groups for op in group.ops]
        places = {id(op): _place(above + paths.get(id(op), ""), configs) for op in ops}
        reached = [place.path for place in places.values()]
        for group in self._groups:
            if isinstance(group.callee, OperationFuser):
                group.callee.stand(tuple(places[id(op)] for op in group.ops))
            elif isinstance(group.callee, FusibleOperation) and group.split == "HOOK":
                parts = expand(group.callee) if has_called_parts(group.callee) else [group.callee]
                for part in parts:  # each is called by itself
                    part._prepare_alone()
                    part._alone.stand(tuple(places[id(op)] for op in expand(part)))
            elif isinstance(group.callee, Sequential):
                path = paths[id(group.callee)]
                group.callee.__dict__.update(_within=(weakref.ref(self), path), _seen=-1)
                reached += [f"{above}{path}.{inner}" for inner in group.callee._paths().values()]
            elif configs and any(isinstance(m, Sequential) for m in group.callee.modules()):
                logger.warning(
                    "the fusion_config of a Sequential does not reach the Sequentials in %s, which "
                    "is called as a module; give them their own",
                    type(group.callee).__name__,
                )
        for prefix, config in configs:
            if not prefix.startswith(above):
                continue  # the outer one has looked
            inside = [path[len(prefix) :] for path in reached if path.startswith(prefix)]
            for glob in config.globs():
                if not any(glob_names(glob, path) for path in inside):
                    logger.warning(
                        "%s: the override %r names no operation of its Sequential",
                        config.source,
                        glob,
                    )

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
        """Number of extra outputs that the caller gets."""
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
        """Runs the operations and modules in order, as the plan for these tensors has fused them.

        The plan is looked up, or made if tensors of this kind, these operations and these fusions
        meet for the first time. Where a gradient is needed, each group of operations is one node of
        the autograd graph, whose backward follows the plan's backward steps.

        Args:
            input: what the first operation or module takes: their pages have shapes and dtypes.
            *extra_inputs: of all operations that read one from the caller, in operation order.
            op_kwargs: keyword arguments of the forward of basic operations, by operation or by
                index in this Sequential; negative indices count from the end.

        Returns:
            The output of the last operation or module. If operations return extra outputs to the
            caller, a tuple of it and them, in operation order.

        Raises:
            ArgumentTypeError: an input or extra input of operations is no tensor.
            ExtraInputCountError: more or fewer extra inputs than the operations read.
            OpKwargsError: a key of ``op_kwargs`` is no basic operation of this Sequential, or it
                does not take a keyword.
            ChannelError: a channel lacks a producer, has a late one, or several.
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
        kwargs, caches = self._resolve_op_kwargs(op_kwargs)
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
        kwargs, caches = self._resolve_op_kwargs(op_kwargs)
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
            raise ExtraInputCountError(count_message(expects, extra_inputs))

    def _resolve_op_kwargs(
        self, op_kwargs: Mapping[nn.Module | int, dict[str, Any]]
    ) -> tuple[list[Kwargs], list[PendingCache]]:
        """Returns the keywords of each group, and the caches among them, which are yet to store."""
        if type(op_kwargs) is not dict and not isinstance(op_kwargs, Mapping):
            raise OpKwargsError.explained(
                "op_kwargs is a mapping", received=type(op_kwargs).__name__
            )
        given: dict[BasicOperation, dict[str, Any]] = {}
        caches: list[PendingCache] = []
        for key, kwargs in op_kwargs.items():
            op = key if isinstance(key, BasicOperation) else self._op_of_key(key)
            is_mapping = type(kwargs) is dict or isinstance(kwargs, Mapping)  # type() is faster
            if not is_mapping or op in given:
                received = f"{type(kwargs).__name__} for {key!r}"
                if op in given:
                    received = f"{key!r}, an operation that another key names too"
                raise OpKwargsError.explained(
                    "op_kwargs holds one mapping per operation", received=received
                )
            check_keywords(op, kwargs)
            given[op] = own = dict(kwargs)
            if op.stores_last and own.get("cache") is not None:
                own["cache"] = pending_of(own["cache"], caches)
        out: list[Kwargs] = []
        reached: set[BasicOperation] = set()
        for group in self._groups:
            here: list[Any] = [given.get(op, {}) for op in group.ops]
            inside: Sequence[BasicOperation] = group.ops
            if isinstance(group.callee, Sequential):
                inside = _operations(group.callee)
                here = [{op: given[op] for op in inside if op in given}]
            reached.update(inside)
            out.append(here if any(here) else None)
        lost = [type(op).__name__ for op in given if op not in reached]
        if lost:
            raise OpKwargsError.explained(
                "op_kwargs contains keys that are not in this Sequential",
                received=f"an operation of type {', '.join(lost)}",
                remedy="Use an operation, or an index, of this Sequential as the key",
            )
        return out, caches

    def _op_of_key(self, key: nn.Module | int) -> BasicOperation:
        module = self[key] if isinstance(key, int) else key
        if isinstance(module, FusedOperation) and len(module.basic_ops) == 1:
            module = module.basic_ops[0]
        if not isinstance(module, BasicOperation):
            what = f"key {key!r}, which is {type(module).__name__}"
            if not isinstance(key, int):
                what = f"a key of type {type(module).__name__}"
            raise OpKwargsError.explained(
                "op_kwargs reach basic operations",
                received=what,
                remedy="Use the basic operation itself as the key",
            )
        return module

    def to_torch(self) -> nn.Module:
        """A ``torch.nn.Sequential`` with the same parameters; see :func:`opfuser.to_torch`."""
        module: nn.Module = import_module("opfuser.integrations.torch_nn").to_torch(self)
        return module

    def plan(self, input: Tensor, *extra_inputs: Tensor) -> Plan:
        """The plan that a call with these tensors would follow, as data.

        Nothing is run: the dtypes that operations return are those that they declare
        (``output_dtype``). A plain module between groups is assumed to return its input's dtype, or
        that of autocast; ``plan.assumed`` lists this for modules that are not torch's own.
        :attr:`last_plan` follows what the last call really returned.

        Args:
            input: as of a call; dtype, device and ``requires_grad`` are read, its shape is not.
            *extra_inputs: as of a call.

        Raises:
            ArgumentTypeError: an argument is no tensor, or this Sequential holds no operations.
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

    def _planned(self, x: Facts, extra_inputs: Sequence[Facts]) -> list[PlannedGroup]:
        """The plans of each group for tensors like these."""
        stored: dict[Slot, TensorFacts] = {}
        out: list[PlannedGroup] = []
        for group, path in zip(self._groups, self._routes.groups):
            extras = [
                extra_inputs[take] if isinstance(take, int) else stored[take] for take in path.takes
            ]
            out.append(group.planned(x, extras))
            x = out[-1].output
            for (key, _), extra_output in zip(path.gives, out[-1].extra_outputs):
                if key is not None:
                    stored[key] = extra_output
        return out

    def planned_groups(self, x: Facts, extra_inputs: Sequence[Facts]) -> PlannedGroup:
        if self.recipe is not None and self.recipe is not active_recipe():
            with region(self.recipe):
                return self.planned_groups(x, extra_inputs)
        self._resolve()
        done = self._planned(x, extra_inputs)
        assumed = tuple(what for group in done for what in group.assumed)
        joints = [Joint(*group, planned.plans) for group, planned in zip(self._groups, done)]
        plan = join_plans(joints, torch.is_grad_enabled(), assumed)
        return PlannedGroup(
            [] if plan is None else [plan],
            done[-1].output if done else TensorFacts(x.dtype, x.device, x.requires_grad),
            [
                facts
                for group, path in zip(done, self._routes.groups)
                for (_, public), facts in zip(path.gives, group.extra_outputs)
                if public
            ],
            assumed,
        )

    def overrides_forward(self) -> bool:
        return replaces_forward(self) or type(self).forward is not Sequential.forward

    @property
    def last_plan(self) -> Plan | None:
        """The plan that was used last, or None before the first call."""
        joints = [Joint(*group, group.last_plans()) for group in self._groups]
        plan = join_plans(joints, torch.is_grad_enabled())
        return None if plan is None else self._named(plan)

    def _named(self, plan: Plan) -> Plan:
        paths = self._paths()
        forward, backward = (
            tuple(s if s.indices else replace(s, path=paths.get(id(s.op), "")) for s in steps)
            for steps in (plan.forward, plan.backward)
        )
        names = tuple(paths.get(id(op), "") for op in plan.basic_ops)
        return replace(plan, forward=forward, backward=backward, names=names)

    def _paths(self) -> dict[int, str]:
        """The path of each module and operation, by id."""
        paths = {id(module): path for path, module in self.named_modules()}
        for path, module in list(self.named_modules()):
            if isinstance(module, FusedOperation):
                paths.update({id(op): path for op in module.basic_ops if id(op) not in paths})
        return paths


def _module_at(module: nn.Module | None, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = None if module is None else module._modules.get(name)
    return module


def _place(path: str, configs: Sequence[tuple[str, FusionConfig]]) -> Place:
    around = [(config, path[len(p) :]) for p, config in configs if path.startswith(p)]
    return Place(path, tuple(around))


def _operations(seq: Sequential) -> list[BasicOperation]:
    return [op for m in seq.modules() if isinstance(m, FusibleOperation) for op in expand(m)]


def is_called(seq: Sequential) -> bool:
    """Whether a nested Sequential is called instead of run as a part of the outer one."""
    if is_compiled(seq) or seq.recipe is not None:
        return True
    return has_hooks(seq) or seq.overrides_forward()


def flatten(seq: Sequential, path: tuple[int, ...] = ()) -> Iterator[tuple[nn.Module, Hashable]]:
    """The modules of a Sequential and of nested ones, each with the path to its Sequential."""
    for position, module in enumerate(seq):
        if type(module) is Sequential and not is_called(module):
            yield from flatten(module, (*path, position))
        else:
            yield module, path


def Residual(*ops: nn.Module) -> Sequential:  # noqa: N802 - reads as the module that it makes
    """``y = x + ops(x)`` as operations: MakeExtraOutput, ``ops``, AddExtraInput.

    The skip connection is a channel that only this residual sees, so that copies of it, nested and
    neighbouring residuals do not interfere.

    Args:
        *ops: operations and modules of the branch.
    """
    channel = PrivateChannel("residual")
    make, add = MakeExtraOutput(), AddExtraInput()
    make.set_extra_output_channel(0, channel, output_to_caller=False)
    add.set_extra_input_channel(0, channel)
    return Sequential(make, *ops, add)
