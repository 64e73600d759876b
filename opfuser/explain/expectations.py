"""What programs expect of fusions: that they occur in a model, and whether one takes operations."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from textwrap import indent
from typing import NamedTuple

from torch import Tensor, nn

from ..core.fusion import Refusal, Stage
from ..engine.plan import FusionRecord, Plan, together
from ..errors import ArgumentError, MissingFusionError, UnknownFusionError, choose_among
from ..fuser import OperationFuser
from ..op import FusibleOperation
from ..registry import registry
from ..sequential import Sequential
from .folding import joined_paths
from .reasons import rules_of

_MOST_PLACES = 4

# How many steps each fusion of a stage has.
Counts = Mapping[str, int] | None


class Answer(NamedTuple):
    """The answer of :func:`can_fuse`: true if the fusion occurs, else false with the reason.

    Attributes:
        fused: whether the fusion occurs.
        code: why it does not, one of the codes of :class:`opfuser.Refusal`; else empty.
        detail: the reason as a sentence.
    """

    fused: bool
    code: str = ""
    detail: str = ""

    def __bool__(self) -> bool:
        return self.fused

    def __str__(self) -> str:
        return "fused" if self.fused else f"{self.code}: {self.detail}"


def can_fuse(ops: nn.Module | Sequence[nn.Module], name: str, *example: Tensor) -> Answer:
    """Whether a fusion occurs among operations, in a call with such tensors, and if not, why.

    ``can_fuse([norm, linear], "norm_linear", x)``. The answer comes from the plan of such a call:
    all fusions that are on apply in their order, and grad mode, autocast and the recipe of the
    region count. Nothing is computed, and the operations do not change.

    Args:
        ops: a Sequential, or operations, compounds and modules in forward order.
        name: of the fusion.
        *example: input and extra inputs, of any shape. Only dtype, device and ``requires_grad`` are
            read; tensors on the meta device suffice.

    Raises:
        UnknownFusionError: no fusion of that name is registered.
        ArgumentError: there is no input.
    """
    _check_name(name, [handle.name for handle in registry])
    if not example:
        raise ArgumentError.explained(
            "can_fuse answers for a call",
            where=f"fusion {name!r}",
            received="no input",
            remedy="Pass a tensor like that of the call; one on the meta device suffices",
        )
    if not isinstance(ops, Sequential):
        ops = Sequential(*_copies([ops] if isinstance(ops, nn.Module) else ops))
    plan = ops.plan(*example)
    record = plan.record(name)
    if record.matches:
        return Answer(True)
    nowhere = Refusal("LAYOUT", "no operation begins its pattern")
    return Answer(False, *next(reasons(plan, record), nowhere))


def _copies(ops: Sequence[nn.Module]) -> list[nn.Module]:
    """Copies that share their tensors: a Sequential fixes the channels of its operations."""
    tensors = [t for op in ops for t in (*op.parameters(), *op.buffers())]
    return copy.deepcopy(list(ops), {id(t): t for t in tensors})


def require_fusions(
    model: nn.Module,
    *,
    forward: Mapping[str, int] | None = None,
    backward: Mapping[str, int] | None = None,
    joint: Mapping[str, int] | None = None,
) -> None:
    """Requires that fusions occurred in the last calls of a model, at run time.

    ``require_fusions(model, joint={"norm_linear": 2 * layers})``, once after the first training
    step: a program whose fusions were lost then stops and says why, instead of running slowly. More
    steps than required are fine. Nothing is computed.

    Args:
        model: a Sequential, or a module that holds some; it has been called.
        forward, backward, joint: fewest steps per fusion of that stage, in all Sequentials
            together.

    Raises:
        MissingFusionError: a fusion occurs less often than required; the message names all of them,
            where they are missing and why.
        UnknownFusionError: no fusion of that name is registered or in any plan.
        ArgumentError: the model holds no Sequential, none was called, or nothing is required.
    """
    named = {**(forward or {}), **(backward or {}), **(joint or {})}
    if not any(count > 0 for count in named.values()):
        raise ArgumentError.explained(
            "require_fusions requires at least one step of a fusion",
            received=str(named or "no fusion"),
            remedy="Name what must occur, as joint=dict(norm_linear=1)",
        )
    plans = last_plans(model)
    known = {record.name for plan in plans.values() for record in plan.history}
    known.update(handle.name for handle in registry)
    missing: list[str] = []
    wanted: dict[Stage, Counts] = {"joint": joint, "forward": forward, "backward": backward}
    for stage, name, count, found in compared(plans.values(), wanted):
        _check_name(name, known)
        if found < count:
            head = f"{name} ({stage}): required at least {count}, found {found}"
            missing.append("\n".join([head, *reasons_by_place(plans, name)]))
    if missing:
        raise MissingFusionError("\n".join([f"{type(model).__name__} lacks fusions.", *missing]))


def last_plans(model: nn.Module) -> dict[str, Plan]:
    """What the last call of each Sequential in a model followed, by the path of the Sequential.

    The plan of a Sequential covers those that it holds, so they have no entry of their own.
    Operations that were called outside of a Sequential have one.

    Raises:
        ArgumentError: there is no plan.
    """
    found: dict[str, Plan] = {}
    covered: set[int] = set()
    sequentials = 0
    for path, module in model.named_modules():
        plan: Plan | None = None
        if isinstance(module, Sequential):
            sequentials += 1
            if id(module) not in covered and module._module_groups is not None:
                plan = module.last_plan
            if plan is not None:
                covered.update(_covered(module))
        elif isinstance(module, FusibleOperation):
            alone = module.__dict__.get("_alone")
            plan = alone.last_plan if isinstance(alone, OperationFuser) else None
            plan = None if id(module) in covered else plan
        if plan is not None:
            found[path] = plan
    if not found and sequentials:
        raise ArgumentError.explained(
            "Plans are made when a Sequential is called",
            received=f"{type(model).__name__}, of which no call has been made",
            remedy="Call the model first",
        )
    if not found:
        raise ArgumentError.explained(
            "Fusions occur in an opfuser.Sequential",
            received=f"{type(model).__name__}, which holds none",
            remedy="Convert it with opfuser.from_torch, or build it of opfuser.Sequential",
        )
    return found


def _covered(sequence: Sequential) -> Iterator[int]:
    """The Sequentials and operations whose calls are part of the plan of ``sequence``, by id."""
    for module in sequence:
        if isinstance(module, Sequential):
            yield id(module)
            if not module.overrides_forward():
                yield from _covered(module)
        elif isinstance(module, FusibleOperation):
            yield from map(id, module.modules())


def compared(
    plans: Collection[Plan], wanted: Mapping[Stage, Counts]
) -> Iterator[tuple[Stage, str, int, int]]:
    """Each fusion that is named, with the number of steps that is wanted, and that of the plans."""
    for stage, counts in wanted.items():
        for name, count in (counts or {}).items():
            yield stage, name, count, sum(occurrences(plan, stage, name) for plan in plans)


def occurrences(plan: Plan, stage: Stage, name: str) -> int:
    """Steps that a fusion of this stage built; one of both passes counts once."""
    if not any((r.name, r.stage) == (name, stage) for r in plan.history):
        return 0
    passes = {"forward": (plan.forward,), "backward": (plan.backward,)}
    return max(
        sum(step.fusion == name for step in steps)
        for steps in passes.get(stage, (plan.forward, plan.backward))
    )


def reasons(plan: Plan, record: FusionRecord) -> Iterator[Refusal]:
    """Why a fusion does not occur, or not everywhere; what holds for the whole plan comes first."""
    if record.status == "disabled":
        yield Refusal("DISABLED", f"it is switched off ({record.detail})")
    if record.status == "skipped":
        lacking = [h.requires.missing(plan.env) for h in registry if h.name == record.name]
        found = [no for no in lacking if no is not None]
        # The other reason is that there is no backward.
        yield from found or [Refusal("NO_GRAD", record.detail)]
    # Those of boundaries between groups are the last ones.
    yield from (no for _, no in record.refusals)
    yield from _conflicts(plan, record)
    if record.near_miss is not None:
        yield record.near_miss.stopped_by


def _conflicts(plan: Plan, record: FusionRecord) -> Iterator[Refusal]:
    """Which fusions have taken operations that this one would take, where it found none."""
    if record.status != "unmatched":
        return
    steps = plan.backward if record.stage == "backward" else plan.forward
    for rule in rules_of(record):
        for match in rule.places(plan.basic_ops, plan.env):
            if rule.refusal(match, plan.basic_ops, plan.env) is None:
                place = set(range(match.start, match.stop))
                for step in steps:
                    if step.fusion is not None and not place.isdisjoint(step.indices):
                        yield Refusal("CONFLICT", f"{step.fusion} has fused its operations")


def reasons_by_place(plans: Mapping[str, Plan], name: str) -> list[str]:
    """Lines about what became of a fusion in each plan; those of which the same is said together.

    Args:
        plans: by path.
        name: of the fusion.
    """
    records = {path: [r for r in p.history if r.name == name] for path, p in plans.items()}

    def became(path: str) -> str:
        if not records[path]:
            return "it was not registered when the plan was made"
        lost = [f"  {no}" for record in records[path] for no in _conflicts(plans[path], record)]
        return "\n".join([plans[path].why(name), *dict.fromkeys(lost)])

    fewest = sorted(plans, key=lambda path: sum(len(r.matches) for r in records[path]))
    said = list(together((became(path), path) for path in fewest).items())
    lines: list[str] = []
    for text, paths in said[:_MOST_PLACES]:
        place = joined_paths(paths)
        lines += [f"  {place}:"] if place else []
        lines += indent(text, "    " if place else "  ").splitlines()
    more = sum(len(paths) for _, paths in said[_MOST_PLACES:])
    return [*lines, f"  and {more} more Sequentials"] if more else lines


def _check_name(name: str, known: Sequence[str] | set[str]) -> None:
    if name not in known:
        raise UnknownFusionError.explained(
            "A fusion is named as it is registered",
            received=repr(name),
            remedy=choose_among(name, known),
        )
