"""assert_fused and assert_not_fused: what plans must and must not contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ..engine.plan import FusionRecord, Plan
from ..errors import ArgumentError, explain
from ..fuser import OperationFuser
from ..fusion import Stage
from ..op import FusibleOperation
from ..registry import registry
from ..sequential import Sequential

__all__ = ["assert_fused", "assert_not_fused"]


def assert_fused(
    model: nn.Module | Plan,
    *inputs: Tensor,
    forward: Mapping[str, int] | None = None,
    backward: Mapping[str, int] | None = None,
    joint: Mapping[str, int] | None = None,
) -> None:
    """Asserts how often fusions occur in the plan of a model, by name and stage.

    ``assert_fused(seq, x, forward={"linear_bias": 2})``. Fusions that are not named may occur or
    not.

    Args:
        model: a Sequential; a module that holds some; or a plan.
        *inputs: input and extra inputs of a Sequential, to plan for. Without them, the plans that
            each Sequential inside used last are counted.
        forward, backward, joint: number of steps per fusion of that stage.

    Raises:
        AssertionError: another number; with the fusion's reasons and the plan.
        ArgumentError: there is no plan, because the model has not been called.
    """
    plans = _plans(model, inputs)
    stages: tuple[tuple[Stage, Mapping[str, int] | None], ...] = (
        ("forward", forward),
        ("backward", backward),
        ("joint", joint),
    )
    for stage, expected in stages:
        for name, count in (expected or {}).items():
            found = sum(_count(plan, stage, name) for plan in plans)
            if found != count:
                raise AssertionError(
                    record_text(
                        f"Expected fusion {name!r} {count} times in stage {stage}, found {found}",
                        plans,
                        name,
                    )
                )


def assert_not_fused(
    model: nn.Module | Plan, name: str, *inputs: Tensor, code: str | None = None
) -> None:
    """Asserts that a fusion does not occur in the plan of a model, and why.

    Args:
        model: as for :func:`assert_fused`.
        name: name of the fusion.
        *inputs: as for :func:`assert_fused`.
        code: the reason's code, such as ``"DTYPE"``: that of a refusal, of what stopped the
            closest match, or of why the fusion was not tried at all.

    Raises:
        AssertionError: the fusion occurs, or the reason is another one.
        ArgumentError: as for :func:`assert_fused`.
    """
    plans = _plans(model, inputs)
    counts = [_count(plan, record.stage, name) for plan, record in _records(plans, name)]
    if any(counts):
        raise AssertionError(
            record_text(f"Expected fusion {name!r} not to match, found {sum(counts)}", plans, name)
        )
    codes = {c for plan, record in _records(plans, name) for c in _codes(record, plan)}
    if code is not None and code not in codes:
        got = ", ".join(sorted(codes)) or "no reason"
        raise AssertionError(
            record_text(f"Expected fusion {name!r} to decline with {code}, got {got}", plans, name)
        )


def _plans(model: nn.Module | Plan, inputs: tuple[Tensor, ...]) -> list[Plan]:
    if isinstance(model, Plan):
        return [model]
    if isinstance(model, Sequential) and inputs:
        return [model.plan(*inputs)]
    plans = [] if inputs else list(_last_plans(model))
    if not plans:
        raise ArgumentError(
            explain(
                "Plans are made when a Sequential is called",
                received=f"{type(model).__name__} and {len(inputs)} inputs",
                remedy="Call the model first and pass no inputs; or pass a Sequential and inputs",
            )
        )
    return plans


def _last_plans(model: nn.Module) -> Iterator[Plan]:
    for module in model.modules():
        runs: list[object] = []
        if isinstance(module, Sequential):
            runs += module._module_groups or []
        elif isinstance(module, FusibleOperation):
            runs.append(module.__dict__.get("_alone"))
        for run in runs:
            if isinstance(run, OperationFuser) and run.last_plan is not None:
                yield run.last_plan


def _records(plans: list[Plan], name: str) -> list[tuple[Plan, FusionRecord]]:
    found = [(plan, record) for plan in plans for record in plan.history if record.name == name]
    if not found:
        names = sorted({record.name for plan in plans for record in plan.history})
        raise AssertionError(
            explain(
                f"No fusion {name!r} was tried when the plan was made",
                remedy=f"Names: {', '.join(names) or 'none, as no fusion is registered'}",
            )
        )
    return found


def _count(plan: Plan, stage: Stage, name: str) -> int:
    if not any(r.name == name and r.stage == stage for _, r in _records([plan], name)):
        return 0
    passes = {"forward": (plan.forward,), "backward": (plan.backward,)}
    return max(
        sum(step.fusion == name for step in steps)
        for steps in passes.get(stage, (plan.forward, plan.backward))
    )


def _codes(record: FusionRecord, plan: Plan) -> Iterator[str]:
    for _, refusal in record.refusals:
        yield refusal.code
    if record.near_miss is not None:
        yield record.near_miss.stopped_by.code
    if record.status == "disabled":
        yield "DISABLED"
    if record.status == "skipped":
        lacking = [h.requires.missing(plan.env) for h in registry if h.name == record.name]
        codes = [missing.code for missing in lacking if missing is not None]
        yield from codes or ["NO_GRAD"]  # the other reason is that there is no backward


def record_text(invariant: str, plans: list[Plan], name: str) -> str:
    """A message: the expectation, the fusion's reasons, and the plans."""
    details: list[str] = []
    for plan, record in _records(plans, name):
        details.append(record.summary())
        details += [f"  op {at}: {why}" for at, why in record.refusals]
        if record.near_miss is not None:
            details.append(f"  {record.near_miss}")
        details.append(str(plan))
    return "\n".join([f"{invariant}.", *details])
