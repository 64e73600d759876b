"""A plan laid out for execution: everything that does not change between calls."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from ..fusion import Stage
from ..op import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    GradNeeds,
    OperationContext,
    new_context,
)
from ..op.kinds import is_built_in
from ..quantization.quantizers import Quantizer
from .plan import Plan, Step, quantizer_between
from .routing import Routing, Slot

__all__ = ["Schedule", "step_name"]

T = TypeVar("T")


class ForwardStep(NamedTuple):
    """One forward step. ``general`` is None for a basic operation without extra tensors."""

    op: Any
    first: int
    needs: GradNeeds | None
    context: OperationContext | None
    """Shared by all calls, if the operation leaves nothing on it."""
    freezes: bool
    """Whether the operation has settings."""
    general: GeneralForward | None


class GeneralForward(NamedTuple):
    indices: tuple[int, ...]
    contexts: tuple[tuple[GradNeeds | None, BasicOperation | None], ...]
    """Needs of the operations, and those operations that have settings."""
    sources: tuple[tuple[int, tuple[tuple[Slot | int | None, bool], ...]], ...]
    """For each operation with extra inputs its position in the step, where they come from, and
    which of them show by ``requires_grad`` that their gradients are wanted."""
    overwrites: tuple[tuple[int, BasicOperation, int], ...]
    """Operations with ``in_place``: position in the step, operation, the caller's extra input."""
    outputs: tuple[tuple[int, int, tuple[tuple[Slot, str], ...]], ...]
    """Of each operation its position in the step, its index, and the slots of its extra outputs
    with why one may not be None: "public", "outside", or empty if it may. Of a step of the library
    those without are left out: nothing is returned for them."""
    silent: bool
    """Whether none of the operations has extra outputs."""
    notes_output: bool
    """Whether backward may need zeros as the gradient of the output."""
    frees: tuple[Slot, ...]
    name: str
    quantizers: tuple[Quantizer | None, Quantizer | None]
    """How the step before wants the gradient, and the step behind its input."""


class BackwardStep(NamedTuple):
    """One backward step, in the order of execution."""

    op: Any
    first: int
    span: tuple[int, int]
    """Position of its parameters among all."""
    reads: tuple[int, int] | None
    """Which of the kept parameters its backward reads."""
    context: OperationContext | None
    """As in forward, if the operation is a step without ``general`` there too."""
    general: GeneralBackward | None


class GeneralBackward(NamedTuple):
    contexts: tuple[tuple[int, tuple[int, int] | None], ...]
    """Indices of the operations, and which of the kept parameters backward reads."""
    parameters: tuple[tuple[int, int, int, int], ...]
    """Of each operation its position in the step, its index, and where its parameters begin and end
    among all. Of a step of the library those without are left out."""
    targets: tuple[tuple[int, int, tuple[Slot | int | None, ...]], ...]
    """Likewise, with the slot or argument that the gradient of each extra input belongs to."""
    takes: bool
    """Whether any of the operations has extra inputs."""
    outputs: tuple[tuple[int, tuple[Slot, ...]], ...]
    """For each operation with extra outputs its position in the step, and their slots."""
    name: str
    quantizer: Quantizer | None
    """How the step that runs next wants the gradient."""

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(i for i, _ in self.contexts)


_layouts: dict[Hashable, int] = {}


