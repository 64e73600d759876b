"""Layer normalisation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.scalar import cast, wide_dtype
from ..op import BasicOperation, OperationContext, compute_dtype
from ._dtypes import check_parameter_dtype
from ._norms import canonical_shape, check_eps, refuse_input, refuse_sm_margin

__all__ = ["LayerNorm"]


class LayerNorm(BasicOperation):
    r"""Layer normalisation over the last dimensions.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} w + b

    Shapes: x and y ``(*rows, *normalized_shape)``, w and b ``normalized_shape``. Statistics and
    arithmetic are in fp32 (fp64 for an fp64 input), whatever the dtype of the parameters; the
    output has the compute dtype (autocast's, else the input's). Saved: the input, and mean and
    ``1 / sqrt(var + eps)`` of shape ``rows``. A bias of None is left out.

    Source: Ba et al., "Layer Normalization", 2016, arXiv 1607.06450.

    Args:
        normalized_shape: size of the last dimension, or of several.
        eps: added to the variance.
        device: of the parameters; None is torch's default.
        dtype: of the parameters; None is torch's default.
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
    bias: nn.Parameter | None

    class Saved(NamedTuple):
        input: Tensor
        mean: Tensor
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
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to one and the bias to zero."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

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
        bias: Tensor | None = self.bias
        if bias is not None:
            bias = _operand(bias, x)
        y, mean, rstd = torch.native_layer_norm(
            x, shape, self._scale(self.weight, x), bias, self.eps
        )
        if ctx.requires_grad:
            rows = x.shape[: -len(shape)]
            ctx.save_for_backward(*self.Saved(x, mean.view(rows), rstd.view(rows)))
        return cast(y, x.dtype)  # autocast runs it in fp32 on a GPU

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        assert ctx.saved_tensors is not None
        assert ctx.parameters is not None
        x, mean, rstd = ctx.saved_tensors
        weight = ctx.parameters[0]
        assert x is not None
        assert mean is not None
        assert rstd is not None
        assert weight is not None
        shape = self.normalized_shape
        # A fusion may have saved input and statistics with the rows in one dimension.
        per_row = (*grad_output.shape[: -len(shape)], *(1 for _ in shape))
        needs = (ctx.needs.input, *ctx.needs.parameters, False)[:3]
        scale = self._scale(weight, x)
        # The bias is read for nothing but its dtype.
        dx, *grads = torch.ops.aten.native_layer_norm_backward.default(
            cast(grad_output, x.dtype),
            x if x.shape == grad_output.shape else x.reshape(grad_output.shape),
            shape,
            mean.view(per_row),
            rstd.view(per_row),
            scale,
            scale,
            needs,
        )
        return dx, tuple(grads[: len(ctx.needs.parameters)])

    def _scale(self, weight: Tensor, x: Tensor) -> Tensor:
        scale = _operand(weight, x)
        return scale + 1 if self.zero_centered_gamma else scale

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        bias = None if self.bias is None else self.bias.to(input_.dtype)
        return F.layer_norm(input_, self.normalized_shape, weight.to(input_.dtype), bias, self.eps)

    def extra_repr(self) -> str:
        centred = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{self.normalized_shape}, eps={self.eps}{centred}"


def _operand(parameter: Tensor, x: Tensor) -> Tensor:
    """A parameter in the dtype that the kernel for ``x`` takes."""
    # On a CPU the statistics come out in this dtype; elsewhere it must be that of x.
    return cast(parameter, wide_dtype(x.dtype) if x.is_cpu else x.dtype)
