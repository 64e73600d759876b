"""The groups of a Sequential: operations that are fused together, and modules that are called."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from ..core.change_tracking import has_hooks, replaces_forward
from ..core.context import TensorFacts
from ..core.op_base import BasicOperation, FusedOperation, FusibleOperation
from ..core.op_base.kinds import has_called_parts, must_be_called
from ..engine.autograd import Kwargs
from ..engine.plan import Plan, Planned, expand
from ..engine.routing import (
    CLOSED,
    Channels,
    ExtraOutput,
    PrivateChannel,
    RoutedGroup,
    Routes,
    route,
)
from ..errors import counted
from ..events.kinds import Change, PlanInvalidated
from ..events.telling import emit
from ..fuser import OperationFuser
from ..op import fuser_alone
from ..runtime import is_own
from .module_sequence import Facts, ModuleSequence
from .plain_modules import assumed_output, is_known


class Group(NamedTuple):
    """Consecutive operations that are fused together, or one module that is called."""

    callee: OperationFuser | nn.Module
    ops: tuple[BasicOperation, ...]
    split: str
    """Why it is not fused with its neighbors: "", "HOOK", "FORWARD" or "GROUP_SPLIT"."""

    def __call__(self, x: Any, extras: Sequence[Tensor], kwargs: Kwargs) -> Any:
        return call(self.callee, x, extras, kwargs)

    def stays_called(self) -> bool:
        """Whether the hook or the forward because of which the module is called is still there."""
        callee = cast(nn.Module, self.callee)
        return has_hooks(callee) if self.split == "HOOK" else _split(callee) == "FORWARD"

    def fusers(self) -> list[OperationFuser]:
        """The fusers that calls have gone through; none of a module that is not an operation."""
        callee = self.callee
        if isinstance(callee, OperationFuser):
            return [callee]
        units = cast(FusedOperation, callee).basic_ops if has_called_parts(callee) else [callee]
        alone = [op._alone for op in units if isinstance(op, FusibleOperation)]
        return [fuser for fuser in alone if fuser is not None]

    def last_plans(self) -> list[Plan]:
        """The plans that were used last, in order; none for a plain module."""
        inner = [self.callee] if isinstance(self.callee, ModuleSequence) else self.fusers()
        return [done.last_plan for done in inner if done.last_plan is not None]

    def planned(self, x: Facts, extras: Sequence[Facts]) -> Planned:
        """The plans of a call with tensors like these, and what it returns; nothing is computed."""
        callee = self.callee
        if isinstance(callee, OperationFuser):
            return callee.planned(x, extras)
        if self.split != "FORWARD" or _is_wrapped(callee):
            note: tuple[str, ...] = ()
            if self.split == "FORWARD":
                note = (f"{type(callee).__name__} is called once by the forward in its place",)
            if isinstance(callee, FusibleOperation):
                return _planned_alone(callee, x, extras)._replace(assumed=note)
            if isinstance(callee, ModuleSequence):
                inside = callee.planned_groups(x, extras)
                return inside._replace(assumed=(*note, *inside.assumed))
        output = assumed_output(callee, x)
        note = () if is_known(callee) else (f"{type(callee).__name__} returns {output.dtype}",)
        given = [output] * sum(op.num_extra_outputs for op in self.ops)
        return Planned([], output, given, note)


def call(
    callee: OperationFuser | nn.Module, x: Any, extras: Sequence[Tensor], kwargs: Kwargs
) -> Any:
    """What the module or the fuser of a group returns, given the keywords of its operations."""
    if kwargs is None:
        return callee(x, *extras)
    if isinstance(callee, BasicOperation):
        return callee(x, *extras, **kwargs[0])
    if isinstance(callee, ModuleSequence):
        return callee(x, *extras, op_kwargs=kwargs[0])
    return callee(x, *extras, basic_op_kwargs=kwargs)


def _is_wrapped(module: nn.Module) -> bool:
    """Whether a forward set on the instance is all that makes a group call ``module``.

    Libraries that set one call the module's own within it.
    """
    cls = type(module)
    own = is_own(cls.forward.__module__)
    return own and cls.__call__ is nn.Module.__call__ and replaces_forward(module)


def _planned_alone(op: FusibleOperation, x: Facts, extras: Sequence[Facts]) -> Planned:
    """The plans of an operation called as a module, or of a compound's operations one by one."""
    plans: list[Plan] = []
    extra_outputs: list[TensorFacts] = []
    left = list(extras)
    for part in expand(op) if has_called_parts(op) else [op]:
        fuser = fuser_alone(part)
        own, left = left[: fuser.num_extra_inputs], left[fuser.num_extra_inputs :]
        done = fuser.planned(x, own)
        x = done.output
        plans += done.plans
        extra_outputs += done.extra_outputs
    return Planned(plans, cast(TensorFacts, x), extra_outputs)