class Schedule:
    """A plan laid out for execution.

    Args:
        plan: the steps.
        routing: of extra tensors.
        num_parameters: of each basic operation.
        paths: of the basic operations in their Sequential, kept up to date by the caller; empty
            where they stand in none.
    """

    def __init__(
        self,
        plan: Plan,
        routing: Routing,
        num_parameters: Sequence[int],
        paths: Sequence[str] = (),
    ) -> None:
        self.plan = plan
        self.paths = paths
        self.outputs = routing.outputs
        self.num_extra_inputs = len(routing.inputs)
        self.inputs = routing.inputs
        ends = [0]
        for count in num_parameters:
            ends.append(ends[-1] + count)
        self.spans = tuple(pairwise(ends))
        self.num_parameters = ends[-1]
        self.needs_backward = any(need is not None for need in plan.needs)
        overlaps = (getattr(op, "wgrad_overlap", None) for op in plan.basic_ops)
        self.overlap = next((overlap for overlap in overlaps if overlap is not None), None)
        self.input_needs_grad = bool(plan.needs and plan.needs[0] and plan.needs[0].input)
        kept: list[int] = []
        reads: list[tuple[int, int] | None] = []
        for (start, stop), op, need in zip(self.spans, plan.basic_ops, plan.needs):
            if op.backward_reads_parameters and need is not None:
                reads.append((len(kept), len(kept) + stop - start))
                kept.extend(range(start, stop))
            else:
                reads.append(None)
        self.kept_parameters = tuple(kept)
        needs = _needs_of_steps(plan, routing, num_parameters)
        self._needs = tuple(needs)
        steps = [step.op for step in (*plan.forward, *plan.backward)]
        known = all(is_built_in(op) for op in (*plan.basic_ops, *steps))
        self.verified: set[Any] | None = None if known else set()
        """Kinds of calls that were verified; None where all is the library's own."""
        self._layout: int | None = None
        self.forward = _lay_out_forward(plan, routing, needs)
        constants = {step.first: step.context for step in self.forward}
        self.backward = _lay_out_backward(plan, routing, self.spans, reads, constants)
        self.without_grad = tuple(
            n for n, slot in enumerate(routing.outputs) if plan.needs[slot.op] is None
        )
        prepared = (BasicOperation, FusibleOperation)
        self.prepared_ops = tuple(
            (op, need is not None)
            for op, need in zip(plan.basic_ops, plan.needs)
            if not any(type(op).pre_fuser_forward is base.pre_fuser_forward for base in prepared)
        )

    def layout(self) -> int:
        """A number that differs between schedules that may save different tensors.

        A forward fusion saves what its operations save; a joint one chooses what it saves.
        """
        if self._layout is None:
            plan = self.plan
            again = {id(step.op) for step in plan.backward if isinstance(step.op, FusedOperation)}
            joint = [(type(s.op), s.indices) for s in plan.forward if id(s.op) in again]
            self._layout = _layouts.setdefault((*joint, self._needs), len(_layouts))
        return self._layout


def _needs_of_steps(
    plan: Plan, routing: Routing, num_parameters: Sequence[int]
) -> list[GradNeeds | None]:
    """The plan's needs; an operation that owes no gradient but shares a backward step saves too."""
    needs = list(plan.needs)
    for step in plan.backward:
        if any(plan.needs[i] is not None for i in step.indices):
            for i in step.indices:
                nothing = (False,) * num_parameters[i], (False,) * len(routing.sources[i])
                needs[i] = needs[i] or GradNeeds(False, *nothing)
    return needs


def _constant_context(op: Any, needs: GradNeeds | None) -> OperationContext | None:
    # Not inherited: a subclass may leave something.
    own = vars(type(op)).get("forward_leaves_nothing", False)
    return new_context(needs) if own else None


def _has_settings(op: BasicOperation) -> bool:
    return type(op).make_settings is not BasicOperation.make_settings


def _is_plain(op: Any, extra_tensors: bool) -> bool:
    """Whether a step may skip the general protocol and call op_forward / op_backward directly."""
    if not isinstance(op, BasicOperation) or extra_tensors:
        return False
    # Not inherited: a subclass may override either pair.
    return vars(type(op)).get("plain_without_extra_tensors", False) or (
        type(op).fuser_forward is BasicOperation.fuser_forward
        and type(op).fuser_backward is BasicOperation.fuser_backward
    )


def step_name(step: Step) -> str:
    """How errors name a step."""
    span = (
        f"{step.indices[0]}" if len(step.indices) == 1 else f"{step.indices[0]}-{step.indices[-1]}"
    )
    return f"op {span} ({type(step.op).__name__})"


def _quantizers(plan: Plan, stage: Stage) -> list[Quantizer | None]:
    """How tensors between each two steps of a pass are handed on."""
    steps = plan.forward if stage == "forward" else plan.backward
    return [quantizer_between(*pair, stage, plan.env, plan.needs) for pair in pairwise(steps)]


def _grad_quantizers(plan: Plan) -> dict[int, Quantizer]:
    """Those of gradients that a step hands to the one before it, by its first operation."""
    found = zip(plan.backward[1:], _quantizers(plan, "backward"))
    return {step.indices[0]: quantizer for step, quantizer in found if quantizer is not None}


