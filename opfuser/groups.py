"""The groups of a Sequential: operations that are fused together, and what is called as it is."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from .change_tracking import Tracked, has_hooks
from .context import TensorFacts
from .engine.autograd import Kwargs
from .engine.plain_modules import assumed_output, is_known
from .engine.plan import FusionRecord, Plan, Step, expand
from .engine.routing import RoutedGroup, Routes, route
from .fuser import OperationFuser
from .fusion import Env, Fusion, Refusal
from .op import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    GradNeeds,
    has_called_parts,
    must_be_called,
)
from .registry import registry

Facts = Tensor | TensorFacts


class PlannedGroup(NamedTuple):
    """What a group will do with tensors of some kind.

    Attributes:
        plans: in order; none for a plain module.
        output, extra_outputs: what comes out.
        assumed: what was taken for granted of modules that declare nothing.
    """

    plans: list[Plan]
    output: TensorFacts
    extra_outputs: list[TensorFacts]
    assumed: tuple[str, ...] = ()


class NestedSequential(Tracked):
    """Abstract. A Sequential, as far as one that holds it as a module looks into it."""

    @property
    def num_extra_inputs(self) -> int:
        """Number of extra inputs that the caller brings."""
        raise NotImplementedError

    @property
    def num_extra_outputs(self) -> int:
        """Number of extra outputs that the caller gets."""
        raise NotImplementedError

    @property
    def last_plan(self) -> Plan | None:
        """The plan that was used last, or None before the first call."""
        raise NotImplementedError

    def overrides_forward(self) -> bool:
        """Whether calling it may be something else than active_calls what it holds."""
        raise NotImplementedError

    def planned_groups(self, x: Facts, extra_inputs: Sequence[Facts]) -> PlannedGroup:
        """As :meth:`Group.planned`, for what it holds."""
        raise NotImplementedError


class Group(NamedTuple):
    """Consecutive operations that are fused together, or one module that is called as it is."""

    callee: OperationFuser | nn.Module
    ops: tuple[BasicOperation, ...]
    split: str
    """Why it is not fused with its neighbours: "", "HOOK", "FORWARD" or "GROUP_SPLIT"."""

    def __call__(self, x: Any, extras: Sequence[Tensor], kwargs: Kwargs) -> Any:
        callee = self.callee
        if kwargs is None:
            return callee(x, *extras)
        if isinstance(callee, BasicOperation):
            return callee(x, *extras, **kwargs[0])
        if not self.ops:  # a nested Sequential
            return cast(nn.Module, callee)(x, *extras, op_kwargs=kwargs[0])
        return callee(x, *extras, basic_op_kwargs=kwargs)

    def last_plans(self) -> list[Plan]:
        """The plans that were used last, in order; none for a plain module."""
        callee = self.callee
        if isinstance(callee, FusibleOperation):
            units = expand(callee) if has_called_parts(callee) else [callee]
            last = [None if op._alone is None else op._alone.last_plan for op in units]
        else:
            last = [
                callee.last_plan if isinstance(callee, (OperationFuser, NestedSequential)) else None
            ]
        return [plan for plan in last if plan is not None]

    def planned(self, x: Facts, extras: Sequence[Facts]) -> PlannedGroup:
        """The plans of a call with tensors like these, and what comes out; nothing is computed."""
        callee = self.callee
        if isinstance(callee, OperationFuser):
            done = callee.planned(x, extras)
            return PlannedGroup([done.plan], done.output, done.extra_outputs)
        if isinstance(callee, FusibleOperation) and self.split == "HOOK":
            return _planned_alone(callee, x, extras)
        if isinstance(callee, NestedSequential) and self.split != "FORWARD":
            return callee.planned_groups(x, extras)
        output = assumed_output(callee, x)
        note = () if is_known(callee) else (f"{type(callee).__name__} returns {output.dtype}",)
        given = [output] * sum(op.num_extra_outputs for op in self.ops)
        return PlannedGroup([], output, given, note)


def _planned_alone(op: FusibleOperation, x: Facts, extras: Sequence[Facts]) -> PlannedGroup:
    """Of an operation that is called as a module, or of its parts if one of these is."""
    plans: list[Plan] = []
    extra_outputs: list[TensorFacts] = []
    left = list(extras)
    for part in expand(op) if has_called_parts(op) else [op]:
        if part._alone is None:
            part._prepare_alone()
        fuser = cast(OperationFuser, part._alone)
        own, left = left[: fuser.num_extra_inputs], left[fuser.num_extra_inputs :]
        plan, x, given = fuser.planned(x, own)
        plans.append(plan)
        extra_outputs += given
    return PlannedGroup(plans, cast(TensorFacts, x), extra_outputs)


def stretches(
    modules: Iterable[tuple[nn.Module, Hashable]],
) -> list[tuple[str, list[tuple[nn.Module, Hashable]]]]:
    """Runs of operations, and between them what must be called as a module.

    Args:
        modules: each with what tells the Sequential that directly holds it from others.

    Returns:
        For each stretch, why it stands alone (or an empty string) and its modules.
    """
    out: list[tuple[str, list[tuple[nn.Module, Hashable]]]] = []
    for module, scope in _open_compounds(modules):
        split = _split(module)
        if split or not out or out[-1][0]:
            out.append((split, []))
        out[-1][1].append((module, scope))
    return out


def _split(module: nn.Module) -> str:
    """Why a module is called as it is; empty for an operation that may be part of a run."""
    if isinstance(module, FusibleOperation):
        return must_be_called(module)
    if isinstance(module, NestedSequential):
        if module.overrides_forward():
            return "FORWARD"
        if has_hooks(module):
            return "HOOK"
    return "GROUP_SPLIT"


def _open_compounds(
    modules: Iterable[tuple[nn.Module, Hashable]],
) -> Iterator[tuple[nn.Module, Hashable]]:
    """Replaces compounds by their parts where one of these has to be called as a module."""
    for module, scope in modules:
        if has_called_parts(module) and not must_be_called(module):
            yield from ((part, scope) for part in cast(FusedOperation, module).basic_ops)
        else:
            yield module, scope


def make_groups(
    found: Iterable[tuple[str, list[tuple[nn.Module, Hashable]]]],
) -> tuple[list[Group], Routes]:
    """Routes extra tensors between stretches, and makes a fuser for each group of operations.

    Raises:
        ChannelError: a channel has no producer, no earlier producer, or several.
    """
    found = list(found)
    routed_groups = [_as_routed(split, modules) for split, modules in found]
    routes = route(routed_groups)
    groups = []
    for (split, modules), routed, path in zip(found, routed_groups, routes.groups):
        for op in routed.ops:
            op.__dict__["_routing_captured"] = True
        target: OperationFuser | nn.Module = modules[0][0]
        if not split:
            units = [cast(FusibleOperation, module) for module, _ in modules]
            target = OperationFuser(units, routing=path.routing)
        groups.append(Group(target, routed.ops, split))
    return groups, routes


def _as_routed(split: str, modules: list[tuple[nn.Module, Hashable]]) -> RoutedGroup:
    module = modules[0][0]
    if isinstance(module, FusibleOperation):
        pairs = [
            (op, scope) for unit, scope in modules for op in expand(cast(FusibleOperation, unit))
        ]
        return RoutedGroup(
            tuple(op for op, _ in pairs), tuple(scope for _, scope in pairs), fused=not split
        )
    name = type(module).__name__
    if isinstance(module, NestedSequential):  # takes and gives extra tensors of its own
        name = f"a nested {name}" + (" that carries hooks" if split == "HOOK" else "")
        counts = module.num_extra_inputs, module.num_extra_outputs
    else:
        counts = (0, 0)
    return RoutedGroup((), (), *counts, False, name)


def join_plans(
    groups: Sequence[tuple[Group, Sequence[Plan]]],
    grad_enabled: bool,
    assumed: tuple[str, ...] = (),
) -> Plan | None:
    """One plan over all groups, with the fusions that their boundaries prevented.

    None if no group has a plan.

    Args:
        groups: each with its plans, of which a module that is called as it is may have none.
        grad_enabled: whether such a module takes part in backward.
        assumed: what the plans take for granted.
    """
    forward: list[Step] = []
    backward: list[Step] = []
    needs: list[GradNeeds | None] = []
    ops: list[BasicOperation] = []
    scanned: list[tuple[int, BasicOperation]] = []
    cuts: dict[int, Refusal] = {}
    records: dict[tuple[str, str], FusionRecord] = {}
    env: Env | None = None
    before: Group | None = None
    for group, plans in groups:
        cut = group if group.split or before is None else before
        if before is not None and cut.split:
            cuts[len(scanned)] = Refusal(
                cut.split, f"{type(cut.callee).__name__} {_WHY[cut.split]}"
            )
        before = group
        if not plans:
            step = Step(cast(nn.Module, group.callee), ())
            forward.append(step)
            backward += [step] if grad_enabled else []
            scanned += [(len(ops), op) for op in group.ops]
        for plan in plans:
            first = len(ops)
            forward += [_shift(step, first) for step in plan.forward]
            backward += [_shift(step, first) for step in plan.backward]
            needs += plan.needs
            for record in plan.history:
                _merge(records, record, first)
            scanned += enumerate(plan.basic_ops, first)
            ops += plan.basic_ops
            env = env or plan.env
    if env is None:
        return None
    _note_boundaries(records, scanned, cuts, env)
    return Plan(
        tuple(ops),
        tuple(forward),
        tuple(backward),
        tuple(needs),
        tuple(records.values()),
        env,
        assumed=assumed,
    )


_WHY = {
    "HOOK": "carries hooks",
    "FORWARD": "has a forward of its own",
    "GROUP_SPLIT": "stands between",
}


def _shift(step: Step, first: int) -> Step:
    return replace(step, indices=tuple(i + first for i in step.indices))


def _merge(records: dict[tuple[str, str], FusionRecord], new: FusionRecord, first: int) -> None:
    near = new.near_miss._replace(start=new.near_miss.start + first) if new.near_miss else None
    new = replace(
        new,
        matches=tuple(tuple(i + first for i in match) for match in new.matches),
        refusals=tuple((at + first, why) for at, why in new.refusals),
        near_miss=near,
    )
    key = (new.stage, new.name)
    old = records.get(key)
    if old is not None:
        near = max(
            filter(None, (old.near_miss, new.near_miss)), key=lambda m: m.matched, default=None
        )
        ranks = ("disabled", "skipped", "unmatched", "refused", "matched")
        new = replace(
            new,
            status=max(old.status, new.status, key=ranks.index),
            matches=old.matches + new.matches,
            refusals=old.refusals + new.refusals,
            near_miss=near,
            elapsed=old.elapsed + new.elapsed,
        )
    records[key] = new


def _note_boundaries(
    records: dict[tuple[str, str], FusionRecord],
    scanned: Sequence[tuple[int, BasicOperation]],
    cuts: dict[int, Refusal],
    env: Env,
) -> None:
    """Adds a refusal wherever a pattern would fit if its operations made up one run.

    Args:
        records: by stage and name.
        scanned: the operations, also of modules without a plan, with their place in the plan.
        cuts: why a run ends, by the first of ``scanned`` that is not in it.
        env: of the plan.
    """
    ops = [op for _, op in scanned]
    for handle in registry:
        rule = handle.function
        key = (handle.stage, handle.name)
        if not isinstance(rule, Fusion) or key not in records or handle.disabled_by():
            continue
        found: list[tuple[int, Refusal]] = []

        def note(start: int, stop: int, found: list[tuple[int, Refusal]] = found) -> Refusal:
            why = next((cuts[c] for c in range(start + 1, stop) if c in cuts), None)
            if why is not None:
                found.append((scanned[start][0], why))
            return Refusal("GROUP_SPLIT", "not built here")

        rule.scan(ops, env, note)
        if found:
            old = records[key]
            status = "refused" if old.status == "unmatched" else old.status
            records[key] = replace(old, status=status, refusals=old.refusals + tuple(found))