def stretches(
    modules: Iterable[tuple[nn.Module, Hashable]],
) -> list[tuple[str, list[tuple[nn.Module, Hashable]]]]:
    """The modules of each group: consecutive operations, or one module that must be called.

    Args:
        modules: each with what identifies the Sequential that directly holds it.

    Returns:
        For each group, why it is a single module (or an empty string), and its modules.
    """
    out: list[tuple[str, list[tuple[nn.Module, Hashable]]]] = []
    for module, scope in _open_compounds(modules):
        split = _split(module)
        if split or not out or out[-1][0]:
            out.append((split, []))
        out[-1][1].append((module, scope))
    return out


def _split(module: nn.Module) -> str:
    """Why a module is called; empty for an operation that is fused with its neighbors."""
    if isinstance(module, FusibleOperation):
        return must_be_called(module)
    if isinstance(module, ModuleSequence):
        if module.overrides_forward():
            return "FORWARD"
        if has_hooks(module):
            return "HOOK"
    return "GROUP_SPLIT"


def _open_compounds(
    modules: Iterable[tuple[nn.Module, Hashable]],
) -> Iterator[tuple[nn.Module, Hashable]]:
    """Replaces compounds by their operations where one of these has to be called as a module."""
    for module, scope in modules:
        if has_called_parts(module) and not must_be_called(module):
            yield from ((part, scope) for part in cast(FusedOperation, module).basic_ops)
        else:
            yield module, scope


def own_channels(found: Iterable[tuple[str, list[tuple[nn.Module, Hashable]]]]) -> Channels:
    """Channels that modules read without producing them, and those that they produce.

    Args:
        found: the modules, as of :func:`stretches`.
    """
    read: set[str] = set()
    given: set[str] = set()
    for split, modules in found:
        inside = _channels_of(split, modules)
        read |= inside.read
        given |= inside.given
    return Channels(frozenset(read - given), frozenset(given))


def _channels_of(split: str, modules: list[tuple[nn.Module, Hashable]]) -> Channels:
    """The names that a group reads and produces."""
    first = modules[0][0]
    if isinstance(first, ModuleSequence):
        return CLOSED if split == "FORWARD" else first.own_channels()
    ops = [op for unit, _ in modules if isinstance(unit, FusibleOperation) for op in expand(unit)]
    return Channels(
        _public(channel for op in ops for channel in op._extra_input_channels),
        _public(channel for op in ops for channel in op._extra_output_channels),
    )


def _public(channels: Iterable[str | None]) -> frozenset[str]:
    return frozenset(c for c in channels if c is not None and not isinstance(c, PrivateChannel))


def _crossing(
    found: Sequence[tuple[str, list[tuple[nn.Module, Hashable]]]], around: Channels
) -> list[Channels]:
    """The channels that cross the border of each group, if it is a nested Sequential.

    What is read where nothing produces it comes from outside. What a nested Sequential produces
    goes outside if it is read there and produced by no operation there: equal names in several of
    them are no conflict, as long as each is read inside alone.

    Args:
        found: the modules, as of :func:`stretches`.
        around: channels that cross the border of the Sequential that holds them.
    """
    each = [_channels_of(split, modules) for split, modules in found]
    nested = [isinstance(modules[0][0], ModuleSequence) for _, modules in found]
    wanted = around.given.union(*(own.read for own in each))
    made = frozenset().union(*(own.given for own, inner in zip(each, nested) if not inner))
    return [Channels(own.read, own.given & (wanted - made)) for own in each]


