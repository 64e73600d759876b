"""The plan of a Sequential: the plans of its groups as one, and what their borders prevent."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..core.change_tracking import is_compiled
from ..core.context import TensorFacts
from ..core.fusion import Env, Fusion, Refusal
from ..core.op_base import BasicOperation, FusibleOperation
from ..engine.plan import FusionRecord, Plan, Planned, Step
from ..engine.routing import Routes, Slot
from ..registry import FusionHandle, registry
from .groups import Group
from .module_sequence import Facts
from .plain_modules import replacement

_WHY = {
    "HOOK": "carries hooks",
    "FORWARD": "has a forward of its own",
    "GROUP_SPLIT": "stands between",
}
_GATHERED = "is a unit of fully_shard, whose parameters are gathered when it is called"


class _Scanned(NamedTuple):
    """An operation as if there were no borders.

    Attributes:
        place: its index in the plan, or, of what is not in it, that of the operation behind it.
        op: the operation; in place of a plain module one that could replace it.
        cut: why a group ends before it, if one does.
        stands_in: why it is not fused, if it is in place of a plain module.
    """

    place: int
    op: BasicOperation
    cut: Refusal | None = None
    stands_in: Refusal | None = None


def _border(group: Group) -> Refusal:
    """Why nothing is fused across the border of a module that is called."""
    code, why, callee = group.split, _WHY[group.split], group.callee
    if code == "FORWARD" and isinstance(callee, FusibleOperation):
        why = callee.own_forward() or why
    # What is not imported is not there.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(callee, fsdp.FSDPModule):
        code, why = "COMMUNICATION", _GATHERED
    elif isinstance(callee, nn.Module) and is_compiled(callee):
        code, why = "FORWARD", "is compiled by its own compile()"
    return Refusal(code, f"{type(callee).__name__} {why}")


def join_plans(
    groups: Sequence[Group],
    plans: Sequence[Sequence[Plan]],
    grad_enabled: bool,
    assumed: tuple[str, ...] = (),
) -> Plan | None:
    """One plan over all groups, with the fusions that their borders prevented.

    None if no group has a plan.

    Args:
        groups: in order.
        plans: of each; a module that is called may have none.
        grad_enabled: whether a module without a plan takes part in backward.
        assumed: assumptions of the plans.
    """
    passes: tuple[list[Step], list[Step]] = [], []
    joined: list[Plan] = []
    first = 0
    scanned: list[_Scanned] = []
    records: dict[tuple[str, str], FusionRecord] = {}
    cut: Refusal | None = None
    before: Group | None = None
    for group, own in zip(groups, plans):
        if before is not None and (group.split or before.split):
            cut = _border(group if group.split else before)
        before = group
        here: list[_Scanned] = []
        if not own:
            step = Step(cast(nn.Module, group.callee), ())
            for steps in passes[: 1 + grad_enabled]:
                steps.append(step)
            here += [_Scanned(first, op) for op in group.ops]
            instead = replacement(step.op)
            if instead is not None:
                kind = type(step.op).__name__
                why = f"torch.nn.{kind} stands where {instead.text} would fit"
                no = Refusal("GROUP_SPLIT", why)
                here += [_Scanned(first, op, stands_in=no) for op in instead.operations]
        for plan in own:
            joined.append(_behind(first, plan))
            passes[0].extend(joined[-1].forward)
            passes[1].extend(joined[-1].backward)
            for record in plan.history:
                _merge(records, record, first)
            here += [_Scanned(n, op) for n, op in enumerate(plan.basic_ops, first)]
            first += len(plan.basic_ops)
        if here:
            scanned += [here[0]._replace(cut=cut), *here[1:]]
            cut = None
    if not joined:
        return None
    _note_borders(records, scanned, joined[0].env)
    fields: dict[str, Any] = {
        name: tuple(chain.from_iterable(getattr(plan, name) for plan in joined)) for name in _JOINED
    }
    fields |= {"forward": tuple(passes[0]), "backward": tuple(passes[1])}
    return Plan(**fields, history=tuple(records.values()), env=joined[0].env, assumed=assumed)


# Fields of a plan over several groups that are those of their plans, one behind another.
_JOINED = (
    "basic_ops needs quantized high_precision edges notes gemms replays recordings numbers groups"
).split()


def _behind(first: int, plan: Plan) -> Plan:
    """The plan with operations counted from ``first`` on, but for its history."""

    def shifted(indices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i + first for i in indices)

    return replace(
        plan,
        forward=tuple(replace(s, indices=shifted(s.indices)) for s in plan.forward),
        backward=tuple(replace(s, indices=shifted(s.indices)) for s in plan.backward),
        quantized=shifted(plan.quantized),
        high_precision=tuple((first + n, why) for n, why in plan.high_precision),
        edges=tuple(edge.behind(first) for edge in plan.edges),
        notes=tuple((first + n, note) for n, note in plan.notes),
        gemms=tuple(choice._replace(op=first + choice.op) for choice in plan.gemms),
        replays=tuple(r._replace(indices=shifted(r.indices)) for r in plan.replays),
        recordings=tuple(r._replace(indices=shifted(r.indices)) for r in plan.recordings),
        groups=plan.groups or (plan,),
    )


def _merge(records: dict[tuple[str, str], FusionRecord], new: FusionRecord, first: int) -> None:
    key = (new.stage, new.name)
    old = records.get(key) or replace(new, matches=(), refusals=(), near_misses=(), elapsed=0.0)
    ranks = ("disabled", "skipped", "unmatched", "refused", "matched")
    matches = (tuple(i + first for i in match) for match in new.matches)
    refusals = ((at + first, why) for at, why in new.refusals)
    near_misses = (near._replace(start=near.start + first) for near in new.near_misses)
    records[key] = replace(
        new,
        status=max(old.status, new.status, key=ranks.index),
        matches=(*old.matches, *matches),
        refusals=(*old.refusals, *refusals),
        near_misses=(*old.near_misses, *near_misses),
        elapsed=old.elapsed + new.elapsed,
    )


def _note_borders(
    records: dict[tuple[str, str], FusionRecord], scanned: Sequence[_Scanned], env: Env
) -> None:
    """Adds a refusal wherever a pattern would fit if its operations were in one group.

    Or if a plain module among them were an operation.

    Args:
        records: by stage and name.
        scanned: the operations, also of modules without a plan.
        env: of the plan.
    """
    if all(item.cut is None for item in scanned):
        return
    # Where modules are left out, a cut is before the operation that is next.
    without: list[_Scanned] = []
    cut: Refusal | None = None
    for item in scanned:
        cut = cut or item.cut
        if item.stands_in is None:
            without.append(item._replace(cut=cut))
            cut = None
    whole = [item._replace(cut=None) for item in scanned]
    for handle in registry:
        rule = handle.function
        key = (handle.stage, handle.name)
        if not isinstance(rule, Fusion) or key not in records or records[key].status == "disabled":
            continue
        found = _split_matches(handle, rule, without, env)
        if len(without) < len(scanned):
            found |= _split_matches(handle, rule, whole, env)
        if found:
            old = records[key]
            status = "refused" if old.status == "unmatched" else old.status
            refusals = (*old.refusals, *sorted(found.items()))
            records[key] = replace(old, status=status, refusals=refusals)


def _split_matches(
    handle: FusionHandle, rule: Fusion, scanned: Sequence[_Scanned], env: Env
) -> dict[int, Refusal]:
    """Where a pattern fits over a cut or over what stands in for a module, and which it is."""
    ops = [item.op for item in scanned]
    found: dict[int, Refusal] = {}
    reached = 0  # of those that end at one operation the longest counts
    for match in rule.places(ops, env):
        items = scanned[match.start : match.stop]
        real = [item.place for item in items if item.stands_in is None]
        reasons = [item.cut for item in items[1:]] + [item.stands_in for item in items]
        why = next(filter(None, reasons), None)
        if real and why is not None and match.stop > reached:
            # Functions of users are not to meet what stands in.
            no = rule.refusal(match, ops, env) if handle.origin == "opfuser" else None
            if no is None or no.code != "DISABLED":
                found.setdefault(real[0], why)
                reached = match.stop
    return found


def _planned(
    groups: Sequence[Group], routes: Routes, x: Facts, extra_inputs: Sequence[Facts]
) -> list[Planned]:
    """The plans of each group for tensors like these."""
    stored: dict[Slot, TensorFacts] = {}
    out: list[Planned] = []
    for group, path in zip(groups, routes.groups):
        extras = [
            extra_inputs[take] if isinstance(take, int) else stored[take] for take in path.takes
        ]
        out.append(group.planned(x, extras))
        x = out[-1].output
        for (key, _), extra_output in zip(path.gives, out[-1].extra_outputs):
            if key is not None:
                stored[key] = extra_output
    return out


def plan_groups(
    groups: Sequence[Group], routes: Routes, x: Facts, extra_inputs: Sequence[Facts]
) -> Planned:
    """The plan of all groups for tensors like these, and what the last one returns.

    Args:
        groups: in order.
        routes: of their extra tensors.
        x: the input of the first one.
        extra_inputs: those that the caller passes.
    """
    done = _planned(groups, routes, x, extra_inputs)
    assumed = tuple(what for group in done for what in group.assumed)
    plans = [planned.plans for planned in done]
    plan = join_plans(groups, plans, torch.is_grad_enabled(), assumed)
    extra_outputs = [
        facts
        for group, path in zip(done, routes.groups)
        for (_, public), facts in zip(path.gives, group.extra_outputs)
        if public
    ]
    output = done[-1].output if done else TensorFacts(x.dtype, x.device, x.requires_grad)
    return Planned([] if plan is None else [plan], output, extra_outputs, assumed)
