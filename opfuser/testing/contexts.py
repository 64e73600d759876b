"""What a fused forward saves in the contexts of the operations that it replaces."""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.context import GradNeeds, OperationContext
from ..core.op_base import BasicOperation, FusibleOperation
from ..core.op_base.results import forward_parts, refuse_output, row_of_outputs
from ..engine.emission import step_name
from ..engine.plan import Plan
from ..engine.routing import Slot
from ..errors import counted
from ..fuser import OperationFuser
from ..registry import disable, enable, registry
from ..sequential import Sequential
from .calls import Outcome, Untouched, ask_for_gradients, checked_results, fail, seeded
from .compare import Comparison, Tolerance, cast, parameters_of
from .variants import Variant, lay_out

PLAIN = Variant()


@contextmanager
def only(names: Iterable[str]) -> Iterator[None]:
    """Inside, the named fusions are on, and all others off."""
    on = set(names)
    with ExitStack() as stack:
        stack.enter_context(disable(*(h.name for h in registry if h.name not in on)))
        stack.enter_context(enable(*on))
        yield


class Filled(NamedTuple):
    """Contexts, inputs and outputs of one forward, per basic operation.

    A fused step has the input of its first operation and the output of its last one. ``sources``
    says for each operation which slot or argument its extra inputs come from.
    """

    plan: Plan
    contexts: list[OperationContext]
    inputs: dict[int, Tensor]
    outputs: dict[int, Tensor]
    extra_inputs: dict[int, list[Tensor | None]]
    extra_outputs: dict[int, list[Tensor | None]]
    parameters: dict[int, tuple[Tensor, ...]]
    sources: tuple[tuple[Slot | int, ...], ...]


def name_of(plan: Plan, i: int) -> str:
    """An operation of a plan, for messages."""
    return f"op {i} ({type(plan.basic_ops[i]).__name__})"


def fill(
    seq: Sequential,
    inputs: Mapping[str, Tensor],
    fusions: Iterable[str],
    where: str,
    parameters: Mapping[str, Tensor] | None = None,
    variant: Variant = PLAIN,
) -> Filled:
    """The contexts and results of a plan's forward, run step by step from the same seed.

    Args:
        parameters: those that require grad where the variant wants gradients of all.
        variant: which tensors require grad, and their layouts.
    """
    parameters = parameters_of(seq) if parameters is None else parameters
    given = {name: lay_out(name, t, variant) for name, t in inputs.items()}
    ask_for_gradients(given, parameters, variant)
    watched = Untouched({**given, **parameters})
    x, *extras = given.values()
    with only(fusions):
        plan = seq.plan(x, *extras)
    assert seq._module_groups is not None
    fuser = seq._module_groups[0]
    assert isinstance(fuser, OperationFuser)
    contexts: list[OperationContext] = []
    produced: dict[Slot, Tensor | None] = {}
    out = Filled(plan, contexts, {}, {}, {}, {}, {}, fuser.routing.sources)
    with seeded(inputs.values()), torch.no_grad(), checked_results(where):
        for step in plan.forward:
            ctxs = [_context(plan.needs[i], plan.basic_ops[i]) for i in step.indices]
            sources = [fuser.routing.sources[i] for i in step.indices]
            taken = [
                [extras[s] if isinstance(s, int) else produced.get(s) for s in row]
                for row in sources
            ]
            out.inputs[step.indices[0]] = x
            result = typing.cast(FusibleOperation, step.op).fuser_forward(
                ctxs,
                x,
                basic_op_extra_inputs=taken,
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                basic_op_kwargs=[{} for _ in ctxs],
            )
            name = step_name(step)
            x, extra_outputs = forward_parts(name, result)
            if not isinstance(x, Tensor):
                raise refuse_output(name, x)
            for i, row, made in zip(step.indices, taken, extra_outputs):
                ys = row_of_outputs(name, name_of(plan, i), made)
                produced.update({Slot(i, s): y for s, y in enumerate(ys)})
                out.extra_inputs[i], out.extra_outputs[i] = row, list(ys)
                slots = plan.basic_ops[i].parameter_slots()
                out.parameters[i] = tuple(getattr(module, name) for module, name in slots)
            contexts += ctxs
            out.outputs[step.indices[-1]] = x
    watched.check(where)
    return out


def _context(needs: GradNeeds | None, op: BasicOperation) -> OperationContext:
    ctx = OperationContext()
    ctx.settings = op.settings
    ctx.requires_grad = needs is not None
    ctx.needs = needs or ctx.needs
    return ctx


def check_saved_by(
    fusion: str, seq: Sequential, inputs: Mapping[str, Tensor], tolerance: Tolerance, where: str
) -> None:
    """Compares what a forward fusion saves for each operation with what the operation saves."""
    fused = fill(seq, inputs, [fusion], where)
    plain = fill(seq, inputs, [], where)
    with torch.autocast(inputs["input"].device.type, enabled=False):
        exact_seq = copy.deepcopy(seq).to(torch.float64)
        exact = fill(exact_seq, cast(inputs, torch.float64), [], where)
    for step in fused.plan.forward:
        for i in step.indices if step.fusion == fusion else ():
            op = fused.plan.basic_ops[i]
            place = f"{where}: saved for {name_of(fused.plan, i)}"
            ctxs = [filled.contexts[i] for filled in (fused, plain, exact)]
            _compare_contexts(op, ctxs, tolerance, place)


def _compare_contexts(
    op: BasicOperation, ctxs: list[OperationContext], tolerance: Tolerance, where: str
) -> None:
    own, plain, exact = (ctx.to_save or () for ctx in ctxs)
    if len(own) != len(plain):
        fail(
            f"Expected {counted(len(plain), 'tensor')}, as its op_forward saves",
            where,
            str(len(own)),
        )
    names = list(op.Saved.__annotations__) if op.Saved else [f"tensor {n}" for n in range(len(own))]
    for name, a, b in zip(names, own, plain):
        if a is None and b is not None:
            fail(f"Expected {name} to be a tensor", where, "None")
    missing = set(vars(ctxs[1])) - set(vars(ctxs[0]))
    if missing:
        fail(f"The context must have the attributes {sorted(missing)}", where)
    both = [name for name, a, b in zip(names, own, plain) if a is not None and b is not None]
    outcomes = [
        Outcome(
            {name: t.detach() for name, t in zip(names, saved) if t is not None and name in both}
        )
        for saved in (own, plain, exact)
    ]
    own_outcome, plain_outcome, exact_outcome = outcomes
    Comparison(where, own_outcome, plain_outcome, exact_outcome, tolerance, "unfused").check()
