"""Fusions that something keeps from matching in a Sequential: what would match without it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...applying.reports import is_below
from ...basic import Identity
from ...core.change_tracking import has_hooks, replaces_forward
from ...core.fusion import Fusion, Refusal, Stage
from ...core.op_base import BasicOperation, FusibleOperation
from ...core.op_base.kinds import is_built_in
from ...engine.plan import FusionRecord, Plan, Step
from ...errors import OpfuserError
from ...explain.reasons import rules_of
from ...integrations.conversion import from_torch
from ...registry import disable, enable, registry
from ...runtime import is_own
from ...sequence.plain_modules import replacement
from ...sequential import Sequential
from ..observing import SequenceCall
from ..target import moved
from .estimates import Cost, of_sequence, segment, unfused
from .segments import expression

# Refusals that say that nothing is lost: another fusion is better or has the operations, there is
# no kernel for this device, nobody asked for it, there is no gradient, or what stands between has
# no like among the operations.
_AS_INTENDED = frozenset(
    {"CONFLICT", "DEVICE", "DISABLED", "GROUP_SPLIT", "LAYOUT", "NO_GRAD", "NO_RECIPE"}
)


class Blocked(NamedTuple):
    """A registered fusion that would match, but for one reason.

    Attributes:
        name, stage: of the fusion.
        why: what keeps it from matching.
        call: of the Sequential.
        ops: the basic operations.
        paths: of these operations in the Sequential.
        steps: how the plan runs them now, and what it says of the fusion there.
        inputs: of these operations alone, without data.
        refuses: whether the fusion itself does, so that it cannot be tried.
        remedies: what takes the reasons away; none if the fusion itself refuses.
        keeps_results: whether that leaves results as they are.
    """

    name: str
    stage: Stage
    why: Refusal
    call: SequenceCall
    ops: tuple[BasicOperation, ...]
    paths: tuple[str, ...]
    steps: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    refuses: bool = False
    remedies: tuple[str, ...] = ()
    keeps_results: bool = False

    def cost(self) -> Cost | None:
        """What it would save; None if that cannot be counted.

        Where something stands in the way, it is in the way of other fusions too.
        """
        if self.refuses:
            return None
        switched_off = self.why.code == "DISABLED"
        with torch.set_grad_enabled(self.call.plan.env.grad_enabled):
            return of_sequence(
                segment(self.ops),
                self.inputs,
                partial(disable, self.name) if switched_off else unfused,
                partial(enable, self.name),
            )


class _Obstacle(NamedTuple):
    """What stands in the way of fusions.

    Attributes:
        path: of the module in the Sequential.
        why: as a refusal.
        remedy: what to do, with ``{}`` for the module as an expression.
    """

    path: str
    why: Refusal
    remedy: str


def blocked(call: SequenceCall) -> list[Blocked]:
    """What is missed in one Sequential.

    Where a plain module stands that an operation could replace, where an operation carries hooks,
    has a forward of its own or is a subclass, and where fusions were switched off, a plan is made
    of a copy without that, with the same parameters. What it fuses more is what is missed. Fusions
    that refuse for a reason of their own are read from the records.
    """
    with torch.set_grad_enabled(call.plan.env.grad_enabled):
        try:
            before = call.sequence.plan(*call.inputs)
        except OpfuserError:
            return []
        gains = list(_gained(call, before))
        return [*gains, *_refused(call, before, gains)]


def _gained(call: SequenceCall, before: Plan) -> Iterator[Blocked]:
    freed, obstacles = _without_obstacles(call.sequence)
    usual = {handle.name for handle in registry if getattr(handle.function, "enabled", True)}
    off = {r.name: r.detail for r in before.history if r.status == "disabled" and r.name in usual}
    if not obstacles and not off:
        return
    try:
        with enable(*off):
            after = freed.plan(*call.inputs)
    except OpfuserError:
        return
    passed = _passed(after, call.inputs[0])
    have = {_said(before, step) for step in (*before.forward, *before.backward)}
    seen: set[tuple[Any, ...]] = set()
    for step in (*after.forward, *after.backward):
        said = _said(after, step)
        paths = tuple(after.names[i] for i in step.indices)
        if step.fusion is None or said in have or said in seen or len(set(paths)) < 2:
            continue
        seen.add(said)
        near = [
            o for o in obstacles if any(is_below(p, o.path) or is_below(o.path, p) for p in paths)
        ]
        if step.fusion in off:
            why = Refusal("DISABLED", f"switched off by {off[step.fusion]}")
            near.append(_Obstacle("", why, f"opfuser.enable({step.fusion!r}) switches it on"))
        if near:
            codes = [o.why.code for o in near]
            detail = "; ".join(dict.fromkeys(o.why.detail for o in near))
            found = _blocked(
                step.fusion, Refusal(codes[0], detail), call, after, step.indices, passed, before
            )
            yield found._replace(
                remedies=tuple(
                    o.remedy.format(expression(f"{call.path}.{o.path}".strip("."))) for o in near
                ),
                keeps_results=not {"FORWARD", "SUBCLASS"} & set(codes),
            )


def _said(plan: Plan, step: Step) -> tuple[Any, ...]:
    kinds = tuple(type(plan.basic_ops[i]) for i in step.indices)
    return step.fusion, tuple(plan.names[i] for i in step.indices), kinds


def _without_obstacles(sequence: Sequential) -> tuple[Sequential, list[_Obstacle]]:
    """A copy without what stands in the way, and what that is.

    Parameters, plain modules and whatever hooks belong to are not copied.
    """
    shared: dict[int, Any] = {id(t): t for t in (*sequence.parameters(), *sequence.buffers())}
    obstacles: list[_Obstacle] = []
    for path, module in sequence.named_modules():
        if not isinstance(module, (Sequential, FusibleOperation)):
            shared[id(module)] = module
            continue
        shared.update({id(hooks): type(hooks)() for hooks in _hooks(module)})
        shared.update({id(own): own for own in [vars(module).get("forward")] if own is not None})
        if path and has_hooks(module):
            why = Refusal("HOOK", f"{type(module).__name__} carries hooks")
            obstacles.append(_Obstacle(path, why, "remove the hooks of {}"))
    twin = copy.deepcopy(sequence, shared)
    for path, module in list(twin.named_modules()):
        if isinstance(module, Sequential):
            for name, child in list(module.named_children()):
                at = f"{path}.{name}" if path else name
                obstacles += [_Obstacle(at, *found) for found in _replaced(module, name, child)]
        if path and isinstance(module, (Sequential, FusibleOperation)):
            obstacles += [_Obstacle(path, *found) for found in _freed(module)]
    return twin, obstacles


def _hooks(module: nn.Module) -> list[Any]:
    names = (name for name in vars(module) if name.endswith(("_hooks", "_hooks_with_kwargs")))
    return [hooks for name in names if isinstance(hooks := vars(module)[name], dict)]


def _replaced(holder: Sequential, name: str, child: nn.Module) -> Iterator[tuple[Refusal, str]]:
    """Puts an operation in the place of a plain module, if there is one."""
    if isinstance(child, (FusibleOperation, Sequential)):
        return
    bare = _without_hooks(child)
    if bare._modules or replacement(bare) is None:
        return
    with suppress(OpfuserError):
        (operation,) = from_torch(bare) or [Identity()]
        holder._modules[name] = operation
        holder._touch()
        kind, theirs = type(child).__name__, type(operation).__name__
        convert = "{0} = opfuser.from_torch({0})"
        if has_hooks(child):
            why = Refusal("HOOK", f"nn.{kind} carries hooks, where opfuser.{theirs} could stand")
            yield why, f"remove the hooks of {{0}}, then {convert}"
        else:
            why = Refusal("GROUP_SPLIT", f"nn.{kind} stands where opfuser.{theirs} could")
            yield why, convert


def _without_hooks(module: nn.Module) -> nn.Module:
    """The module, or if it carries hooks a shallow copy without."""
    if not has_hooks(module):
        return module
    bare = copy.copy(module)
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            vars(bare)[name] = type(hooks)()
    return bare


def _freed(module: nn.Module) -> Iterator[tuple[Refusal, str]]:
    """Takes its own forward from a module, and makes a subclass what it derives from."""
    name = type(module).__name__
    if replaces_forward(module):
        del vars(module)["forward"]
        why = Refusal("FORWARD", f"{name} has a forward of its own")
        yield why, "del {}.forward, if it computes what the class does"
    cls = type(module)
    parent = cls.__mro__[1]
    ours = isinstance(module, BasicOperation) and not is_built_in(module)
    known = ours and is_own(parent.__module__) and _is_final(parent)
    if known and _extras(cls) == _extras(parent):
        module.__class__ = parent
        why = Refusal("SUBCLASS", f"{name} is a subclass of {parent.__name__}")
        yield why, f"opfuser.{parent.__name__} in the place of {{}}, if it computes the same"


def _extras(cls: Any) -> tuple[int, int]:
    return cls.num_extra_inputs, cls.num_extra_outputs


def _is_final(cls: type) -> bool:
    """Whether fusions name a class of operations, rather than derive others from it."""
    named = {
        t for handle in registry if isinstance(handle.function, Fusion)
        for element in handle.function.elements for t in element.types
    }  # fmt: skip
    return cls in named


def _refused(call: SequenceCall, before: Plan, gains: list[Blocked]) -> Iterator[Blocked]:
    passed: list[_Passed] | None = None
    known = _AS_INTENDED | {g.why.code for g in gains}
    for record in before.history:
        for at, why in record.refusals:
            if why.code in known:
                continue
            span = _span(record, before, at)
            passed = _passed(before, call.inputs[0]) if passed is None else passed
            found = _blocked(record.name, why, call, before, span, passed, before)
            yield found._replace(refuses=True)


def _span(record: FusionRecord, plan: Plan, at: int) -> tuple[int, ...]:
    """The operations that a pattern takes from ``at`` on."""
    for rule in rules_of(record):
        for match in rule.places(plan.basic_ops, plan.env):
            if match.start == at:
                return tuple(range(match.start, match.stop))
    return (at,)


def _blocked(
    name: str,
    why: Refusal,
    call: SequenceCall,
    plan: Plan,
    indices: tuple[int, ...],
    passed: list[_Passed],
    before: Plan,
) -> Blocked:
    paths = tuple(plan.names[i] for i in indices)
    inputs = [passed[indices[0]].given]
    for i in indices:
        inputs += [passed[i].made] * plan.basic_ops[i].num_extra_inputs
    needs = plan.needs[indices[0]]
    x_needs = needs is not None and needs.input
    return Blocked(
        name,
        next(handle.stage for handle in registry if handle.name == name),
        why,
        call,
        tuple(plan.basic_ops[i] for i in indices),
        paths,
        (*_steps_at(before, set(paths)), *_said_there(before, name, paths)),
        tuple(torch.empty_like(t, device="meta").requires_grad_(x_needs) for t in inputs),
    )


def _said_there(plan: Plan, name: str, paths: tuple[str, ...]) -> list[str]:
    """What a plan says of a fusion at the first of its operations."""
    at = next((n for n, path in enumerate(plan.names) if path in paths), None)
    return [] if at is None else plan.why(name, at).splitlines()


def _steps_at(plan: Plan, paths: set[str]) -> tuple[str, ...]:
    """The steps of a plan that compute operations at these paths, and modules between them."""
    out: list[str] = []
    for title, steps in (("forward", plan.forward), ("backward", plan.backward)):
        about = [n for n, s in enumerate(steps) if paths & {plan.names[i] for i in s.indices}]
        for step in steps[about[0] : about[-1] + 1] if about else ():
            out.append(f"{title}: {_step(plan, step)}")
    return tuple(out)


def _step(plan: Plan, step: Step) -> str:
    if not step.indices:
        return f"{type(step.op).__name__} (plain module)"
    label = " + ".join(f"{plan.names[i]} {type(plan.basic_ops[i]).__name__}" for i in step.indices)
    return label if step.fusion is None else f"{label} -> {type(step.op).__name__} [{step.fusion}]"


class _Passed(NamedTuple):
    """Input and output of an operation, without data."""

    given: Tensor
    made: Tensor


def _passed(plan: Plan, x: Tensor) -> list[_Passed]:
    """What each operation is given and returns, from references; plain modules are run.

    What cannot be called so, such as an operation that exchanges data between ranks, is taken to
    return what it is given.
    """
    at = torch.empty_like(x, device="meta", requires_grad=False)
    ops = segment(plan.basic_ops)
    out: list[_Passed] = []
    for step in plan.forward:
        if not step.indices:
            at = _output(partial(_on_meta, step.op), at)
        for i in step.indices:
            op = ops[i]
            assert isinstance(op, BasicOperation)
            out.append(_Passed(at, _output(op.reference, at, *[at] * op.num_extra_inputs)))
            at = out[-1].made
    return out


def _on_meta(module: nn.Module, x: Tensor) -> Any:
    # A copy: what the model holds stays as it is.
    return copy.deepcopy(moved(module, x.device, None))(x)


def _output(function: Callable[..., Any], x: Tensor, *extras: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            y = function(x, *extras)
    except Exception:  # noqa: BLE001 - whatever code of the user raises
        return x
    output = y[0] if isinstance(y, tuple) else y
    return output if isinstance(output, Tensor) else x
