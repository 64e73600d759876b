"""Linear operation and cross entropy in chunks of rows; forward computes the gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..basic._weight_grad import Computed
from ..basic.basic_linear import BasicLinear
from ..basic.cross_entropy import CrossEntropy
from ..core.buffer_reuse import only_reference
from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..core.fusion import Env, Fusion, Refusal
from ..distributed.collectives import reduce_input_grad
from ..kernels.cross_entropy import scaled
from ..op import FusedOperation
from ._linear import backward_refusal, forward_refusal, insist
from ._loss_chunks import Head, losses_and_gradients


class LinearCrossEntropy(FusedOperation):
    r"""Mean or sum of the cross entropy of :math:`x W^T` with class indices, and its gradients.

    The logits (T, V) exist for one chunk of rows at a time: forward computes the chunk's loss,
    overwrites its logits by their gradient, and accumulates the contributions to dx and dW before
    the next chunk. So forward computes the gradients that are needed, for a loss gradient of 1.
    Backward multiplies them by the incoming gradient: without synchronisation with a GPU, and
    without traffic if it is 1 and nothing else refers to them. If gradients are enabled but never
    asked for, the two gradient GEMMs are wasted.

    At T = 8192, V = 128256 and d = 4096 in bf16 the logits and their gradient take 525 MB instead
    of 4.2 GB in bf16, or 12 GB with fp32 copies.

    dx has the dtype in which the linear operation computes. dW is accumulated in fp32 if the weight
    is fp32 (as under autocast) or if it goes to ``main_grad``; for a bf16 weight in bf16 over up to
    4 chunks. With fp16 weights, backward divides the gradients by the number of rows when it
    multiplies them by the incoming gradient, which a gradient scaler has enlarged: divided in
    forward, they would underflow.

    dW is computed before the gradient that scales it, so that no GEMM can accumulate into
    ``weight.grad``: with ``accumulate_into_grad``, autograd adds it as usual.

    Where the classes are divided among ranks (a linear operation in mode "vocabulary", and a loss
    with ``tensor_parallel`` over the same group), a rank has the logits of a chunk of rows and of
    its classes. The ranks exchange 4 numbers per row, a collective for each chunk, and dx, as the
    linear operation alone.

    Saves dx, dW, and with fp16 the number of rows that count; not x, W or logits.

    Kernels: ATen's GEMMs; opfuser's cross entropy, as ATen's does not work in place. The idea:
    Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009; Hsu et
    al., "Liger Kernel", arXiv:2410.10989.

    Args:
        linear: the linear operation.
        loss: the loss; its reduction is "mean" or "sum".

    Raises:
        NotSupportedError: ``linear`` exchanges data between ranks, other than those of the loss; or
            the loss is not reduced.
    """

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
        terms, reduction = loss.frozen_settings(basic_op_ctxs[1])
        insist(_reduction_refusal(reduction), type(self).__name__)  # it may be set during a call
        x, w = linear.operands(ctx, input_, save=False)
        loss.check_inputs(torch.Size((*x.shape[:-1], w.shape[0])), x.dtype, targets)
        flat = targets.reshape(-1)
        count = (flat != terms.ignore_index).sum() if reduction == "mean" else None
        wants_dx = ctx.requires_grad and ctx.needs.input
        wants_dw = ctx.requires_grad and ctx.needs.parameters[0]
        later = x.dtype == torch.float16  # backward divides by the count
        dtype = linear.weight_grad_dtype(ctx, w)
        divisor = None if later else count
        wanted = dtype if wants_dw else None
        head = Head(x, w, flat, divisor, terms, wants_dx, wanted, loss.vocabulary)
        losses, dx, dw = losses_and_gradients(head)
        if dx is not None and loss.vocabulary is not None:
            dx = reduce_input_grad(dx, linear.sharding)
        if ctx.requires_grad:
            if dw is not None and not later:
                dw = dw.to(dtype)
            ctx.weight_grad_dtype = dtype
            ctx.save_for_backward(dx, dw, count if later else None)
        total = losses.sum()
        return total if count is None else total / count, [(), ()]

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        # A second backward may read the saved tensors, and saved-tensor hooks may refer to them.
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
    no = _reduction_refusal(loss.reduction) or forward_refusal(linear)
    if no is not None or _same_classes(linear, loss):
        return no
    return backward_refusal(linear)


def _same_classes(linear: BasicLinear, loss: CrossEntropy) -> bool:
    """Whether both have the same slice of the classes."""
    own, sharding = loss.vocabulary, linear.sharding
    if own is None or sharding.mode != "column":
        return False
    slices = (linear.out_features, sharding.local_out_features) == (own.classes, own.rows)
    return slices and sharding.group is own.group


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
