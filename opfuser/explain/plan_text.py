"""A plan as text for people: equal layers once, at most 80 columns, nothing that varies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..engine.plan import Plan, Step, span, together
from ..errors import counted
from ..events.kinds import FallbackTaken
from .folding import joined_numbers
from .plan_layers import layers
from .plan_view import PlanView, Stage
from .reasons import fusion_lines, places, wrapped

_MOST = 8  # places of equal refusals that a line of the log lists


def text(plan: Plan) -> str:
    """The text that ``print(plan)`` shows."""
    view = PlanView(plan)
    lines = wrapped(f"Plan for {counted(len(plan.basic_ops), 'basic operation')} ({view.call})")
    lines += _pass_lines(view, "forward") + _pass_lines(view, "backward")
    lines += wrapped(view.about_kernels())
    lines += _precision_lines(plan)
    for what in dict.fromkeys(plan.assumed):
        lines += wrapped(f"assumed: {what}")
    for replay in plan.replays:
        lines += wrapped(f"replay of {span(replay.indices)}: {replay}")
    return "\n".join([*lines, *fusion_lines(view)])


def log_lines(plan: Plan, fallbacks: Sequence[FallbackTaken]) -> list[str]:
    """The lines of a plan in the log, without its number: those of equal plans are equal.

    Args:
        plan: any.
        fallbacks: what it computes otherwise than its recipe asks for.
    """
    view = PlanView(plan)
    kinds, recipe = view.kinds, plan.env.recipe
    about = view.call if recipe is None else f"{view.call}, {type(recipe).__name__}"
    ends = kinds[0] if len(kinds) == 1 else f"{kinds[0]} to {kinds[-1]}"
    out = [f"{counted(len(kinds), 'operation')}, {ends} ({about})"]
    for record in plan.history:
        head = f"[stage={record.stage}, fusion={record.name}] refused at"
        out.append(record.summary())
        out += [f"{head} {_listed(at)}: {why}" for why, at in record.reasons.items()]
    alike = together((str(replace(f, what="", plan=0)), f.what) for f in fallbacks)
    return out + [f"{_listed(at)}{what}" for what, at in alike.items()]


def _listed(places: Sequence[int] | Sequence[str]) -> str:
    text = ", ".join(map(str, places[:_MOST]))
    return text if len(places) <= _MOST else f"{text} and {len(places) - _MOST} more"


# Steps.


def _pass_lines(view: PlanView, stage: Stage) -> list[str]:
    if not view.steps(stage):
        return [f"{stage}: none"]
    same = set(view.plan.forward) if stage == "backward" else set()

    def told(step: Step) -> bool:
        return step not in same and (stage == "forward" or view.runs_backward(step))

    lines = [f"{stage}:"]
    if stage == "backward":
        but = ", but" if any(map(told, view.plan.backward)) else ""
        lines = [f"backward: the steps of forward in reverse{but}"]
    found = layers(view, stage, told)
    width = max((len(row.place) for layer in found for row in layer.rows), default=0)
    before: dict[tuple[str, ...], str] = {}
    for heading, prefix, rows in found:
        labels = tuple(row.label for row in rows)
        if heading and labels in before:
            lines += wrapped(f"{heading}: as {before[labels]}", 2)
            continue
        if heading:
            before[labels] = prefix
            lines += wrapped(f"{heading}:", 2)
        for row in rows:
            line = f"{row.place:<{width}}  {row.label}"
            lines += wrapped(line, 4 if heading else 2, width + 2)
    if stage == "backward" and view.idle:
        lines += wrapped(f"no gradient is needed: {places(view, view.idle)}", 2)
    return lines


# Quantized compute.


def _precision_lines(plan: Plan) -> list[str]:
    if plan.env.recipe is None:
        return []
    declined = together((no, at) for at, no in plan.high_precision)
    texts = [f"not {_operations(at)}: {no}" for no, at in declined.items()]
    edges = ((edge.stage, *str(edge).partition(": ")[::2]) for edge in plan.edges)
    for (_, what), ends in together(((stage, what), end) for stage, end, what in edges).items():
        texts.append(f"{_some(ends)}: {what}")
    for choice, at in together((c._replace(op=0), c.op) for c in plan.gemms).items():
        texts.append(str(choice).replace("op 0", _operations(at), 1))
    lines = wrapped(
        f"quantized, {type(plan.env.recipe).__name__}: {joined_numbers(plan.quantized) or 'none'}"
    )
    return lines + [line for text in texts for line in wrapped(text, 2)]


def _operations(indices: Sequence[int]) -> str:
    return f"op{'s' * (len(indices) > 1)} {joined_numbers(indices)}"


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts if len(texts) <= 6 else [*texts[:4], "...", texts[-1]])
