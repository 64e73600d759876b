"""Normalization to unit length."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, NotSupportedError
from ..kernels.norm import norm_backward, norm_forward
from ..kernels.scalar import wide_dtype
from ..op import BasicOperation, Dtypes, OperationContext, OperationGrads, in_compute_dtype
from ._norms import check_eps, side_by_side


class L2Normalization(BasicOperation):
    r"""Scales vectors along the last dimension to unit length: :math:`y = x / \sqrt{\sum x^2 + ε}`.

    Used to normalize the queries and keys of attention. Shapes: x and y ``(…, D)``. Arithmetic is
    in fp32 (fp64 for an fp64 input); the output has the compute dtype (autocast's, else the
    input's). Saved: the input, and ``1 / sqrt(Σ x² + eps)`` of shape ``(…)`` in fp32 (or fp64).

    For A elements, forward moves 2A and backward 3A on a GPU. Kernels: ours, as ATen's weight
    normalization has no eps; on a CPU its backward.

    Args:
        eps: added to the squared length.
        seq_length: must be None.
        micro_batch_size: must be None.

    Raises:
        ArgumentError: if ``eps`` is negative or not finite.
        ArgumentTypeError: if ``eps`` is not a number.
        InputError: in forward, if x has no dimension, or is not fp16, bf16, fp32 or fp64.
        NotSupportedError: if ``seq_length`` or ``micro_batch_size`` is given; in te.ops, these
            prepare kernels for one shape.
    """

    kernels = ("Triton norm",)

    class Saved(NamedTuple):
        input: Tensor
        rnorm: Tensor

    class Settings(NamedTuple):
        eps: float

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if seq_length is not None or micro_batch_size is not None:
            raise NotSupportedError.explained(
                "No kernel is compiled ahead for a shape, all shapes are served alike",
                where="L2Normalization",
                received=f"seq_length={seq_length}, micro_batch_size={micro_batch_size}",
                remedy="Leave both out",
            )
        self.eps = eps
        self.make_settings()

    def make_settings(self) -> L2Normalization.Settings:
        check_eps(self.eps, "L2Normalization")
        return self.Settings(self.eps)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.compute

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        if not input_.dim():
            raise InputError.explained(
                "The input must have a dimension to normalize along",
                where="L2Normalization",
                received="a tensor of shape ()",
            )
        x = in_compute_dtype(input_, self)
        (eps,) = self.frozen_settings(ctx)
        y, _, _, rnorm = norm_forward(side_by_side(x), None, None, None, eps, False, False)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(x, rnorm))
        return y

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        if not ctx.needs.input:
            return None, ()
        x, rnorm = ctx.saved_tensors
        (eps,) = self.frozen_settings(ctx)
        dx, *_ = norm_backward(
            side_by_side(grad_output), side_by_side(x), None, None, None, rnorm, None,
            eps, False, True, False, False,
        )  # fmt: skip
        return dx, ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        wide = input_.to(wide_dtype(input_.dtype))
        squares = wide.square().sum(-1, keepdim=True)
        return (wide * torch.rsqrt(squares + self.eps)).to(input_.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
