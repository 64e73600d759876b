"""A linear operation as a part of a joint fusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ... import gemm
from ...basic.add_extra_input import AddExtraInput
from ...basic.bias import bias_grad
from ...core.buffer_reuse import only_reference
from ...core.context import Contexts, Extras
from ...core.fusion import Env, Refusal
from ...kernels.scalar import cast
from ...quantization.quantizers import Quantizer
from .._linear import AnyBias, AnyLinear, backward_refusal, forward_refusal, insist, linear_sum
from .part import Gradients, Part, PartGrads, Wanted


def refuse(linears: Sequence[AnyLinear], env: Env) -> Refusal | None:
    """The refusal where nothing would be saved, or where ranks exchange data around a GEMM."""
    if not any(env.needs_backward):
        return Refusal("NO_GRAD", "no gradient is needed, so that nothing is saved")
    for linear in linears:
        no = forward_refusal(linear) or backward_refusal(linear)
        if no is not None:
            return no
    return None


class LinearPart(Part):
    """A linear operation with an optional bias and an optional residual sum behind it.

    Saves the weight, and its input unless the part before recomputes it.

    Args:
        add: the sum with an extra input, which comes last in the fused operation, or None.

    Raises:
        NotSupportedError: ``linear`` exchanges data between ranks.
    """

    parameters_apart: ClassVar[bool] = True
    # Whether ranks exchange data around its GEMMs.
    communicates: ClassVar[bool] = False

    def __init__(
        self,
        linear: AnyLinear,
        bias: AnyBias | None,
        where: str,
        *,
        add: AddExtraInput | None = None,
    ) -> None:
        if not self.communicates:
            insist(forward_refusal(linear) or backward_refusal(linear), where)
        self.ops = tuple(op for op in (linear, bias, add) if op is not None)
        self.linear, self.bias, self.add = linear, bias, add

    def forward(
        self, ctxs: Contexts, x: Any, extras: Extras, save_input: bool, quantizer: Quantizer | None
    ) -> tuple[Tensor, Extras]:
        """``x Wᵀ + b``, plus the extra input if there is a sum.

        The extra input is overwritten if ``extras`` has the only reference to it.
        """
        ctx = ctxs[0]
        x, w = self.linear.operands(ctx, x, save=False)
        b = None if self.bias is None else self.bias.operand(x, w)
        if ctx.requires_grad:
            reads_input = save_input and (self.recomputed or True in ctx.needs.parameters)
            ctx.save_for_backward(x if reads_input else None, *gemm.tensors_of(w))
            if self.recomputed and self.bias is not None:
                ctxs[1].save_for_backward(b)
        nothing = [()] * len(self.ops)
        if self.add is None:
            return gemm.forward(x, w, b), nothing
        ours = only_reference(extras[-1])
        (z,) = extras[-1]
        assert z is not None
        return linear_sum(self.add, z, x, w, b, in_place=ours), nothing

    def recompute(self, ctxs: Contexts, x: Tensor | None) -> Tensor:
        saved, first = ctxs[0].saved_tensors[:2]
        b = None if self.bias is None else ctxs[1].saved_tensors[0]
        x = saved if x is None else cast(x, first.dtype)
        return gemm.forward(x, self.linear.saved_weight(ctxs[0], again=True), b)

    def backward(
        self, ctxs: Contexts, dy: Any, x: Tensor | None, grad_extras: Extras, wanted: Wanted
    ) -> PartGrads:
        dx = self._input_grad(ctxs, dy) if ctxs[0].needs.input else None
        extra_inputs: list[Gradients] = [()] * len(self.ops)
        if self.add is not None:
            extra_inputs[-1] = (dy,)
        return PartGrads(dx, [], extra_inputs)

    def _input_grad(self, ctxs: Contexts, dy: Any) -> Tensor:
        return gemm.dgrad(dy, self.linear.saved_weight(ctxs[0]))

    def wants_input(self, ctxs: Contexts) -> bool:
        return True in ctxs[0].needs.parameters

    def parameter_grads(self, ctxs: Contexts, dy: Any, x: Any) -> list[Gradients]:
        ctx, dy = ctxs[0], gemm.as_rows(dy)  # once for all of them
        dws: Gradients = (None,) * len(ctx.needs.parameters)
        if True in ctx.needs.parameters:
            saved, w = ctx.saved_tensors[:2]
            dws = self.linear.weight_grads(dy, cast(saved if x is None else x, w.dtype), ctx)
        own: list[Gradients] = [dws]
        if self.bias is not None:
            needs = ctxs[1].needs.parameters
            if True in needs:
                own.append(self.bias.gradients(bias_grad(dy), needs))
            else:
                own.append((None,) * len(needs))
        return own if self.add is None else [*own, ()]
