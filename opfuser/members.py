"""The members of a Sequential: runs of operations, and what must be called as a module."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from .errors import ArgumentTypeError, explain
from .execute import Kwargs
from .fuser import OperationFuser
from .fusion import Env, Fusion, Refusal
from .op import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    GradNeeds,
)
from .plan import FusionRecord, Plan, Step, expand
from .registry import registry
from .tracked import Tracked, has_hooks
from .wiring import Routes, WiredMember, route


class Member(NamedTuple):
    """One stretch of a Sequential: a run of operations, or one module that is called as it is."""

    run: OperationFuser | nn.Module
    ops: tuple[BasicOperation, ...]
    split: str
    """Why it is not fused with its neighbours: "", "HOOK" or "GROUP_SPLIT"."""

    def __call__(self, x: Any, extras: Sequence[Tensor], kwargs: Kwargs) -> Any:
        run = self.run
        if kwargs is None:
            return run(x, *extras)
        if isinstance(run, BasicOperation):
            return run(x, *extras, **kwargs[0])
        if not self.ops:  # a nested Sequential
            return cast(nn.Module, run)(x, *extras, op_kwargs=kwargs[0])
        return run(x, *extras, basic_op_kwargs=kwargs)

    def last_plans(self) -> list[Plan]:
        """The plans that were used last, in order; none for a plain module."""
        run = self.run
        if isinstance(run, FusibleOperation):
            alone = [run._alone]
            if alone == [None]:  # a compound whose parts were called one by one
                alone = [part._alone for part in expand(run)]
        else:
            alone = [run if isinstance(run, _PLANNED) else None]
        plans = [None if fuser is None else cast("Plan | None", fuser.last_plan) for fuser in alone]
        return [plan for plan in plans if plan is not None]


# Tracked stands for a nested Sequential, which is defined further up.
_PLANNED = (OperationFuser, Tracked)


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
        split = "" if isinstance(module, FusibleOperation) else "GROUP_SPLIT"
        if isinstance(module, Tracked) and has_hooks(module):
            split = "HOOK"
        if split or not out or out[-1][0]:
            out.append((split, []))
        out[-1][1].append((module, scope))
    return out


def _open_compounds(
    modules: Iterable[tuple[nn.Module, Hashable]],
) -> Iterator[tuple[nn.Module, Hashable]]:
    """Replaces compounds by their parts where one of these carries a hook of its own."""
    for module, scope in modules:
        if (
            isinstance(module, FusedOperation)
            and module.is_compound()
            and not has_hooks(module)
            and any(map(has_hooks, module.basic_ops))
        ):
            yield from ((part, scope) for part in module.basic_ops)
        else:
            yield module, scope


def make_members(
    found: Iterable[tuple[str, list[tuple[nn.Module, Hashable]]]],
) -> tuple[list[Member], Routes]:
    """Routes extra tensors between stretches, and makes a fuser for each run of operations.

    Raises:
        ChannelError: a channel has no producer, no earlier producer, or several.
    """
    found = list(found)
    wired = [_wire(split, run) for split, run in found]
    routes = route(wired)
    members = []
    for (split, run), wire, path in zip(found, wired, routes.members):
        for op in wire.ops:
            op.__dict__["_routing_captured"] = True
        target: OperationFuser | nn.Module = run[0][0]
        if not split:
            units = [cast(FusibleOperation, module) for module, _ in run]
            target = OperationFuser(units, wiring=path.wiring)
        members.append(Member(target, wire.ops, split))
    return members, routes


def _wire(split: str, run: list[tuple[nn.Module, Hashable]]) -> WiredMember:
    module = run[0][0]
    if isinstance(module, FusibleOperation):
        pairs = [(op, scope) for unit, scope in run for op in expand(cast(FusibleOperation, unit))]
        return WiredMember(
            tuple(op for op, _ in pairs), tuple(scope for _, scope in pairs), fused=not split
        )
    name = type(module).__name__
    if isinstance(module, Tracked):  # a nested Sequential takes and gives extra tensors of its own
        name = f"a nested {name}" + (" that carries hooks" if split == "HOOK" else "")
        counts = cast("tuple[int, int]", (module.num_extra_inputs, module.num_extra_outputs))
    else:
        counts = (0, 0)
    return WiredMember((), (), *counts, False, name)


def join_plans(members: Sequence[Member], grad_enabled: bool) -> Plan:
    """One plan over all members, with the fusions that their boundaries prevented."""
    forward: list[Step] = []
    backward: list[Step] = []
    needs: list[GradNeeds | None] = []
    ops: list[BasicOperation] = []
    cuts: dict[int, Refusal] = {}
    records: dict[tuple[str, str], FusionRecord] = {}
    env: Env | None = None
    for before, member in zip([None, *members], members):
        plans = member.last_plans()
        cut = member if member.split or before is None else before
        if before is not None and cut.split and plans:
            what = "carries hooks" if cut.split == "HOOK" else "stands between"
            cuts[len(ops)] = Refusal(cut.split, f"{type(cut.run).__name__} {what}")
        if not plans:
            step = Step(cast(nn.Module, member.run), ())
            forward.append(step)
            backward += [step] if grad_enabled else []
        for plan in plans:
            first = len(ops)
            forward += [_shift(step, first) for step in plan.forward]
            backward += [_shift(step, first) for step in plan.backward]
            needs += plan.needs
            for record in plan.history:
                _merge(records, record, first)
            ops += plan.basic_ops
            env = env or plan.env
    if env is None:
        raise ArgumentTypeError(explain("This Sequential holds no operations, so it has no plan"))
    _note_boundaries(records, ops, cuts, env)
    history = tuple(records.values())
    return Plan(tuple(ops), tuple(forward), tuple(backward), tuple(needs), history, env)


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
    ops: list[BasicOperation],
    cuts: dict[int, Refusal],
    env: Env,
) -> None:
    """Adds a refusal wherever a pattern would fit if it were not for a hook or a plain module."""
    for handle in registry:
        rule = handle.function
        key = (handle.stage, handle.name)
        if not isinstance(rule, Fusion) or key not in records or handle.disabled_by():
            continue
        found: list[tuple[int, Refusal]] = []

        def note(start: int, stop: int, found: list[tuple[int, Refusal]] = found) -> Refusal:
            why = next((cuts[c] for c in range(start + 1, stop) if c in cuts), None)
            if why is not None:
                found.append((start, why))
            return Refusal("GROUP_SPLIT", "not built here")

        rule.scan(ops, env, note)
        if found:
            old = records[key]
            status = "refused" if old.status == "unmatched" else old.status
            records[key] = replace(old, status=status, refusals=old.refusals + tuple(found))
