"""What RMSNorm and LayerNorm have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.norm import norm_backward, norm_forward
from ..kernels.norm_quantized import norm_cols_quantized, norm_forward_quantized
from ..kernels.norm_quantized_plain import QuantizedNorm
from ..kernels.quantize import Codes, MeasuredScaling, Scaling
from ..op import BasicOperation, Dtypes, OperationContext, OperationGrads, in_compute_dtype
from ..quantization.quantizers import QuantizedTensor, Quantizer, scalings
from ._dtypes import check_parameter_dtype
from ._norms import (
    as_rows,
    as_vector,
    canonical_shape,
    check_eps,
    per_row,
    refuse_input,
    refuse_sm_margin,
    side_by_side,
)


class Norm(BasicOperation):
    r"""Abstract. A subclass adds ``Saved`` and ``reference``, and says what of the formula it has.

    .. math:: y = \frac{x - m}{\sqrt{\mathrm{mean}((x - m)^2) + \epsilon}} w + b

    Class attributes:
        with_mean: whether m is the mean of x; else it is 0.
        with_bias: whether there is a b, which may be None.
        weight_is_cast: whether the module that it stands for casts the weight; see ``holds_data``.
        Saved: the input, the mean if there is one, and one over the square root, of each row.
    """

    kernels = ("Triton norm",)
    backward_reads_parameters = True
    read_only: ClassVar[frozenset[str]] = frozenset({"normalized_shape"})
    with_mean: ClassVar[bool]
    with_bias: ClassVar[bool]
    weight_is_cast: bool = False
    weight: nn.Parameter
    bias: nn.Parameter | None

    class Settings(NamedTuple):
        eps: float
        zero_centered_gamma: bool

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
        if self.with_bias:
            self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def make_settings(self) -> Norm.Settings:
        check_eps(self.eps, type(self).__name__)
        return self.Settings(self.eps, self.zero_centered_gamma)

    def reset_parameters(self) -> None:
        """Sets the scale to one, and the bias to zero."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.with_bias and self.bias is not None:
            nn.init.zeros_(self.bias)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.compute

    def holds_data(self, n: int) -> bool:
        return not n and (self.zero_centered_gamma or self.weight_is_cast)

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Both as they are now, in one dimension; None is a bias that there is not."""
        return _vectors(self.weight, self.bias if self.with_bias else None)

    def op_forward(
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
        x = in_compute_dtype(input_, self)
        y: Tensor = self._normalize(ctx, x, None, next_op_input_quantizer)[0]
        return y

    def forward_of_sum(
        self, ctx: OperationContext, x: Tensor, residual: Tensor, quantizer: Quantizer | None = None
    ) -> tuple[Any, Tensor]:
        """Output for the input ``x + residual``, and that input.

        Args:
            ctx: context in forward.
            x: of the compute dtype, and ending in ``normalized_shape``.
            residual: of the same dtype and shape.
            quantizer: how the output is wanted.
        """
        y, total = self._normalize(ctx, x, residual, quantizer)
        assert total is not None
        return y, total

    def _normalize(
        self, ctx: OperationContext, x: Tensor, residual: Tensor | None, quantizer: Quantizer | None
    ) -> tuple[Any, Tensor | None]:
        if quantizer is not None and quantizer.cols:
            quantizer = None  # one pass over a tensor for both layouts moves less
        flat = len(self.normalized_shape) != 1
        rows = as_rows(x, self._cols) if flat else side_by_side(x)
        other = None
        if residual is not None:
            other = as_rows(residual, self._cols) if flat else side_by_side(residual)
        weight, bias = self.weight_and_bias()
        eps, zero_centered = self.frozen_settings(ctx)
        args = rows, other, weight, bias, eps, zero_centered, self.with_mean
        y: Any
        if quantizer is None:
            y, total, mean, rstd = norm_forward(*args)
        else:
            (y, total, mean, rstd), amax = _quantized(args, quantizer)
            y = QuantizedTensor(y, x.shape, x.dtype, amax)
        if flat:
            y = y.view_as(x) if quantizer is None else y
            leading = x.shape[: -len(self.normalized_shape)]
            rstd = per_row(rstd, leading)
            mean = None if mean is None else per_row(mean, leading)
            total = None if total is None else total.view_as(x)
        if ctx.requires_grad:
            self.save(ctx, x if total is None else total, mean, rstd)
        return y, total

    def save(self, ctx: OperationContext, x: Tensor, mean: Tensor | None, rstd: Tensor) -> None:
        """Saves what backward reads: the fields of ``Saved``.

        Args:
            ctx: context in a forward whose backward will run.
            x: the input, as it was normalized.
            mean: of each row, where ``with_mean``.
            rstd: of each row.
        """
        if mean is None:
            ctx.save_for_backward(x, rstd)
        else:
            ctx.save_for_backward(x, mean, rstd)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        dx, grads, _ = self.gradients(ctx, grad_output, None)
        return dx, grads

    def gradients(
        self,
        ctx: OperationContext,
        grad_output: Tensor,
        residual_grad: Tensor | None,
        want_y: bool = False,
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...], Tensor | None]:
        """Gradients as of ``op_backward``, and if wanted the output, recomputed in the same pass.

        Args:
            ctx: context in backward.
            grad_output: gradient of the output; that of the input gets its shape.
            residual_grad: added to the gradient of the input.
            want_y: whether to recompute the output, in the shape of ``grad_output``.
        """
        needs_dx, needs = ctx.needs.input, ctx.needs.parameters
        x, mean, rstd = self._saved(ctx)
        weight, bias = (*ctx.parameters, None)[:2]
        shape = weight.shape
        weight, bias = _vectors(weight, bias)
        y_weight = None
        if want_y:
            y_weight, bias = self._parameters_of_forward(ctx)
        eps, zero_centered = self.frozen_settings(ctx)
        dy, cols = grad_output, self._cols
        # A view takes a microsecond: there is none where all shapes are as the kernels take them.
        flat = x.shape != dy.shape or len(self.normalized_shape) != 1
        if flat:
            dy, x, rstd = as_rows(dy, cols), as_rows(x, cols), as_vector(rstd)
            mean = None if mean is None else as_vector(mean)
        if residual_grad is not None and residual_grad.shape != dy.shape:
            residual_grad = as_rows(residual_grad, cols)
        dx, dw, db, y = norm_backward(
            side_by_side(dy),
            side_by_side(x),
            weight,
            bias,
            mean,
            rstd,
            None if residual_grad is None else side_by_side(residual_grad),
            eps,
            zero_centered,
            needs_dx,
            True in needs,
            want_y,
            y_weight,
        )
        grads = (dw, db)[: len(needs)]
        if flat:
            dx = None if dx is None else dx.view_as(grad_output)
            y = None if y is None else y.view_as(grad_output)
        if len(shape) > 1:
            grads = tuple([None if grad is None else grad.view(shape) for grad in grads])
        if False in needs:  # those of weight and bias are computed together
            grads = tuple([grad if need else None for grad, need in zip(grads, needs)])
        return dx, grads, y

    def recompute(self, ctx: OperationContext) -> Tensor:
        """In backward, the output again, in the shape of the input that was saved."""
        x = self._saved(ctx)[0]
        rows, parameters = as_rows(x, self._cols), self._parameters_of_forward(ctx)
        settings = self.frozen_settings(ctx)
        y, *_ = norm_forward(rows, None, *parameters, *settings, self.with_mean)
        return y.view_as(x)

    def recompute_quantized(self, ctx: OperationContext, quantizer: Quantizer) -> QuantizedTensor:
        """As :meth:`recompute`, by columns, which is all that ``quantizer`` wants.

        Not measured again where :meth:`save_amax` has saved the largest value.
        """
        x, mean, rstd = self._saved(ctx)
        seen = ctx.saved_tensors[2 + self.with_mean : -2]
        weight, bias = self._parameters_of_forward(ctx)
        zero_centered = self.frozen_settings(ctx).zero_centered_gamma
        rows = side_by_side(as_rows(x, self._cols))
        mean = None if mean is None else as_vector(mean)
        args = rows, weight, bias, mean, as_vector(rstd), zero_centered

        def run(scaling: Scaling) -> Codes:
            return norm_cols_quantized(*args, scaling)

        if seen:
            scaling = quantizer.operands.from_amax(quantizer.role, *seen)
        else:
            (scaling,) = scalings([quantizer], x, run)
        return QuantizedTensor(run(scaling), x.shape, x.dtype)

    def save_amax(self, ctx: OperationContext, y: QuantizedTensor | Tensor) -> None:
        """In forward, saves what of ``y`` the same codes in another layout are made from.

        For a joint fusion, whose own backward alone reads it: fields of ``Saved`` come first.
        """
        if ctx.requires_grad and isinstance(y, QuantizedTensor) and y.amax is not None:
            assert ctx.to_save is not None
            ctx.to_save = *ctx.to_save, y.amax

    def hold(self, ctx: OperationContext) -> None:
        """In forward, saves weight and bias, of which backward computes the output again.

        For a joint fusion, behind all else. The gradient of the input reads ``ctx.parameters``,
        which have other data where somebody exchanged them; see :meth:`holds_data`.
        """
        if ctx.requires_grad:
            assert ctx.to_save is not None
            ctx.to_save = *ctx.to_save, self.weight, self.bias if self.with_bias else None

    @staticmethod
    def _parameters_of_forward(ctx: OperationContext) -> tuple[Tensor, Tensor | None]:
        """What :meth:`hold` has saved, in one dimension."""
        weight, bias = ctx.saved_tensors[-2:]
        assert weight is not None
        return _vectors(weight, bias)

    def _saved(self, ctx: OperationContext) -> tuple[Tensor, Tensor | None, Tensor]:
        """Input, mean and rstd."""
        if self.with_mean:
            x, mean, rstd = ctx.saved_tensors[:3]
            return x, mean, rstd
        x, rstd = ctx.saved_tensors[:2]
        return x, None, rstd

    def extra_repr(self) -> str:
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{self.normalized_shape}, eps={self.eps}{centered}"


def _quantized(args: Any, quantizer: Quantizer) -> tuple[QuantizedNorm, Tensor | None]:
    """The norm by rows, and its largest value, if the scale comes from that."""
    total: Tensor | None = None

    def measure(scaling: Scaling) -> None:
        nonlocal total
        total = norm_forward_quantized(*args, scaling).total

    (scaling,) = scalings([quantizer], args[0], measure)
    result: QuantizedNorm
    if total is None:
        result = norm_forward_quantized(*args, scaling)
    else:  # there is the sum already
        result = norm_forward_quantized(total, None, *args[2:], scaling)._replace(total=total)
    return result, scaling.amax if isinstance(scaling, MeasuredScaling) else None


def _vectors(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both in one dimension."""
    if weight.dim() == 1:
        return weight, bias
    return as_vector(weight), None if bias is None else as_vector(bias)
