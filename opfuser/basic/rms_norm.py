"""Root-mean-square normalisation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.scalar import cast, wide_dtype
from ..op import BasicOperation, OperationContext, compute_dtype
from ._dtypes import check_parameter_dtype
from ._norms import canonical_shape, check_eps, refuse_input, refuse_sm_margin

__all__ = ["RMSNorm"]


class RMSNorm(BasicOperation):
    r"""Root-mean-square normalisation over the last dimensions.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} w

    Shapes: x and y ``(*rows, *normalized_shape)``, w ``normalized_shape``. Statistics and
    arithmetic are in fp32 (fp64 for an fp64 input), whatever the dtype of the parameters; the
    output has the compute dtype (autocast's, else the input's). Saved: the input, and
    ``1 / sqrt(mean(x²) + eps)`` of shape ``rows``.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467.

    Args:
        normalized_shape: size of the last dimension, or of several.
        eps: added to the mean square.
        device: of the weight; None is torch's default.
        dtype: of the weight; None is torch's default.
        zero_centered_gamma: scale by ``1 + weight``; the weight then starts at zero.
        sm_margin: must be 0, or a dict of zeros.

    Raises:
        ArgumentError: if ``normalized_shape`` is empty or has a size that is not positive, ``eps``
            is negative or not finite, or ``dtype`` not fp16, bf16, fp32 or fp64.
        ArgumentTypeError: if ``eps`` is not a number.
        InputError: in forward, if the last dimensions of x are not ``normalized_shape``, or x is
            not fp16, bf16, fp32 or fp64.
        NotSupportedError: if ``sm_margin`` asks for multiprocessors to be kept free.
    """

    backward_reads_parameters = True

    class Saved(NamedTuple):
        input: Tensor
        rstd: Tensor

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        shape = canonical_shape(normalized_shape, where)
        check_eps(eps, where)
        check_parameter_dtype(dtype, where)
        refuse_sm_margin(sm_margin, where)
        self.normalized_shape = shape
        self._dims = tuple(range(-len(shape), 0))
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to one."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def op_forward(  # type: ignore[override]  # takes no keywords of its own
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        shape = self.normalized_shape
        if input_.shape[-len(shape) :] != shape:
            refuse_input(input_, f"{type(self).__name__}({self.extra_repr()})")
        x = cast(input_, compute_dtype(input_, self))
        wide = cast(x, wide_dtype(x.dtype))
        norm = torch.linalg.vector_norm(wide, dim=self._dims, keepdim=True)
        rstd = norm.square_().mul_(1 / math.prod(shape)).add_(self.eps).rsqrt_()
        # What was widened is ours to overwrite; the input is not.
        y = wide * rstd if wide is x else wide.mul_(rstd)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(x, rstd.view(x.shape[: -len(shape)])))
        return cast(y.mul_(self._scale(self.weight, wide.dtype)), x.dtype)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor | None]]:
        assert ctx.saved_tensors is not None
        assert ctx.parameters is not None
        x, rstd = ctx.saved_tensors
        weight = ctx.parameters[0]
        assert x is not None
        assert rstd is not None
        assert weight is not None
        if not x.numel():
            return x.new_zeros(grad_output.shape), (weight.new_zeros(weight.shape),)
        scale = self._scale(weight, rstd.dtype).view(-1)
        shape = (-1, scale.shape[0])
        rows = cast(x.reshape(shape), rstd.dtype)
        dy = cast(grad_output.reshape(shape), rstd.dtype)
        rstd = rstd.view(-1, 1)
        dx = dw = None
        if ctx.needs.input:
            dx = cast(_input_gradient(dy * scale, rows, rstd), x.dtype).view(grad_output.shape)
        if ctx.needs.parameters[0]:
            # Not by the fast weight gradient of layer norm: it adds one row after the other, and
            # is ten times less accurate for a few thousand rows.
            dw = (dy * rows).mul_(rstd).sum(0).view(weight.shape)
        return dx, (dw,)

    def _scale(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        scale = cast(weight, dtype)
        return scale + 1 if self.zero_centered_gamma else scale

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        wide = input_.to(wide_dtype(input_.dtype))
        mean_square = wide.square().mean(self._dims, keepdim=True)
        y = wide * torch.rsqrt(mean_square + self.eps) * self._scale(self.weight, wide.dtype)
        return y.to(input_.dtype)

    def extra_repr(self) -> str:
        centred = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{self.normalized_shape}, eps={self.eps}{centred}"


def _input_gradient(dh: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """``dx = rstd (dh - x rstd² mean(dh x))``, ``dh = dy w``.

    That is the gradient of weight normalisation ``g x / n`` with norms ``n = √D / rstd`` and gains
    ``g = √D``, for which ATen has one pass: about half the time of writing the formula out.
    """
    gain = torch.full_like(rstd, math.sqrt(x.shape[1]))
    dx: Tensor
    dx, _ = torch.ops.aten._weight_norm_interface_backward.default(
        dh.contiguous(), x.contiguous(), gain, gain / rstd, 0
    )
    return dx
