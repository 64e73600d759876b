"""A linear operation as a part of a joint fusion that makes its input again in backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..basic.add_extra_input import AddExtraInput
from ..basic.basic_linear import BasicLinear, linear_dgrad
from ..basic.bias import Bias, bias_grad
from ..buffer_reuse import only_reference
from ..fusion import Env, Refusal
from ..kernels.scalar import cast
from ..op import OperationContext
from ._linear import (
    add_linear,
    backward_refusal,
    bias_operand,
    forward_refusal,
    insist,
    linear_operands,
)

__all__ = ["LinearPart", "refuse"]

Contexts = list[OperationContext]


def refuse(linears: Sequence[BasicLinear], env: Env) -> Refusal | None:
    """Why nothing is saved in any case, or a linear operation is more than its GEMMs."""
    if not any(env.needs_backward):
        return Refusal("NO_GRAD", "no gradient is needed, so that nothing is saved")
    for linear in linears:
        no = forward_refusal(linear) or backward_refusal(linear)
        if no is not None:
            return no
    return None


class LinearPart:
    """A linear operation, and after it its bias and the sum with a residual, where they are.

    Saves the weight, and by default not its input: whoever makes that again hands it to backward.
    Methods take the contexts of these operations, in forward order.

    Args:
        linear: the linear operation.
        bias: the bias, or None.
        where: names the fused operation in errors.
        add: the sum with an extra input, which comes last, or None.
        keep_bias: whether :meth:`again` will be called.

    Raises:
        NotSupportedError: ``linear`` exchanges data between ranks.
    """

    def __init__(
        self,
        linear: BasicLinear,
        bias: Bias | None,
        where: str,
        *,
        add: AddExtraInput | None = None,
        keep_bias: bool = False,
    ) -> None:
        insist(forward_refusal(linear) or backward_refusal(linear), where)
        self.ops = tuple(op for op in (linear, bias, add) if op is not None)
        self.linear, self.bias, self.add = linear, bias, add
        self._keep_bias = keep_bias and bias is not None

    def forward(
        self,
        ctxs: Contexts,
        x: Tensor,
        extra_inputs: Sequence[Tensor | None] = (),
        *,
        save_input: bool = False,
    ) -> Tensor:
        """``x Wᵀ + b``, and the one extra input added to it where there is a sum.

        That is written to where nobody but ``extra_inputs`` refers to it.
        """
        ctx = ctxs[0]
        x, w = linear_operands(self.linear, ctx, x, save=False)
        b = bias_operand(self.bias, x, w)
        if ctx.requires_grad:
            ctx.save_for_backward(x if save_input else None, w)
            if self._keep_bias:
                ctxs[1].save_for_backward(b)
        if self.add is None:
            return nn.functional.linear(x, w, b)
        ours = only_reference(extra_inputs)
        (z,) = extra_inputs
        assert z is not None
        if z.dtype == w.dtype and z.shape == (*x.shape[:-1], w.shape[0]):
            return add_linear(z, x, w, b, in_place=ours)
        return self.add.reference(nn.functional.linear(x, w, b), z)

    def again(self, ctxs: Contexts, x: Tensor) -> Tensor:
        """In backward, what forward returned."""
        _, w = ctxs[0].saved_tensors
        b = ctxs[1].saved_tensors[0] if self._keep_bias else None
        return nn.functional.linear(cast(x, w.dtype), w, b)

    def saved_input(self, ctxs: Contexts) -> Tensor:
        """In backward, the input, which forward was told to save."""
        x: Tensor = ctxs[0].saved_tensors[0]
        return x

    def input_grad(self, ctxs: Contexts, dy: Tensor) -> Tensor:
        """``dy W``."""
        return linear_dgrad(dy, ctxs[0].saved_tensors[1])

    def wants_input(self, ctxs: Contexts) -> bool:
        """Whether backward reads the input."""
        return ctxs[0].needs.parameters[0]

    def parameter_grads(
        self, ctxs: Contexts, dy: Tensor, x: Tensor | None
    ) -> list[tuple[Tensor | None, ...]]:
        """Gradients of weight and bias, and none for the sum.

        Args:
            ctxs: contexts.
            dy: gradient of the output.
            x: input of forward; None where it was saved, or is not read.
        """
        ctx, dw = ctxs[0], None
        if ctx.needs.parameters[0]:
            saved, w = ctx.saved_tensors
            dw = self.linear.weight_grad(dy, cast(saved if x is None else x, w.dtype), ctx)
        own: list[tuple[Tensor | None, ...]] = [(dw,)]
        if self.bias is not None:
            own.append(tuple(bias_grad(dy) if need else None for need in ctxs[1].needs.parameters))
        return own if self.add is None else [*own, ()]
