"""assert_fused and assert_not_fused: what plans must and must not contain."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..core.fusion import Stage
from ..engine.plan import FusionRecord, Plan
from ..errors import ArgumentError, choose_among, counted, explain
from ..explain.expectations import Counts, compared, last_plans, occurrences, reasons
from ..sequential import Sequential


def assert_fused(
    model: nn.Module | Plan,
    *inputs: Tensor,
    forward: Mapping[str, int] | None = None,
    backward: Mapping[str, int] | None = None,
    joint: Mapping[str, int] | None = None,
) -> None:
    """Asserts how often fusions occur in the plan of a model, by name and stage.

    ``assert_fused(seq, x, forward={"linear_bias": 2})``. Fusions that are not named are not
    checked. In programs, use :func:`opfuser.require_fusions`.

    Args:
        model: a Sequential; a module that holds some; or a plan.
        *inputs: input and extra inputs of a Sequential, to plan for: their dtypes are read, their
            shapes are not. Without them, the last plan of each Sequential inside counts.
        forward, backward, joint: number of steps per fusion of that stage.

    Raises:
        AssertionError: another number; the message has the fusion's reasons and the plan.
        ArgumentError: there is no plan, because the model has not been called; or no fusion is
            given.
    """
    if not (forward or backward or joint):
        raise ArgumentError.explained(
            "assert_fused compares the fusions that it is given",
            received="no fusion",
            remedy="Name what must occur, as joint=dict(norm_linear=1)",
        )
    plans = _plans(model, inputs)
    wanted: dict[Stage, Counts] = {"forward": forward, "backward": backward, "joint": joint}
    for stage, name, count, found in compared(plans, wanted):
        _records(plans, name)
        if found != count:
            times = f"{counted(count, 'time')} in stage {stage}, found {found}"
            raise AssertionError(record_text(f"Expected fusion {name!r} {times}", plans, name))


def assert_not_fused(
    model: nn.Module | Plan, name: str, *inputs: Tensor, code: str | None = None
) -> None:
    """Asserts that a fusion does not occur in the plan of a model, and optionally why.

    Args:
        model: as for :func:`assert_fused`.
        name: name of the fusion.
        *inputs: as for :func:`assert_fused`.
        code: the expected reason, such as ``"DTYPE"``: the code of a refusal, of what stopped the
            closest match, or of why the fusion was not tried.

    Raises:
        AssertionError: the fusion occurs, or the reason is another one.
        ArgumentError: as for :func:`assert_fused`.
    """
    plans = _plans(model, inputs)
    records = _records(plans, name)
    found = sum(occurrences(plan, record.stage, name) for plan, record in records)
    if found:
        raise AssertionError(
            record_text(f"Expected fusion {name!r} not to match, found {found}", plans, name)
        )
    codes = {no.code for plan, record in records for no in reasons(plan, record)}
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
    if inputs:
        raise ArgumentError.explained(
            "Plans for given inputs are those of a Sequential",
            received=f"{type(model).__name__} and {counted(len(inputs), 'input')}",
            remedy="Call the model first and pass no inputs; or pass a Sequential and inputs",
        )
    return list(last_plans(model).values())


def _records(plans: list[Plan], name: str) -> list[tuple[Plan, FusionRecord]]:
    found = [(plan, record) for plan in plans for record in plan.history if record.name == name]
    if not found:
        names = {record.name for plan in plans for record in plan.history}
        raise AssertionError(
            explain(
                f"No fusion {name!r} was tried when the plan was made",
                remedy=choose_among(name, names) or "None is registered",
            )
        )
    return found


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
