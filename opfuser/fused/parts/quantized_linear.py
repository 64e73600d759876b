"""A linear operation whose GEMMs take FP8 operands, as a part of a joint fusion."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import gemm
from ...basic._weight_grad import Computed
from ...basic.add_extra_input import AddExtraInput
from ...basic.basic_linear import BasicLinear
from ...basic.bias import Bias, bias_grad
from ...context import Contexts, ExtraTensors, OperationContext
from ...fusion import Env
from ...gemm.scaled import Accumulation, scaled_dgrad, scaled_forward, scaled_wgrad
from ...kernels.quantize import Codes
from ...kernels.scalar import cast
from ...quantization.quantizers import OperandQuantizer, has_hardware
from ...quantization.region import amax_group
from ...recipe import Recipe
from .linear import LinearPart
from .part import Gradients

__all__ = ["QuantizedLinearPart", "linear_part"]


def linear_part(
    linear: BasicLinear,
    bias: Bias | None,
    where: str,
    *,
    add: AddExtraInput | None = None,
    env: Env | None = None,
) -> LinearPart:
    """The part for a linear operation in a call, quantised where its recipe says so."""
    if env is None or env.recipe is None or linear.quantized_refusal(env) is not None:
        return LinearPart(linear, bias, where, add=add)
    return QuantizedLinearPart(linear, bias, where, add=add, recipe=env.recipe)


class QuantizedLinearPart(LinearPart):
    """As :class:`LinearPart`, with products of FP8 codes.

    Saves the weight, and of its input the codes by columns, one byte each, unless the part before
    recomputes it. The weight is quantised in each pass for the layout that it needs there.

    Args:
        linear, bias, where, add: as of :class:`LinearPart`.
        recipe: how it is quantised.
    """

    def __init__(
        self,
        linear: BasicLinear,
        bias: Bias | None,
        where: str,
        *,
        add: AddExtraInput | None = None,
        recipe: Recipe,
    ) -> None:
        super().__init__(linear, bias, where, add=add)
        self.recipe = recipe
        self.quantized_ops = (linear,)

    def forward(
        self, ctxs: Contexts, x: Tensor, extra_inputs: ExtraTensors, *, save_input: bool
    ) -> tuple[Tensor, ExtraTensors]:
        ctx = ctxs[0]
        ctx.group = amax_group()
        ctx.sums_columns = self.bias is not None and True in ctxs[1].needs.parameters
        x, w = self.linear.operands(ctx, x, save=False)
        b = None if self.bias is None else self.bias.operand(x, w)
        save_input = save_input and ctx.requires_grad
        reads_input = save_input and (self.recomputed or ctx.needs.parameters[0])
        # What recomputes the output needs more of the input than wgrad does.
        by_cols = reads_input and not self.recomputed and self.recipe.wgrad == "fp8"
        rows = gemm.as_rows(x)
        codes = None
        if by_cols or self.recipe.fprop == "fp8":
            quantizer = self._quantizer(ctx)
            codes = quantizer.input(rows, rows=self.recipe.fprop == "fp8", cols=by_cols)
        if ctx.requires_grad:
            cols = codes if by_cols else None
            kept = (None, None) if cols is None else (cols.cols, cols.col_scale)
            ctx.save_for_backward(x if reads_input and not by_cols else None, w, *kept)
            if self.recomputed and self.bias is not None:
                ctxs[1].save_for_backward(b)
        y = self._product(ctx, x, codes, w, b)
        nothing = [()] * len(self.ops)
        if self.add is None:
            return y, nothing
        (z,) = extra_inputs[-1]
        assert z is not None
        return self.add.reference(y, z), nothing

    def _product(
        self, ctx: OperationContext, x: Tensor, codes: Codes | None, w: Tensor, b: Tensor | None
    ) -> Tensor:
        if self.recipe.fprop != "fp8":
            return gemm.forward(x, w, b)
        assert codes is not None
        weight = self._quantizer(ctx).weight(w, self._source(), rows=True, cols=False)
        shape = x.numel() // x.shape[-1], w.shape[0]
        y = scaled_forward(codes, weight, shape, b, self._how("fprop", w, w.dtype))
        return y.view(*x.shape[:-1], w.shape[0])

    def recompute(self, ctxs: Contexts, x: Tensor | None) -> Tensor:
        saved, w = ctxs[0].saved_tensors[:2]
        b = None if self.bias is None else ctxs[1].saved_tensors[0]
        x = saved if x is None else cast(x, w.dtype)
        codes = None
        if self.recipe.fprop == "fp8":
            quantizer = self._quantizer(ctxs[0])
            codes = quantizer.input(gemm.as_rows(x), rows=True, cols=False)
        return self._product(ctxs[0], x, codes, w, b)

    def _input_grad(self, ctx: OperationContext, dy: Tensor) -> Tensor:
        w = ctx.saved_tensors[1]
        if self.recipe.dgrad != "fp8":
            return gemm.dgrad(dy, w)
        rows = dy.numel() // dy.shape[-1]
        weight = self._quantizer(ctx).weight(w, self._source(), rows=False, cols=True)
        how = self._how("dgrad", w, w.dtype)
        dx = scaled_dgrad(self._grad_codes(ctx, dy), weight, rows, how)
        return dx.view(*dy.shape[:-1], w.shape[1])

    def parameter_grads(self, ctxs: Contexts, dy: Tensor, x: Tensor | None) -> list[Gradients]:
        ctx, dw, db = ctxs[0], None, None
        if ctx.needs.parameters[0]:
            dw = self._weight_grad(ctx, dy, x)
        own: list[Gradients] = [(dw,)]
        if self.bias is not None:
            needs = ctxs[1].needs.parameters
            if True in needs:
                codes = ctx.__dict__.get("grad_codes")
                db = codes.column_sum if codes is not None else None
                db = bias_grad(dy) if db is None else cast(db, dy.dtype)
            own.append((db,) if True in needs else (None,) * len(needs))
        return own if self.add is None else [*own, ()]

    def _weight_grad(self, ctx: OperationContext, dy: Tensor, x: Tensor | None) -> Tensor | None:
        saved, w, cols, col_scale = ctx.saved_tensors
        x = saved if x is None else cast(x, w.dtype)
        if self.recipe.wgrad != "fp8":
            return self.linear.weight_grad(dy, x, ctx)
        if cols is None:
            codes = self._quantizer(ctx).input(gemm.as_rows(x), rows=False, cols=True)
        else:
            codes = Codes(None, None, cols, col_scale, None)
        dtype = self.linear.weight_grad_dtype(ctx, w)
        dw = scaled_wgrad(self._grad_codes(ctx, dy), codes, self._how("wgrad", w, dtype))
        return self.linear.hand_over(Computed(dw), ctx)

    def _grad_codes(self, ctx: OperationContext, dy: Tensor) -> Codes:
        """The gradient of the output, quantised once for the GEMMs that take it.

        Its columns are summed for the bias where the weight's gradient reads them anyway.
        """
        codes: Codes | None = ctx.__dict__.get("grad_codes")
        if codes is None:
            w = ctx.saved_tensors[1]
            rows = ctx.needs.input and self.recipe.dgrad == "fp8"
            cols = ctx.needs.parameters[0] and self.recipe.wgrad == "fp8"
            dy = gemm.as_rows(cast(dy, w.dtype)).contiguous()
            codes = ctx.grad_codes = self._quantizer(ctx).grad_output(
                dy, rows=rows, cols=cols, column_sum=ctx.sums_columns and cols
            )
        return codes

    def _quantizer(self, ctx: OperationContext) -> OperandQuantizer:
        return OperandQuantizer(self.linear, self.recipe, ctx.group)

    def _source(self) -> Tensor | None:
        return self.linear._parameters.get("weight")

    def _how(self, product: str, w: Tensor, dtype: torch.dtype) -> Accumulation:
        return Accumulation(dtype, self.recipe.splits(product), has_hardware(w.device, self.recipe))
