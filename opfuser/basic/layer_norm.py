"""Layer normalisation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.norm import add_layer_norm_forward, layer_norm_backward, layer_norm_forward
from ..kernels.scalar import cast
from ..op import BasicOperation, Dtypes, OperationContext, compute_dtype
from ._dtypes import check_parameter_dtype
from ._norms import (
    NormSettings,
    as_rows,
    as_vector,
    canonical_shape,
    check_eps,
    per_row,
    refuse_input,
    refuse_sm_margin,
)

__all__ = ["LayerNorm"]


class LayerNorm(BasicOperation):
    r"""Layer normalisation over the last dimensions.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} w + b

    Shapes: x and y ``(*rows, *normalized_shape)``, w and b ``normalized_shape``. Statistics and
    arithmetic are in fp32 (fp64 for an fp64 input), whatever the dtype of the parameters; the
    output has the compute dtype (autocast's, else the input's). Saved: the input, and mean and
    ``1 / sqrt(var + eps)`` of shape ``rows``. A bias of None is left out.

    For A elements, forward moves 2A and backward 3A on a GPU, the gradients of the parameters
    included, up to 8192 columns. Kernels: ours, as ATen's ``native_layer_norm`` takes no residual,
    parameters only in the dtype of x and, for their gradients, a second pass; on a CPU ATen's.

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
    read_only: ClassVar[frozenset[str]] = frozenset({"normalized_shape"})
    bias: nn.Parameter | None

    class Saved(NamedTuple):
        input: Tensor
        mean: Tensor
        rstd: Tensor

    Settings = NormSettings

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
        check_parameter_dtype(dtype, where)
        refuse_sm_margin(sm_margin, where)
        self.normalized_shape = shape
        self._cols = math.prod(shape)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.make_settings()
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def make_settings(self) -> NormSettings:
        check_eps(self.eps, type(self).__name__)
        return NormSettings(self.eps, self.zero_centered_gamma)

    def reset_parameters(self) -> None:
        """Sets the scale to one and the bias to zero."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.compute

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
        rows = as_rows(x, self._cols)
        y: Tensor
        y, mean, rstd = layer_norm_forward(rows, *self._arguments(ctx))
        if rows is not x:
            y, leading = y.view_as(x), x.shape[: -len(shape)]
            mean, rstd = per_row(mean, leading), per_row(rstd, leading)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(x, mean, rstd))
        return y

    def forward_of_sum(
        self, ctx: OperationContext, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output for the input ``x + residual``, and that input; all of the compute dtype."""
        rows = as_rows(x, self._cols)
        y, total, mean, rstd = add_layer_norm_forward(
            rows, as_rows(residual, self._cols), *self._arguments(ctx)
        )
        if rows is not x:
            y, total, leading = (
                y.view_as(x),
                total.view_as(x),
                x.shape[: -len(self.normalized_shape)],
            )
            mean, rstd = per_row(mean, leading), per_row(rstd, leading)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(total, mean, rstd))
        return y, total

    def _arguments(self, ctx: OperationContext) -> tuple[Tensor, Tensor | None, float, bool]:
        parameters = self._parameters  # without the 0.5 us of nn.Module.__getattr__
        weight, bias = parameters.get("weight"), parameters.get("bias")
        weight = self.weight if weight is None else weight  # parametrised
        bias = self.bias if bias is None else bias
        eps, zero_centered = ctx.settings or self.frozen_settings(ctx)
        return as_vector(weight), None if bias is None else as_vector(bias), eps, zero_centered

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        dx, grads, _ = self.gradients(ctx, grad_output, None)
        return dx, grads

    def gradients(
        self,
        ctx: OperationContext,
        grad_output: Tensor,
        residual_grad: Tensor | None,
        want_y: bool = False,
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...], Tensor | None]:
        """Gradients as of ``op_backward``, and if wanted the output made again.

        Args:
            ctx: context in backward.
            grad_output: gradient of the output; that of the input gets its shape.
            residual_grad: added to the gradient of the input.
            want_y: whether to make the output again, in the shape of ``grad_output``.
        """
        assert ctx.saved_tensors is not None
        x, mean, rstd = ctx.saved_tensors
        weight, bias = (*ctx.parameters, None)[:2]
        assert x is not None
        assert mean is not None
        assert rstd is not None
        assert weight is not None
        cols = self._cols
        needs_dx, needs = ctx.needs.input, ctx.needs.parameters
        dy = as_rows(grad_output, cols)
        results: list[Tensor] = layer_norm_backward(
            dy,
            as_rows(x, cols),
            as_vector(weight),
            None if bias is None else as_vector(bias),
            as_vector(mean),
            as_vector(rstd),
            None if residual_grad is None else as_rows(residual_grad, cols),
            *(ctx.settings or self.frozen_settings(ctx)),
            needs_dx,
            any(needs),
            want_y,
        )
        dx = y = None
        if needs_dx:
            dx = results[0] if dy is grad_output else results[0].view_as(grad_output)
        if want_y:
            y = results[-1] if dy is grad_output else results[-1].view_as(grad_output)
        if not any(needs):
            return dx, (None,) * len(needs), y
        # Those of weight and bias are made together.
        made = results[needs_dx : needs_dx + len(needs)]
        if weight.dim() > 1:
            made = [grad.view_as(weight) for grad in made]
        return dx, tuple([grad if need else None for grad, need in zip(made, needs)]), y

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        bias = None if self.bias is None else self.bias.to(input_.dtype)
        return F.layer_norm(input_, self.normalized_shape, weight.to(input_.dtype), bias, self.eps)

    def extra_repr(self) -> str:
        centred = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{self.normalized_shape}, eps={self.eps}{centred}"
