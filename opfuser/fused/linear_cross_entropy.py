"""Linear transformation and cross entropy, chunk by chunk of the rows, gradients in forward."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..basic._weight_grad import Computed
from ..basic.basic_linear import BasicLinear
from ..basic.cross_entropy import CrossEntropy
from ..buffer_reuse import only_reference
from ..context import BackwardResult, Contexts, ExtraTensors, ForwardArguments, ForwardResult
from ..fusion import Env, Fusion, Refusal
from ..kernels.cross_entropy import scaled
from ..op import FusedOperation
from ._linear import backward_refusal, forward_refusal, insist
from ._loss_chunks import Head, losses_and_gradients

__all__ = ["FUSION", "LinearCrossEntropy"]


class LinearCrossEntropy(FusedOperation):
    r"""Mean or sum of the cross entropy of :math:`x W^T` with class indices, and its gradients.

    Of the logits (T, V) there is never more than a chunk of rows: its loss, the gradient in the
    place of the logits, and what that adds to dx and dW follow before the next one. So forward
    computes both gradients, as far as needed, for a gradient of 1 of the loss; backward multiplies
    them by the one that arrives, without traffic if it is 1 and nobody else can see them, and
    without waiting for a GPU. Where gradients are enabled and none is asked for, the two gradient
    GEMMs are wasted.

    At T = 8192, V = 128256 and d = 4096 in bf16 the logits and their gradient take 525 MB in place
    of 4.2 GB in bf16, or 12 GB with fp32 copies.

    dx has the dtype that the linear operation computes in. dW is summed in fp32 if the weight is
    fp32 (under autocast, say) or ``main_grad`` takes it; for a bf16 weight in bf16 over up to 4
    chunks. With fp16 weights the gradients are divided by the number of rows in backward, together
    with the gradient that arrives, which a gradient scaler made large: before, fp16 does not hold
    them.

    dW is there before the gradient that scales it, so that no GEMM can add to ``weight.grad``: with
    ``accumulate_into_grad`` autograd adds it as always.

    Saves dx, dW, and with fp16 the number of rows that count; not x, W or logits.

    Kernels: ATen's GEMMs; opfuser's cross entropy, which ATen has not in place. The idea: Wijmans
    et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009; Hsu et al.,
    "Liger Kernel", arXiv:2410.10989.

    Args:
        linear: the linear operation.
        loss: the loss; its reduction is "mean" or "sum".

    Raises:
        NotSupportedError: ``linear`` exchanges data between ranks, or the loss is not reduced.
    """

    _parts: tuple[BasicLinear, CrossEntropy]

    def __init__(self, *, linear: BasicLinear, loss: CrossEntropy) -> None:
        insist(_unfit(linear, loss), type(self).__name__)
        super().__init__((linear, loss))
        self._parts = linear, loss

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        linear, loss = self._parts
        ctx, targets = basic_op_ctxs[0], given["basic_op_extra_inputs"][1][0]
        assert targets is not None
        loss.refuse_keywords(given["basic_op_kwargs"][1])
        terms, reduction = loss.frozen_settings(basic_op_ctxs[1])
        insist(_reduction_refusal(reduction), type(self).__name__)  # it may be set during a call
        x, w = linear.operands(ctx, input_, save=False)
        loss.check_inputs(torch.Size((*x.shape[:-1], w.shape[0])), x.dtype, targets)
        flat = targets.reshape(-1)
        count = (flat != terms.ignore_index).sum() if reduction == "mean" else None
        wants_dx = ctx.requires_grad and ctx.needs.input
        wants_dw = ctx.requires_grad and ctx.needs.parameters[0]
        later = x.dtype == torch.float16  # when gradients are divided by the count
        dtype = linear.weight_grad_dtype(ctx, w)
        divisor = None if later else count
        head = Head(x, w, flat, divisor, terms, wants_dx, dtype if wants_dw else None)
        losses, dx, dw = losses_and_gradients(head)
        if ctx.requires_grad:
            if dw is not None and not later:
                dw = dw.to(dtype)
            ctx.weight_grad_dtype = dtype
            ctx.save_for_backward(dx, dw, count if later else None)
        total = losses.sum()
        return total if count is None else total / count, [(), ()]

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        # A second backward may want what is saved, and whoever packed it may hold it too.
        ours = [only_reference(ctx.saved_tensors, n) for n in range(2)]
        dx, dw, count = ctx.saved_tensors
        if dx is not None:
            dx = scaled(dx, grad_output, count, dx.dtype, in_place=ours[0])
        if dw is not None:
            dw = scaled(dw, grad_output, count, ctx.weight_grad_dtype, in_place=ours[1])
            dw = self._parts[0].hand_over(Computed(dw), ctx)
        return dx, [(dw,), ()], [(), (None,)]


def _reduction_refusal(reduction: str) -> Refusal | None:
    if reduction == "none":
        return Refusal(
            "SHAPE", 'with reduction="none" each row has a gradient that arrives in backward'
        )
    return None


def _unfit(linear: BasicLinear, loss: CrossEntropy) -> Refusal | None:
    return _reduction_refusal(loss.reduction) or forward_refusal(linear) or backward_refusal(linear)


def _refuses(linear: BasicLinear, loss: CrossEntropy, *, env: Env) -> Refusal | None:
    if not any(env.needs_backward):
        return Refusal("NO_GRAD", "no gradient is needed, and forward would make them")
    return _unfit(linear, loss)


FUSION = Fusion(
    name="linear_cross_entropy",
    stage="joint",
    pattern=(BasicLinear, CrossEntropy),
    refuses=_refuses,
    build=lambda linear, loss: LinearCrossEntropy(linear=linear, loss=loss),
)
