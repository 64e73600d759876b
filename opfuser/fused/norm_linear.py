"""Norm and linear in both passes; the norm's output is made again instead of saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..basic._wgrad import as_rows
from ..basic.add_extra_input import AddExtraInput
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..fusion import Env, Fusion, Optional, Refusal
from ..op import FusedOperation, OperationContext
from ._linear import insist
from ._linear_part import LinearPart, refuse
from ._norm_part import NormPart, PointwiseNorm
from ._residual_sum import refused_by_norm

__all__ = ["FUSION", "NormLinear"]

Norm = RMSNorm | LayerNorm | PointwiseNorm


class NormLinear(FusedOperation):
    r"""AddExtraInput, MakeExtraOutput, RMSNorm or LayerNorm, BasicLinear and Bias.

    .. math:: s = z + x, \quad y = \mathrm{norm}(s)\, W^T + b

    Sum, tap and bias may be absent. In place of sum, tap and norm there may be a PointwiseNorm,
    which has any run of element-wise operations in place of the sum. Saves s and the norm's
    statistics, one or two per row, and what such a run saves, but not the norm's output: A elements
    less for A elements of s.

    In backward :math:`dn = dy\, W` comes first. Then the pass that makes the gradients of norm and
    residual out of dn and s also writes :math:`n = \mathrm{norm}(s)` again, at A elements of
    traffic in place of the A that reading a saved one takes, and :math:`dW = dy^T n` comes last.

    Kernel: ATen's GEMMs, and the norm kernels of opfuser; no ATen norm backward returns the output.

    Args:
        norm: the norm, or one with a run of element-wise operations and maybe the tap before it.
        linear: the linear operation.
        add: the sum with the extra input, which comes first, or None.
        make_extra: what publishes the sum, or None.
        bias: the bias after the linear operation, or None.

    Raises:
        NotSupportedError: ``linear`` exchanges data between ranks, or there is a sum or tap before
            a PointwiseNorm.
        InputError: in forward, as in the operations that it replaces.
    """

    _parts: tuple[NormPart, LinearPart]

    def __init__(
        self,
        *,
        norm: Norm,
        linear: BasicLinear,
        add: AddExtraInput | None = None,
        make_extra: MakeExtraOutput | None = None,
        bias: Bias | None = None,
    ) -> None:
        where = type(self).__name__
        if isinstance(norm, PointwiseNorm):
            insist(_run_refusal(add, make_extra), where)
            first = norm.part
        else:
            first = NormPart(add, make_extra, norm)
        second = LinearPart(linear, bias, where)
        super().__init__((*first.ops, *second.ops))
        self._parts = first, second

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        norm, linear = self._parts
        n = len(norm.ops)
        y, extra_outputs = norm.forward(basic_op_ctxs[:n], input_, basic_op_extra_inputs)
        # Placed by hand, the norm may owe no gradient: then backward makes nothing again.
        save_input = not norm.wants_grad(basic_op_ctxs[:n])
        y = linear.forward(basic_op_ctxs[n:], y, save_input=save_input)
        return y, [*extra_outputs, *[()] * len(linear.ops)]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]],
    ) -> tuple[
        Tensor | None,
        Sequence[Sequence[Tensor | None] | None],
        Sequence[Sequence[Tensor | None] | None],
    ]:
        norm, linear = self._parts
        n = len(norm.ops)
        first, second = basic_op_ctxs[:n], basic_op_ctxs[n:]
        dy = as_rows(grad_output)  # once for two GEMMs, and for the norm between them
        grads = norm.backward(
            first,
            linear.input_grad(second, dy) if norm.wants_grad(first) else None,
            basic_op_grad_extra_outputs,
            want_y=linear.wants_input(second),
        )
        own = linear.parameter_grads(second, dy, grads.output)
        extra_inputs = [*grads.extra_inputs, *[()] * len(own)]
        return grads.input, [*grads.parameters, *own], extra_inputs


def _run_refusal(add: AddExtraInput | None, make_extra: MakeExtraOutput | None) -> Refusal | None:
    """Why a PointwiseNorm does not go with what stands before it."""
    if add is not None or make_extra is not None:
        return Refusal("LAYOUT", "the run before the norm is not the first of the operations")
    return None


def _refuses(
    add: AddExtraInput | None,
    make_extra: MakeExtraOutput | None,
    norm: Norm,
    linear: BasicLinear,
    bias: Bias | None,
    *,
    env: Env,
) -> Refusal | None:
    if isinstance(norm, PointwiseNorm):
        if not norm.planned:
            return Refusal("LAYOUT", "PointwiseNorm was placed by hand, and runs on its own")
        no = _run_refusal(add, make_extra)
        if no is not None:
            return no
    return refused_by_norm(add, env) or refuse([linear], env)


FUSION = Fusion(
    name="norm_linear",
    stage="joint",
    pattern=(
        Optional(AddExtraInput),
        Optional(MakeExtraOutput),
        (RMSNorm, LayerNorm, PointwiseNorm),
        BasicLinear,
        Optional(Bias),
    ),
    refuses=_refuses,
    build=lambda add, make_extra, norm, linear, bias: NormLinear(
        add=add, make_extra=make_extra, norm=norm, linear=linear, bias=bias
    ),
)
