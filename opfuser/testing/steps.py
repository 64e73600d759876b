"""Which step of a plan makes a result that deviates: plans run step by step, and compared."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..core.op_base.results import backward_parts, row_of_grads
from ..engine.emission import step_name
from ..engine.plan import Plan, Step
from ..engine.routing import Slot
from ..op import FusibleOperation, OperationContext
from ..sequential import Sequential
from .calls import ERRORS, Subject, in_mode, seeded
from .changes import changed
from .compare import Tolerance, deviation, precision
from .contexts import Filled, fill
from .variants import Variant


class Raw(NamedTuple):
    """The gradients as a fuser_backward returned them."""

    input: Any
    parameters: list[tuple[Any, ...]]
    extra_inputs: list[tuple[Any, ...]]


def run_backward(
    filled: Filled,
    step: Step,
    grad_output: Tensor,
    grad_extras: Sequence[Sequence[Tensor | None]],
    saved: Sequence[Sequence[Any]] | None = None,
) -> Raw:
    """Calls the backward of one step with the contexts of a forward.

    Args:
        saved: the tensors of each operation in place of those that forward saved.
    """
    saved = (
        [list(filled.contexts[i].to_save or ()) for i in step.indices] if saved is None else saved
    )
    ctxs = []
    for i, tensors in zip(step.indices, saved):
        ctx: OperationContext = copy.copy(filled.contexts[i])
        ctx.to_save, ctx.saved_tensors = None, tuple(tensors)
        if filled.plan.basic_ops[i].backward_reads_parameters:
            ctx.parameters = filled.parameters[i]
        ctxs.append(ctx)
    with torch.no_grad():
        result = cast(FusibleOperation, step.op).fuser_backward(
            ctxs, grad_output, basic_op_grad_extra_outputs=[list(row) for row in grad_extras]
        )
    name = step_name(step)
    dx, *lists = backward_parts(name, result)
    params, extras = (
        [tuple(row_of_grads(name, f"op {i}", row)) for i, row in zip(step.indices, rows)]
        for rows in lists
    )
    return Raw(dx, params, extras)


class _Trace(NamedTuple):
    """The results of each step of both passes.

    Attributes:
        filled: the forward.
        grads: for each step of backward that ran, by its first operation, the gradients by name.
    """

    filled: Filled
    grads: dict[int, dict[str, Tensor | None]]


def first_deviation(
    ours: Subject,
    plain: Subject,
    exact: Subject,
    calls: Sequence[Mapping[str, Tensor]],
    variant: Variant,
    tolerance: Tolerance,
    grad_outputs: Mapping[str, Tensor],
) -> str:
    """A sentence about the first step whose results deviate from those of the unfused operations.

    Empty if the plans cannot be run step by step.

    Args:
        ours, plain, exact: sequences with the fusions that are on in their calls.
        calls: the inputs of each of the three.
    """
    try:
        low = torch.is_autocast_enabled(calls[0]["input"].device.type)
        fused = _trace(ours, calls[0], variant, grad_outputs, autocast=low)
        unfused = _trace(plain, calls[1], variant, grad_outputs, autocast=low)
        right = unfused
        if exact is not plain:
            right = _trace(exact, calls[2], variant, grad_outputs, autocast=False)
    except ERRORS:
        return ""
    for stage, step, name, values in _results(fused, unfused, right):
        like = next((t for t in values if t is not None), None)
        if like is None:
            continue
        a, b, c = (torch.zeros_like(like) if t is None else t for t in values)
        if a.shape != c.shape:
            return f"{_first(fused.filled.plan, step, stage)} shape {tuple(a.shape)} of {name}"
        floor = tolerance.floor if tolerance.floor is not None else precision([a.dtype])
        found = deviation(a, b, c, tolerance.factor, floor)
        if found.is_wrong:
            text = f"error {found.error:.3g}, allowed {found.allowed:.3g}, of {name}"
            return f"{_first(fused.filled.plan, step, stage)} {text}"
    return "Run one after the other, outside of a call, all steps agree"


def _first(plan: Plan, step: Step, stage: str) -> str:
    by = f" [{step.fusion}]" if step.fusion else ""
    names = " + ".join(type(plan.basic_ops[i]).__name__ for i in step.indices)
    ops = f"ops {step.indices[0]}-{step.indices[-1]}" if len(step.indices) > 1 else "op"
    one = f" {step.indices[0]}" if len(step.indices) == 1 else ""
    return f"The first step that deviates is in {stage}: {ops}{one} {names}{by}, with"


Values = tuple[Tensor | None, Tensor | None, Tensor | None]


def _results(
    fused: _Trace, unfused: _Trace, right: _Trace
) -> Iterator[tuple[str, Step, str, Values]]:
    """Stage, step, name and the three values of each result, in the order in which they arise."""
    all_filled = fused.filled, unfused.filled, right.filled
    plan = fused.filled.plan
    for step in plan.forward:
        last = step.indices[-1]
        outputs = [filled.outputs[last] for filled in all_filled]
        yield "forward", step, "its output", (outputs[0], outputs[1], outputs[2])
        for i in step.indices:
            rows = zip(*(filled.extra_outputs[i] for filled in all_filled))
            for n, values in enumerate(rows):
                yield "forward", step, f"extra output {n} of op {i}", values
    for step in reversed(plan.backward):
        for name, grad in fused.grads.get(step.indices[0], {}).items():
            others = [
                next((g[name] for g in trace.grads.values() if name in g), None)
                for trace in (unfused, right)
            ]
            yield "backward", step, name, (grad, others[0], others[1])


def _trace(
    subject: Subject,
    inputs: Mapping[str, Tensor],
    variant: Variant,
    grad_outputs: Mapping[str, Tensor],
    *,
    autocast: bool,
) -> _Trace:
    assert isinstance(subject.module, Sequential)
    assert subject.fusions is not None
    seq = subject.module
    with (
        seeded(inputs.values()),
        in_mode(seq, variant),
        torch.autocast(inputs["input"].device.type, enabled=autocast),
    ):
        filled = fill(seq, inputs, subject.fusions, "", subject.parameters, variant)
        with changed(seq, replaces=variant.replaces, sets=variant.sets):
            return _Trace(filled, dict(_gradients(seq, filled, grad_outputs)))


def _gradients(
    seq: Sequential, filled: Filled, grad_outputs: Mapping[str, Tensor]
) -> Iterator[tuple[int, dict[str, Tensor | None]]]:
    """The gradients that each step of backward computes, by its first operation."""
    plan, arriving = filled.plan, _arriving(seq, filled, grad_outputs)
    if not grad_outputs or not plan.backward:
        return
    last = filled.outputs[plan.forward[-1].indices[-1]]
    dy: Tensor | None = grad_outputs.get("output")
    dy = torch.zeros_like(last) if dy is None else dy.to(last.dtype)
    for step in reversed(plan.backward):
        if all(plan.needs[i] is None for i in step.indices) or dy is None:
            return
        extras = [
            [arriving.get(Slot(i, s)) for s in range(plan.basic_ops[i].num_extra_outputs)]
            for i in step.indices
        ]
        raw = run_backward(filled, step, dy.clone(), extras)
        first = step.indices[0]
        grads: dict[str, Tensor | None] = {f"the gradient of the input of op {first}": raw.input}
        for i, own, others in zip(step.indices, raw.parameters, raw.extra_inputs):
            op = plan.basic_ops[i]
            for (_, name), grad in zip(op.parameter_slots(), own):
                grads[f"the gradient of {name} of op {i}"] = grad
            for n, grad in enumerate(others):
                grads[f"the gradient of extra input {n} of op {i}"] = grad
                source = filled.sources[i][n]
                if isinstance(source, Slot) and grad is not None:
                    before = arriving.get(source)
                    arriving[source] = grad if before is None else before + grad
        yield first, grads
        dy = raw.input
        if dy is None and first in filled.inputs:
            dy = torch.zeros_like(filled.inputs[first])


def _arriving(
    seq: Sequential, filled: Filled, grad_outputs: Mapping[str, Tensor]
) -> dict[Slot, Tensor | None]:
    """The gradients of extra outputs that come from outside."""
    (route,) = seq._routes.groups
    assert route.routing is not None
    public = [slot for slot, (_, to_caller) in zip(route.routing.outputs, route.gives) if to_caller]
    return {slot: grad_outputs.get(f"extra output {n}") for n, slot in enumerate(public)}