def make_groups(
    found: Iterable[tuple[str, list[tuple[nn.Module, Hashable]]]],
    outer: ModuleSequence,
    around: Channels,
) -> tuple[list[Group], Routes, list[tuple[ModuleSequence, Channels]]]:
    """The groups, with a fuser for each of operations, and the routes of extra tensors.

    And the nested Sequentials among them that are connected, with what crosses their borders.

    Args:
        found: the modules, as of :func:`stretches`.
        outer: the Sequential that holds them.
        around: channels that cross its border, if another one calls it.

    Raises:
        ChannelError: a channel has no producer, no earlier producer, or several.
    """
    found = list(found)
    nested: list[tuple[ModuleSequence, Channels]] = []
    routed_groups = []
    for (split, modules), crossing in zip(found, _crossing(found, around)):
        module = modules[0][0]
        inside: Routes | None = None
        if isinstance(module, ModuleSequence) and split != "FORWARD":
            module.connect(crossing, outer)
            inside = module.resolved_routes()
            nested.append((module, crossing))
        routed_groups.append(_as_routed(split, modules, inside))
    routes = route(routed_groups, around)
    groups = []
    for (split, modules), routed, path in zip(found, routed_groups, routes.groups):
        for op in routed.ops:
            op.__dict__["_routing_captured"] = True
        target: OperationFuser | nn.Module = modules[0][0]
        if not split:
            units = [cast(FusibleOperation, module) for module, _ in modules]
            target = OperationFuser(units, routing=path.routing)
        groups.append(Group(target, routed.ops, split))
    return groups, routes, nested


def tell_regrouped(
    before: Sequence[Group], after: Iterable[tuple[str, list[tuple[nn.Module, Hashable]]]]
) -> None:
    """Tells subscribers that the plans of groups are void, since there are other ones now."""
    old = [(group.split, group.ops or (group.callee,)) for group in before]
    new = [(split, [module for module, _ in modules]) for split, modules in after]
    change = Change("groups of modules", _shown(old), _shown(new))
    for group in before:
        plan = group.callee.last_plan if isinstance(group.callee, OperationFuser) else None
        if plan is not None:
            kinds = tuple(type(op).__name__ for op in group.ops)
            emit(PlanInvalidated(plan.numbers[0], kinds, (change,)))


def _shown(groups: Iterable[tuple[str, Sequence[Any]]]) -> str:
    """Groups as text, such as ``"3 operations | Tanh (GROUP_SPLIT) | 1 operation"``."""
    texts = []
    for split, members in groups:
        count = sum(len(expand(m)) if isinstance(m, FusibleOperation) else 1 for m in members)
        alone = f"{type(members[0]).__name__} ({split})"
        texts.append(alone if split else counted(count, "operation"))
    if len(texts) > 8:
        texts[7:] = [f"{len(texts) - 7} more"]
    return " | ".join(texts) or "none"


def _as_routed(
    split: str, modules: list[tuple[nn.Module, Hashable]], inside: Routes | None
) -> RoutedGroup:
    """A group as routing sees it; ``inside`` are the routes of a connected Sequential."""
    module = modules[0][0]
    if isinstance(module, FusibleOperation):
        pairs = [
            (op, scope) for unit, scope in modules for op in expand(cast(FusibleOperation, unit))
        ]
        return RoutedGroup(
            tuple(op for op, _ in pairs), tuple(scope for _, scope in pairs), fused=not split
        )
    name = type(module).__name__
    if not isinstance(module, ModuleSequence):
        return RoutedGroup((), (), fused=False, name=name)
    name = f"a nested {name}" + (" that carries hooks" if split == "HOOK" else "")
    if inside is not None:
        return RoutedGroup((), (), inside.inputs, inside.outputs, False, name, connected=True)
    # A forward of its own may pass on nothing but what is told of it.
    passed = (None,) * module.num_extra_inputs
    got = (ExtraOutput(None, True),) * module.num_extra_outputs
    return RoutedGroup((), (), passed, got, False, name)
