"""What operations of users hand over, checked at the first calls of a program.

Later calls trust what was right: for inputs of the same number of dimensions, with gradients or
without. Operations of the library are held to it by their tests, so that sequences of these alone
are never verified.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.context import OperationContext
from ..core.op_base import BasicOperation
from ..core.op_base.kinds import is_built_in
from ..core.op_base.results import refuse_output
from ..errors import BackwardResultError, GradientShapeError, OverwrittenError, SavedTensorsError
from ..quantization.quantizers import QuantizedTensor
from .emission import step_name
from .program import Program
from .routing import describe


class _Lent(NamedTuple):
    """A tensor of the caller. Nothing refers to it: an operation may ask who else does."""

    what: str
    tensor: weakref.ref[Tensor]
    version: int


class Verification:
    """The verification of one call.

    Args:
        program: of the call.
        kind: of the call, noted among the ``verified`` ones once nothing was wrong with it.
    """

    def __init__(self, program: Program, kind: Any) -> None:
        assert program.verified is not None
        self._program = program
        self._verified = program.verified
        self._kind = kind
        self._step = ""
        self._shapes: dict[int, torch.Size] = {}
        self._tensors: list[tuple[str, str, bool, torch.Size]] = []
        self._lent: list[_Lent] = []
        self._overwritten: OverwrittenError | None = None
        plan = program.plan
        self._of_users = {
            step_name(step) for step in (*plan.forward, *plan.backward) if not is_built_in(step.op)
        }

    def lend(self, what: str, tensors: Sequence[Tensor | None]) -> None:
        """Remembers tensors that no operation of the pass to come may write to."""
        self._lent = [
            _Lent(what, weakref.ref(t), t._version)
            for t in tensors
            if t is not None and not t.is_inference()
        ]

    def _look_at_lent(self, step: str) -> None:
        """Looks whether a step has written to any of them."""
        for n, (what, ref, version) in enumerate(self._lent):
            tensor = ref()
            if tensor is None or tensor._version == version:
                continue
            self._lent[n] = self._lent[n]._replace(version=tensor._version)
            if step in self._of_users and self._overwritten is None:
                self._overwritten = OverwrittenError.explained(
                    "An operation does not write to what it is given",
                    where=step,
                    received=f"{what}, written to",
                    remedy="Return another tensor; clone what is computed in place",
                )

    def _raise_overwritten(self) -> None:
        self._lent = []
        if self._overwritten is not None:
            raise self._overwritten

    def before_forward(self, index: int, step: str, x: Any) -> None:
        """Looks at the input of a step, which is the output of the step before it."""
        self._look_at_lent(self._step)
        if self._step and not isinstance(x, (Tensor, QuantizedTensor)):
            raise refuse_output(self._step, x)
        self._step = step
        self._shapes[index] = x.shape

    def after_forward(
        self,
        ops: Sequence[BasicOperation],
        contexts: Sequence[OperationContext] | None,
        saved: Sequence[Any],
    ) -> None:
        """Looks at what was saved; without contexts there is nothing to come."""
        self._look_at_lent(self._step)
        self._raise_overwritten()
        if contexts is None:
            self._verified.add(self._kind)
            return
        for index, (op, ctx) in enumerate(zip(ops, contexts)):
            for value in () if ctx._span is None else saved[slice(*ctx._span)]:
                if value is not None and not isinstance(value, Tensor):
                    raise SavedTensorsError.explained(
                        "ctx.save_for_backward takes tensors and None",
                        where=describe(index, op),
                        received=type(value).__name__,
                        remedy="Set anything else as an attribute of ctx",
                    )

    def after_backward(self, index: int, step: str, dx: Any) -> None:
        """Looks at the gradient of the input of a step whose first operation has this index."""
        self._look_at_lent(step)
        needs = self._program.plan.needs[index]
        if needs is None or not needs.input:  # nobody will
            return
        _check_tensor(dx, step, "the gradient of the input")
        shape = self._shapes.get(index)
        if dx is None or shape is None or dx.shape == shape:
            return
        if index or not _sums_to(dx.shape, shape):  # autograd sums that of the whole group's
            raise _wrong_shape(step, "the input", dx.shape, shape)

    def note(self, tensors: Sequence[Tensor]) -> None:
        """Remembers the shapes of the parameters and, behind them, of the extra inputs."""
        self._tensors = [(*owner, t.shape) for owner, t in zip(_owners(self._program), tensors)]

    def at_the_end(self, grads: Sequence[Any]) -> None:
        """Looks at the gradients of what was noted."""
        self._raise_overwritten()
        for (step, name, needed, shape), grad in zip(self._tensors, grads):
            if not needed:
                continue
            _check_tensor(grad, step, f"the gradient of {name}")
            if grad is not None and not _sums_to(grad.shape, shape):
                raise _wrong_shape(step, name, grad.shape, shape)
        self._verified.add(self._kind)


def _owners(program: Program) -> Iterator[tuple[str, str, bool]]:
    """Step and name of each parameter, then of each extra input, and whether it needs a gradient.

    Extra inputs are those of the caller.
    """
    ops, all_needs = program.plan.basic_ops, program.plan.needs
    for index, (op, needs) in enumerate(zip(ops, all_needs)):
        for number, (_, name) in enumerate(op.parameter_slots()):
            yield describe(index, op), name, needs is not None and needs.parameters[number]
    for index, number in program.inputs:
        needs = all_needs[index]
        needed = needs is not None and needs.extra_inputs[number]
        yield describe(index, ops[index]), f"extra input {number}", needed


def _check_tensor(grad: Any, step: str, what: str) -> None:
    if grad is not None and not isinstance(grad, (Tensor, QuantizedTensor)):
        raise BackwardResultError.explained(
            "A gradient is a tensor or None",
            where=step,
            received=f"{type(grad).__name__} as {what}",
            remedy="Return None for a gradient of zero",
        )


def _sums_to(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether autograd accepts a gradient of this shape, of which it sums broadcast dimensions."""
    missing = len(shape) - len(wanted)
    return missing >= 0 and all(b in (1, a) for a, b in zip(shape[missing:], wanted))


def _wrong_shape(
    step: str, what: str, received: Sequence[int], wanted: Sequence[int]
) -> GradientShapeError:
    return GradientShapeError.explained(
        "A gradient has the shape of what it is the gradient of",
        where=step,
        received=f"shape {tuple(received)} for {what} of shape {tuple(wanted)}",
        remedy="Sum it over the dimensions that forward broadcast, or reshape it, in backward",
    )
