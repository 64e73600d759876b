"""What fusions with a linear operation share: operands, saved state, GEMMs, refusals."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..basic._distributed import gather_first_dim
from ..basic._wgrad import as_rows
from ..basic.basic_linear import BasicLinear, linear_dgrad
from ..basic.bias import Bias
from ..context import COMPUTE_DTYPES, autocast_dtype, refuse_dtype
from ..errors import NotSupportedError, explain
from ..fusion import Refusal
from ..kernels.scalar import cast
from ..op import OperationContext

__all__ = [
    "add_dgrad",
    "add_linear",
    "backward_refusal",
    "bias_operand",
    "communication",
    "forward_refusal",
    "insist",
    "linear_operands",
]


def communication(linear: BasicLinear, step: str) -> Refusal:
    """The refusal of a linear operation whose ranks exchange data at ``step``."""
    sharding = linear.sharding
    parallel = "sequence-" if sharding.sequence_parallel else "tensor-"
    return Refusal(
        "COMMUNICATION",
        f"{parallel}parallel BasicLinear in {sharding.mode} mode communicates {step}",
    )


def forward_refusal(linear: BasicLinear) -> Refusal | None:
    """Why nothing can be added in the forward GEMM of ``linear``: it is reduced afterwards."""
    if linear.sharding.mode == "row":
        return communication(linear, "right after its forward GEMM")
    return None


def backward_refusal(linear: BasicLinear) -> Refusal | None:
    """Why the gradient GEMMs of ``linear`` are not all there is to its backward."""
    if linear.sharding.mode == "column":
        return communication(linear, "right after its input-gradient GEMM")
    if linear.sharding.scatters_output:
        return communication(linear, "before its gradient GEMMs")
    return None


def insist(refusal: Refusal | None, where: str) -> None:
    """Raises NotSupportedError with ``refusal``, for a fused operation constructed by hand."""
    if refusal is not None:
        raise NotSupportedError(
            explain(
                refusal.detail,
                where=where,
                remedy="Leave the operations separate, and they fuse where that is possible",
            )
        )


def linear_operands(
    linear: BasicLinear, ctx: OperationContext, input_: Tensor, *, save: bool = True
) -> tuple[Tensor, Tensor]:
    """Input and weight as the forward GEMM takes them.

    Args:
        linear: the linear operation.
        ctx: its context.
        input_: its input.
        save: whether to save what its backward reads.

    Raises:
        ArgumentError: the weight was cleared.
        InputError: the last dimension of the input is not the local ``in_features``, or its dtype
            is not one that linear operations take.
    """
    sharding = linear.sharding
    x: Tensor = input_
    w: Tensor | None = linear._parameters.get("weight")
    if w is None:
        w = linear._weight_not_registered()
    if not x.dim() or x.shape[-1] != sharding.local_in_features:
        linear._refuse_input(x)
    dtype = autocast_dtype(x.device) or w.dtype
    if any(linear.frozen_settings(ctx)):
        linear._keep_weight(ctx, w)
    if x.dtype != dtype:
        if x.dtype not in COMPUTE_DTYPES:
            refuse_dtype(x, linear)
        x = x.to(dtype)
    if w.dtype != dtype:
        w = w.to(dtype)
    if save and ctx.requires_grad:
        needs = ctx.needs
        ctx.save_for_backward(x if needs.parameters[0] else None, w if needs.input else None)
    if sharding.gathers_input:
        x = gather_first_dim(x, sharding.group)
    return x, w


def bias_operand(bias: Bias | None, x: Tensor, weight: Tensor) -> Tensor | None:
    """The bias in the dtype of the GEMM; None where it is absent or cleared.

    Raises:
        InputError: the bias is not as long as the rows of the output.
    """
    if bias is None:
        return None
    b = bias._parameters.get("bias")  # without the 0.5 us of nn.Module.__getattr__
    if b is None:
        b = bias.bias  # parametrised, or cleared
    if b is None:
        return None
    if b.shape[0] != weight.shape[0]:
        bias._refuse_input(x.new_empty((*x.shape[:-1], weight.shape[0]), device="meta"))
    return b if b.dtype == weight.dtype else b.to(weight.dtype)


def add_linear(
    extra: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    alpha: float = 1.0,
    in_place: bool = False,
) -> Tensor:
    """``extra + alpha x Wᵀ + b`` for operands of one dtype, extra of the shape of the output.

    Args:
        extra: what is added.
        x: input, (..., in).
        weight: (out, in).
        bias: (out,), or None.
        alpha: a factor, where there is no bias.
        in_place: ``extra`` may be written to. Else the GEMM starts from a copy of it.
    """
    in_place = in_place and extra.is_contiguous()
    if bias is not None and not extra.is_cpu:
        # The GEMM's epilogue adds the bias for nothing: on an H200 395 us for (8192, 4096) times
        # (4096, 4096) in bf16 and a sum, where a GEMM that starts from extra + b takes 464.
        y = nn.functional.linear(x, weight, bias)
        return extra.add_(y) if in_place else y.add_(extra)
    if in_place:
        # On that H200 352 us, where the GEMM alone takes 348, and 384 if extra has to be copied.
        rows = as_rows(extra)
        (rows if bias is None else rows.add_(bias)).addmm_(as_rows(x), weight.t(), alpha=alpha)
        return extra
    if bias is None:
        y = torch.addmm(as_rows(extra), as_rows(x), weight.t(), alpha=alpha)
    else:
        y = (as_rows(extra) + bias).addmm_(as_rows(x), weight.t(), alpha=alpha)
    return y if extra.dim() == 2 else y.view(extra.shape)


def add_dgrad(grad: Tensor | None, dy: Tensor, weight: Tensor, *, in_place: bool = False) -> Tensor:
    """``grad + dy W``, where None counts as zero.

    Args:
        grad: gradient of the input from elsewhere.
        dy: gradient of the output.
        weight: (out, in).
        in_place: ``grad`` may be written to. Else the GEMM starts from a copy of it.
    """
    if grad is None:
        return linear_dgrad(dy, weight)
    if grad.dtype != weight.dtype:
        return linear_dgrad(dy, weight) + grad
    rows = as_rows(cast(dy, weight.dtype))
    if in_place and grad.is_contiguous():
        as_rows(grad).addmm_(rows, weight)
        return grad
    dx = torch.addmm(as_rows(grad), rows, weight)
    return dx if grad.dim() == 2 else dx.view(grad.shape)
