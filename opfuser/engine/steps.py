"""What the lines of a program call besides operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core.context import OperationContext
from ..core.op_base.results import (
    backward_parts,
    forward_parts,
    parameter_grads,
    row_of_grads,
    row_of_outputs,
)
from ..errors import (
    ExtraInputGradientCountError,
    ExtraOutputCountError,
    HiddenOutputError,
    ParameterGradientCountError,
    counted,
    explain,
)
from ..quantization.quantizers import Quantizer
from ..quantization.watch import is_watched


def asking(y: Tensor) -> Tensor:
    """An extra input from a channel, for an operation of a user that may ask for its gradient.

    Operations written for te.ops read ``requires_grad`` to decide what to save. It is set on
    another tensor object, since this one may be the caller's.
    """
    if y.requires_grad or not y.is_floating_point():
        return y
    return y.detach().requires_grad_()


def unless_watched(quantizer: Quantizer) -> Quantizer | None:
    """None where codes are told of: who multiplies by them makes them."""
    return None if is_watched() else quantizer


class ForwardResults(NamedTuple):
    """What a step's ``fuser_forward`` has to return.

    Attributes:
        name: of the step, for errors.
        indices: of its operations.
        wanted: for each of their extra outputs why it may not be None: "public", "outside", or
            empty if it may.
    """

    name: str
    indices: tuple[int, ...]
    wanted: tuple[tuple[str, ...], ...]

    def of(self, result: Any) -> tuple[Any, ...]:
        """The output, and behind it all extra outputs.

        Raises:
            ForwardResultError: it is no pair of a tensor and a list.
            ExtraOutputCountError: there are more or fewer extra outputs.
            HiddenOutputError: one that is read is None.
        """
        x, rows = forward_parts(self.name, result)
        if len(rows) != len(self.indices):
            raise ExtraOutputCountError.explained(
                f"Expected extra outputs for {counted(len(self.indices), 'basic operation')}, "
                f"but got {len(rows)}",
                where=self.name,
                remedy="Return a list of extra outputs for each of them from fuser_forward, "
                "empty for one that has none",
            )
        results = [x]
        for i, row, wanted in zip(self.indices, rows, self.wanted):
            ys = row_of_outputs(self.name, f"op {i}", row)
            if len(ys) != len(wanted):
                raise ExtraOutputCountError.explained(
                    f"Expected op {i} to generate {counted(len(wanted), 'extra output')}, "
                    f"but got {len(ys)}",
                    where=self.name,
                    remedy="Return one tensor for each of its num_extra_outputs",
                )
            for slot, (y, reason) in enumerate(zip(ys, wanted)):
                if y is None and reason:
                    raise HiddenOutputError(_hidden_output(i, slot, reason, self.name))
                results.append(y)
        return tuple(results)


def _hidden_output(op: int, slot: int, reason: str, where: str) -> str:
    if reason == "public":
        what = f"Extra output {slot} of op {op} is public, but None was returned for it"
    else:
        what = (
            f"Extra output {slot} of op {op} is read by an operation outside its forward fusion, "
            "but None was returned for it"
        )
    return explain(what, where=where, remedy="Return the tensor from fuser_forward")


class _RevivedContext(OperationContext):
    """The context of an operation in backward: attributes set in forward, and saved tensors.

    Attributes are looked up in the context of forward, which is never written to, so that a second
    backward reads the same values.
    """

    _kept: OperationContext

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Backward fusions written for te.ops also read what te.ops' own forwards set.
            if name in _LEFT_BY_TE_OPS and not hasattr(self._kept, name):
                return _LEFT_BY_TE_OPS[name](self)
            return getattr(self._kept, name)


_LEFT_BY_TE_OPS: dict[str, Callable[[OperationContext], Any]] = {
    "dtype": lambda ctx: next((t.dtype for t in ctx.saved_tensors or () if t is not None), None),
    "input_requires_grad": lambda ctx: ctx.needs.input,
    "weight_requires_grad": lambda ctx: any(ctx.needs.parameters),
    "with_quantized_compute": lambda ctx: False,
    **{
        f"{name}_quantizer": lambda ctx: None
        for name in ("input", "weight", "grad_output", "grad_input", "prev_op_grad_output")
    },
}


def revived(
    kept: OperationContext,
    saved: list[Tensor | None],
    parameters: Sequence[Tensor | None] | None = None,
) -> OperationContext:
    """The context of an operation for its backward, given that of its forward.

    Its tensors are removed from ``saved``, so that they are freed once its backward has run.

    Args:
        kept: that of its forward, which is not written to.
        saved: by all operations.
        parameters: its own in forward, if its backward reads them.
    """
    ctx = _RevivedContext()
    ctx._kept = kept
    ctx.requires_grad = kept.requires_grad
    ctx.needs = kept.needs
    ctx.settings = kept.settings
    if kept._output_like is not None:
        ctx._output_like = kept._output_like
    if kept._span is not None:
        start, stop = kept._span
        ctx.saved_tensors = tuple(saved[start:stop])
        saved[start:stop] = [None] * (stop - start)
    if parameters is not None:
        ctx.parameters = tuple(parameters)
    return ctx


def handing_codes_on(ctx: OperationContext, quantizer: Quantizer) -> OperationContext:
    """A context whose operation hands the gradient of its input on as codes.

    Not where codes are told of: who multiplies by them makes them.
    """
    if not is_watched():
        ctx.grad_input_quantizer = quantizer
    return ctx


def zeros(like: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    """The zero gradient of an output of that shape, dtype and device."""
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


def zero_or_none(ctx: OperationContext, given: Iterable[Sequence[Tensor | None]]) -> Tensor | None:
    """The gradient of an output that no operation after it has returned one for.

    Args:
        ctx: of the operation whose output it is.
        given: the gradients of the extra outputs of its step. None if there are none.
    """
    first = next((grad for grad in chain(*given) if grad is not None), None)
    if first is None:
        return None
    return zeros(ctx._output_like or (first.shape, first.dtype, first.device))


def summed(earlier: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The gradient of a channel that several operations read."""
    if earlier is None or grad is None:
        return grad if earlier is None else earlier
    return earlier + grad


