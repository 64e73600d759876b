"""A norm as the first part of a joint fusion that makes its output again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..basic._norms import as_rows, as_vector
from ..basic.add_extra_input import AddExtraInput
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..fusion import Env, Refusal
from ..kernels.norm import layer_norm_forward, rms_norm_forward
from ..op import OperationContext
from ._add_norm import ForwardAddNorm

__all__ = ["NormGrads", "NormPart", "sum_refusal"]

Contexts = list[OperationContext]
Extras = Sequence[Sequence[Tensor | None]]
Gradients = tuple[Tensor | None, ...]


def sum_refusal(add: AddExtraInput | None, env: Env) -> Refusal | None:
    """Why the sum is better left to the operation before it."""
    if add is not None and env.device.type == "cpu":
        # Sum and norm take as many passes together as apart, which a sum inside the GEMM does not.
        return Refusal("DEVICE", "on a CPU the GEMM before it adds the residual, not the norm")
    return None


class NormGrads(NamedTuple):
    """Gradients of the operations of a NormPart, and the norm's output again if it was wanted."""

    input: Tensor | None
    parameters: list[Gradients]
    extra_inputs: list[Gradients]
    output: Tensor | None


class NormPart:
    """A norm, and before it the sum with a residual and the tap of that sum, where they are.

    Saves what the norm saves, the sum among it, and not the norm's output. Methods take the
    contexts of these operations, in forward order.
    """

    def __init__(
        self,
        add: AddExtraInput | None,
        make_extra: MakeExtraOutput | None,
        norm: RMSNorm | LayerNorm,
    ) -> None:
        self.ops = tuple(op for op in (add, make_extra, norm) if op is not None)
        self.norm = norm
        self._tap = None if make_extra is None else len(self.ops) - 2
        self._after_sum = None if add is None else ForwardAddNorm(add, make_extra, norm)

    def forward(self, ctxs: Contexts, x: Tensor, extra_inputs: Extras) -> tuple[Tensor, Extras]:
        """The norm's output, and the extra outputs."""
        if self._after_sum is not None:
            return self._after_sum.fuser_forward(
                ctxs,
                x,
                basic_op_extra_inputs=extra_inputs,
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                basic_op_kwargs=[{}] * len(ctxs),
            )
        y = self.norm.op_forward(
            ctxs[-1], x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
        )
        return y, [()] if self._tap is None else [(x,), ()]

    def again(self, ctxs: Contexts) -> Tensor:
        """In backward, the norm's output."""
        ctx, norm = ctxs[-1], self.norm
        x: Tensor = ctx.saved_tensors[0]
        weight, bias = _parameters(ctx)
        rows, centred = as_rows(x, norm._cols), norm.zero_centered_gamma
        if isinstance(norm, RMSNorm):
            y: Tensor = rms_norm_forward(rows, weight, norm.eps, centred)[0]
        else:
            y = layer_norm_forward(rows, weight, bias, norm.eps, centred)[0]
        return y if rows is x else y.view_as(x)

    def wants_grad(self, ctxs: Contexts) -> bool:
        """Whether the gradient of the output is read."""
        needs = ctxs[-1].needs
        return needs.input or True in needs.parameters

    def backward(
        self, ctxs: Contexts, dy: Tensor | None, grad_extra_outputs: Extras, *, want_y: bool
    ) -> NormGrads:
        """One pass for all gradients, that of the tap added, and if wanted for the output again.

        Args:
            ctxs: contexts.
            dy: gradient of the output, its dimensions but the last maybe flattened to one; None
                where :meth:`wants_grad` says that it is not read, and nothing is made.
            grad_extra_outputs: gradients of the extra outputs, of which the tap's is one.
            want_y: whether to make the output again, in the shape of dy.
        """
        dx = y = None
        own: Gradients = (None,) * len(ctxs[-1].needs.parameters)
        if dy is not None:
            g = None if self._tap is None else grad_extra_outputs[self._tap][0]
            dx, own, y = self.norm.gradients(ctxs[-1], dy, g, want_y)
            x = ctxs[-1].saved_tensors[0]
            if dx is not None and dx.shape != x.shape:
                dx = dx.view_as(x)
        before: list[Gradients] = [()] * (len(self.ops) - 1)
        extra_inputs = [() if self._after_sum is None else (dx,), *before]
        return NormGrads(dx, [*before, own], extra_inputs, y)


def _parameters(ctx: OperationContext) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a norm as forward saw them, in one dimension."""
    parameters = ctx.parameters
    bias = as_vector(parameters[1]) if len(parameters) > 1 else None
    return as_vector(parameters[0]), bias
