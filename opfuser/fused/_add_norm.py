"""What fusions of a residual sum and a norm share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..basic.add_extra_input import AddExtraInput
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..op import FusedOperation, OperationContext, compute_dtype

__all__ = ["BackwardAddNorm", "ForwardAddNorm"]


class ForwardAddNorm(FusedOperation):
    """Abstract. Forward of AddExtraInput, an optional MakeExtraOutput, and a norm."""

    _parts: tuple[AddExtraInput, RMSNorm | LayerNorm]

    def __init__(
        self, add: AddExtraInput, make_extra: MakeExtraOutput | None, norm: RMSNorm | LayerNorm
    ) -> None:
        super().__init__((add, norm) if make_extra is None else (add, make_extra, norm))
        self._parts = add, norm

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
        add, norm = self._parts
        (z,) = basic_op_extra_inputs[0]
        assert z is not None
        ctx = basic_op_ctxs[-1]
        shape = norm.normalized_shape
        if (
            input_.shape == z.shape
            and input_.shape[-len(shape) :] == shape
            and input_.dtype == z.dtype == compute_dtype(input_, norm)
        ):
            y, total = norm.forward_of_sum(ctx, input_, z)
        else:
            total = add.reference(input_, z)
            y = norm.op_forward(
                ctx, total, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
            )
        return y, [(), (total,), ()] if len(basic_op_ctxs) == 3 else [(), ()]


class BackwardAddNorm(FusedOperation):
    """Abstract. Backward of MakeExtraOutput and a norm."""

    _parts: tuple[MakeExtraOutput, RMSNorm | LayerNorm]

    def __init__(self, add: MakeExtraOutput, norm: RMSNorm | LayerNorm) -> None:
        super().__init__((add, norm))
        self._parts = add, norm

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
        _, norm = self._parts
        (g,) = basic_op_grad_extra_outputs[0]
        dx, grads, _ = norm.gradients(basic_op_ctxs[1], grad_output, g)
        return dx, [(), grads], [(), ()]