class BackwardResults(NamedTuple):
    """What the backward of a step has to return.

    Attributes:
        name: of the step, for errors.
        operations: their indices and names.
        parameters: how many each of them has.
        extra_inputs: for each of their extra inputs whether its gradient is handed on.
    """

    name: str
    operations: tuple[tuple[int, str], ...]
    parameters: tuple[int, ...]
    extra_inputs: tuple[tuple[bool, ...], ...]

    def of_one(self, result: Any) -> tuple[Any, Sequence[Any]]:
        """What a user's ``op_backward`` returned: gradients of the input, and of the parameters.

        Raises:
            BackwardResultError: it is no pair of these.
            ParameterGradientCountError: there are more or fewer.
        """
        dx, grads = parameter_grads(self.name, result)
        return dx, self._of_parameters(self.operations[0], self.parameters[0], grads)

    def of(self, result: Any) -> list[Any]:
        """What ``fuser_backward`` returned, in one list.

        Raises:
            BackwardResultError: it is not as it should be.
            ParameterGradientCountError: there are more or fewer lists, or gradients of parameters.
            ExtraInputGradientCountError: there are more or fewer of extra inputs.
        """
        dx, params, extras = backward_parts(self.name, result)
        count = len(self.operations)
        if (len(params), len(extras)) != (count, count):
            raise ParameterGradientCountError.explained(
                f"Expected gradients for {counted(count, 'basic operation')}, but got "
                f"{counted(len(params), 'list')} of param grads and {len(extras)} of "
                "extra-input grads",
                where=self.name,
                remedy="Return one tuple of each for each basic operation from fuser_backward, "
                "empty for one without",
            )
        out = [dx]
        for op, own, row in zip(self.operations, self.parameters, params):
            fits = type(row) is tuple and len(row) == own
            out += row if fits else self._of_parameters(op, own, row)
        for op, keeps, row in zip(self.operations, self.extra_inputs, extras):
            fits = type(row) is tuple and len(row) == len(keeps)
            grads = row if fits else self._of_extra_inputs(op, keeps, row)
            # A list: Dynamo of torch 2.11 adds no iterator to one.
            out += [grad for grad, keep in zip(grads, keeps) if keep]
        return out

    @staticmethod
    def _of_parameters(op: tuple[int, str], count: int, grads: Any) -> Sequence[Any]:
        _, row = parameter_grads(op[1], (None, grads))
        if row is None:
            return (None,) * count
        if len(row) != count:
            raise ParameterGradientCountError.explained(
                f"Expected op {op[0]} to generate {count} param grads, but got {len(row)}",
                where=op[1],
                remedy="Return one gradient or None per parameter, in registration order",
            )
        return row

    def _of_extra_inputs(
        self, op: tuple[int, str], keeps: Sequence[bool], grads: Any
    ) -> Sequence[Any]:
        if grads is None:
            return (None,) * len(keeps)
        row = row_of_grads(self.name, f"op {op[0]}", grads)
        if len(row) != len(keeps):
            raise ExtraInputGradientCountError.explained(
                f"Expected op {op[0]} to generate grads for "
                f"{counted(len(keeps), 'extra input')}, but got {len(row)}",
                where=self.name,
                remedy="Return one gradient or None for each of its extra inputs",
            )
        return row
