"""A linear operation whose GEMMs take FP8 operands, as a part of a joint fusion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import gemm
from ...basic._weight_grad import Computed
from ...basic.add_extra_input import AddExtraInput
from ...basic.basic_linear import BasicLinear
from ...basic.bias import Bias, bias_grad
from ...context import Contexts, ExtraTensors
from ...fusion import Env
from ...gemm.scaled import Accumulation, scaled_dgrad, scaled_forward, scaled_wgrad
from ...kernels.quantize import Codes
from ...kernels.scalar import cast
from ...quantization.quantizers import (
    OperandQuantizer,
    QuantizedTensor,
    Quantizer,
    has_hardware,
)
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

    def input_quantizer(self, ctxs: Contexts, *, save_input: bool) -> Quantizer | None:
        by_cols = self._saves(ctxs, save_input)
        if self.recipe.fprop != "fp8" or (by_cols and not self._saves_codes):
            return None
        return Quantizer(self._operands, "input", True, by_cols)

    def _saves(self, ctxs: Contexts, save_input: bool) -> bool:
        """Whether forward saves the input in some form."""
        ctx = ctxs[0]
        # Where nothing requires a gradient, needs are empty.
        return save_input and ctx.requires_grad and (self.recomputed or ctx.needs.parameters[0])

    @property
    def _saves_codes(self) -> bool:
        # What recomputes the output needs more of the input than wgrad does.
        return not self.recomputed and self.recipe.wgrad == "fp8"

    def forward(
        self,
        ctxs: Contexts,
        x: Any,
        extra_inputs: ExtraTensors,
        *,
        save_input: bool,
        quantizer: Quantizer | None = None,
    ) -> tuple[Tensor, ExtraTensors]:
        ctx = ctxs[0]
        x, w = self.linear.operands(ctx, x, save=False)
        b = None if self.bias is None else self.bias.operand(x, w)
        saves = self._saves(ctxs, save_input)
        by_cols = saves and self._saves_codes
        codes = None
        if isinstance(x, QuantizedTensor):
            codes = x.codes
        elif by_cols or self.recipe.fprop == "fp8":
            rows = self.recipe.fprop == "fp8"
            codes = Quantizer(self._operands, "input", rows, by_cols).codes(gemm.as_rows(x))
        if ctx.requires_grad:
            kept = (codes.cols, codes.col_scale) if by_cols and codes is not None else (None, None)
            ctx.save_for_backward(x if saves and not by_cols else None, w, *kept)
            if self.recomputed and self.bias is not None:
                ctxs[1].save_for_backward(b)
        y = self._product(x, codes, w, b)
        nothing = [()] * len(self.ops)
        if self.add is None:
            return y, nothing
        (z,) = extra_inputs[-1]
        assert z is not None
        return self.add.reference(y, z), nothing

    def _product(self, x: Any, codes: Codes | None, w: Tensor, b: Tensor | None) -> Tensor:
        if self.recipe.fprop != "fp8":
            return gemm.forward(x, w, b)
        assert codes is not None
        weight = self._operands.weight(w, self._source(), rows=True, cols=False)
        shape = x.numel() // x.shape[-1], w.shape[0]
        y = scaled_forward(codes, weight, shape, b, self._how("fprop", w, w.dtype))
        return y.view(*x.shape[:-1], w.shape[0])

    def recompute(self, ctxs: Contexts, x: Tensor | None) -> Tensor:
        saved, w = ctxs[0].saved_tensors[:2]
        b = None if self.bias is None else ctxs[1].saved_tensors[0]
        x = saved if x is None else cast(x, w.dtype)
        codes = None
        if self.recipe.fprop == "fp8":
            codes = Quantizer(self._operands, "input", True, False).codes(gemm.as_rows(x))
        return self._product(x, codes, w, b)

    def grad_output_quantizer(self, ctxs: Contexts) -> Quantizer | None:
        wanted, needs = self._grad_quantizer(ctxs), ctxs[0].needs
        plain = (needs.input and not wanted.rows) or (needs.parameters[0] and not wanted.cols)
        if plain or self.add is not None or not (wanted.rows or wanted.cols):
            return None
        return wanted

    def _grad_quantizer(self, ctxs: Contexts) -> Quantizer:
        """For the gradient of the output, once for both GEMMs, and the sums for the bias."""
        needs, recipe = ctxs[0].needs, self.recipe
        return Quantizer(
            self._operands,
            "grad_output",
            needs.input and recipe.dgrad == "fp8",
            needs.parameters[0] and recipe.wgrad == "fp8",
            self.bias is not None and True in ctxs[1].needs.parameters,
        )

    def _input_grad(self, ctxs: Contexts, dy: Any) -> Tensor:
        w = ctxs[0].saved_tensors[1]
        if self.recipe.dgrad != "fp8":
            return gemm.dgrad(dy, w)
        rows = dy.numel() // dy.shape[-1]
        weight = self._operands.weight(w, self._source(), rows=False, cols=True)
        how = self._how("dgrad", w, w.dtype)
        dx = scaled_dgrad(self._grad_codes(ctxs, dy), weight, rows, how)
        return dx.view(*dy.shape[:-1], w.shape[1])

    def recomputed_input_quantizer(self, ctxs: Contexts) -> Quantizer | None:
        if self.recipe.wgrad != "fp8":
            return None
        return Quantizer(self._operands, "input", False, True)

    def parameter_grads(self, ctxs: Contexts, dy: Any, x: Any) -> list[Gradients]:
        dw = db = None
        if ctxs[0].needs.parameters[0]:
            dw = self._weight_grad(ctxs, dy, x)
        own: list[Gradients] = [(dw,)]
        if self.bias is not None:
            needs = ctxs[1].needs.parameters
            if True in needs:
                codes = self._grad_codes(ctxs, dy)
                db = codes.column_sum
                db = bias_grad(dy) if db is None else cast(db, dy.dtype)
            own.append((db,) if True in needs else (None,) * len(needs))
        return own if self.add is None else [*own, ()]

    def _weight_grad(self, ctxs: Contexts, dy: Any, x: Any) -> Tensor | None:
        ctx = ctxs[0]
        saved, w, cols, col_scale = ctx.saved_tensors
        if self.recipe.wgrad != "fp8":
            return self.linear.weight_grad(dy, saved if x is None else cast(x, w.dtype), ctx)
        if isinstance(x, QuantizedTensor):
            codes = x.codes
        elif x is not None or cols is None:
            x = saved if x is None else cast(x, w.dtype)
            codes = Quantizer(self._operands, "input", False, True).codes(gemm.as_rows(x))
        else:
            codes = Codes(None, None, cols, col_scale, None)
        dtype = self.linear.weight_grad_dtype(ctx, w)
        dw = scaled_wgrad(self._grad_codes(ctxs, dy), codes, self._how("wgrad", w, dtype))
        return self.linear.hand_over(Computed(dw), ctx)

    def _grad_codes(self, ctxs: Contexts, dy: Any) -> Codes:
        """The gradient of the output, quantised once."""
        if isinstance(dy, QuantizedTensor):
            return dy.codes
        ctx = ctxs[0]
        codes: Codes | None = ctx.__dict__.get("grad_codes")
        if codes is None:
            rows = gemm.as_rows(cast(dy, ctx.saved_tensors[1].dtype)).contiguous()
            codes = ctx.grad_codes = self._grad_quantizer(ctxs).codes(rows)
        return codes

    @property
    def _operands(self) -> OperandQuantizer:
        return OperandQuantizer(self.linear, self.recipe)

    def _source(self) -> Tensor | None:
        return self.linear._parameters.get("weight")

    def _how(self, product: str, w: Tensor, dtype: torch.dtype) -> Accumulation:
        return Accumulation(dtype, self.recipe.splits(product), has_hardware(w.device))
