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
from ..kernels.norm import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
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
        rows, centred = as_rows(x, weight.shape[0]), norm.zero_centered_gamma
        if isinstance(norm, RMSNorm):
            y: Tensor = rms_norm_forward(rows, weight, norm.eps, centred)[0]
        else:
            y = layer_norm_forward(rows, weight, bias, norm.eps, centred)[0]
        return y.view(x.shape)

    def wants_grad(self, ctxs: Contexts) -> bool:
        """Whether the gradient of the output is read."""
        needs = ctxs[-1].needs
        return needs.input or any(needs.parameters)

    def backward(
        self, ctxs: Contexts, dy: Tensor | None, grad_extra_outputs: Extras, *, want_y: bool
    ) -> NormGrads:
        """One pass for all gradients, that of the tap added, and if wanted for the output again.

        Args:
            ctxs: contexts.
            dy: gradient of the output; None where :meth:`wants_grad` says that it is not read,
                and nothing is made.
            grad_extra_outputs: gradients of the extra outputs, of which the tap's is one.
            want_y: whether to make the output again.
        """
        dx = y = None
        own: Gradients = (None,) * len(ctxs[-1].needs.parameters)
        if dy is not None:
            g = None if self._tap is None else grad_extra_outputs[self._tap][0]
            dx, own, y = self._gradients(ctxs[-1], dy, g, want_y)
        none: list[Gradients] = [() for _ in self.ops]
        extra_inputs = none if self._after_sum is None else [(dx,), *none[1:]]
        return NormGrads(dx, [*none[1:], own], extra_inputs, y)

    def _gradients(
        self, ctx: OperationContext, dy: Tensor, g: Tensor | None, want_y: bool
    ) -> tuple[Tensor | None, Gradients, Tensor | None]:
        norm, needs = self.norm, ctx.needs
        x, *statistics = ctx.saved_tensors
        weight, bias = _parameters(ctx)
        cols = weight.shape[0]
        tensors = as_rows(dy, cols), as_rows(x, cols), weight
        rest = *(s.view(-1) for s in statistics), None if g is None else as_rows(g, cols)
        want_dw = any(needs.parameters)
        options = norm.zero_centered_gamma, needs.input, want_dw, want_y
        if isinstance(norm, RMSNorm):
            results = iter(rms_norm_backward(*tensors, *rest, *options))
        else:
            results = iter(layer_norm_backward(*tensors, bias, *rest, norm.eps, *options))
        dx = next(results).view(dy.shape) if needs.input else None
        own: Gradients = (None,) * len(needs.parameters)
        if want_dw:
            made = [next(results).view(p.shape) for p in ctx.parameters]
            own = tuple(grad if need else None for grad, need in zip(made, needs.parameters))
        return dx, own, next(results).view(dy.shape) if want_y else None


def _parameters(ctx: OperationContext) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a norm as forward saw them, in one dimension."""
    weight, *bias = map(as_vector, ctx.parameters)
    return weight, bias[0] if bias else None