def _lay_out_forward(
    plan: Plan, routing: Routing, needs: Sequence[GradNeeds | None]
) -> tuple[ForwardStep, ...]:
    last_reader: dict[Slot, int] = {}
    for number, step in enumerate(plan.forward):
        for i in step.indices:
            for s in range(len(routing.consumers[i])):
                last_reader[Slot(i, s)] = number
            last_reader.update({x: number for x in routing.sources[i] if isinstance(x, Slot)})
    ends = {
        step.indices[-1]
        for step in plan.backward
        if any(routing.consumers[i] for i in step.indices)
    }
    ops = plan.basic_ops
    out: list[ForwardStep] = []
    behind = [*_quantizers(plan, "forward"), None]
    before = _grad_quantizers(plan)
    for number, step in enumerate(plan.forward):
        own = set(step.indices)
        extras = any(routing.sources[i] or routing.consumers[i] for i in step.indices)
        first = step.indices[0]
        quantizers = before.get(first), behind[number]
        if _is_plain(step.op, extras or quantizers != (None, None)):
            out.append(
                ForwardStep(
                    step.op,
                    first,
                    needs[first],
                    _constant_context(step.op, needs[first]),
                    _has_settings(ops[first]),
                    None,
                )
            )
            continue
        outputs = tuple(
            tuple(
                (
                    Slot(i, s),
                    "public" if Slot(i, s) in routing.outputs
                    else "outside" if any(reader not in own for reader in readers)
                    else "",
                )
                for s, readers in enumerate(routing.consumers[i])
            )
            for i in step.indices
        )  # fmt: skip
        sources = tuple(_outside(routing.sources[i], own) for i in step.indices)
        asks = tuple(
            tuple(isinstance(source, Slot) and wanted for source, wanted in zip(row, need[2]))
            if (need := plan.needs[i]) is not None and not is_built_in(step.op)
            else (False,) * len(row)
            for i, row in zip(step.indices, sources)
        )
        general = GeneralForward(
            step.indices,
            tuple((needs[i], ops[i] if _has_settings(ops[i]) else None) for i in step.indices),
            tuple((n, tuple(zip(*rows))) for n, rows in enumerate(zip(sources, asks)) if rows[0]),
            tuple(
                (n, ops[i], row[0])
                for n, (i, row) in enumerate(zip(step.indices, sources))
                if row and isinstance(row[0], int) and hasattr(ops[i], "in_place")
            ),
            _rows(step, outputs),
            not any(outputs),
            step.indices[-1] in ends,
            tuple(
                slot for slot, last in last_reader.items()
                if last == number and slot not in routing.outputs
            ),
            step_name(step),
            quantizers,
        )  # fmt: skip
        out.append(ForwardStep(step.op, first, None, None, False, general))
    return tuple(out)


def _lay_out_backward(
    plan: Plan,
    routing: Routing,
    spans: Sequence[tuple[int, int]],
    reads: Sequence[tuple[int, int] | None],
    constants: dict[int, OperationContext | None],
) -> tuple[BackwardStep, ...]:
    out: list[BackwardStep] = []
    quantizers = _grad_quantizers(plan)
    for step in reversed(plan.backward):
        if all(plan.needs[i] is None for i in step.indices):
            break
        extras = any(routing.sources[i] or routing.consumers[i] for i in step.indices)
        first = step.indices[0]
        if _is_plain(step.op, extras or first in quantizers):
            out.append(
                BackwardStep(step.op, first, spans[first], reads[first], constants.get(first), None)
            )
            continue
        own = set(step.indices)
        parameters = [range(*spans[i]) for i in step.indices]
        general = GeneralBackward(
            tuple((i, reads[i]) for i in step.indices),
            tuple((n, i, own.start, own.stop) for n, i, own in _rows(step, parameters)),
            _rows(step, [_outside(routing.sources[i], own) for i in step.indices]),
            any(routing.sources[i] for i in step.indices),
            tuple(
                (n, tuple(Slot(i, s) for s in range(len(routing.consumers[i]))))
                for n, i in enumerate(step.indices)
                if routing.consumers[i]
            ),
            step_name(step),
            quantizers.get(first),
        )
        out.append(BackwardStep(step.op, first, (0, 0), None, None, general))
    return tuple(out)


def _rows(step: Step, values: Iterable[T]) -> tuple[tuple[int, int, T], ...]:
    """Position and index of each operation of a step, with its value.

    Those with an empty one only where the step may return something for them nevertheless, which is
    an error: not that of a step of the library.
    """
    rows = zip(range(len(step.indices)), step.indices, values)
    return tuple(row for row in rows if row[2] or not is_built_in(step.op))


def _outside(sources: tuple[Slot | int, ...], own: set[int]) -> tuple[Slot | int | None, ...]:
    """Sources of extra inputs; None for a channel whose producer the same step covers."""
    return tuple(None if isinstance(x, Slot) and x.op in own else x for x in sources)
