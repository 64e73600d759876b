"""An activation as a part of a joint fusion."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...basic._gated_math import check_glu_input
from ...basic.activation import ACTIVATIONS as PLAIN_ACTIVATIONS
from ...basic.activation import _Activation
from ...basic.bias import Bias
from ...basic.gated_activation import GATED_ACTIVATIONS, _GatedActivation
from ...core.buffer_reuse import only_reference
from ...core.context import Contexts, Extras, OperationContext
from ...core.fusion import Refusal
from ...gemm import as_rows
from ...kernels.activation import activation_backward, activation_forward
from ...kernels.gated import gated_backward, gated_backward_, gated_forward
from ...kernels.gated_plain import ProductSpec
from ...kernels.gated_quantized import (
    fills_blocks,
    gated_backward_quantized,
    gated_forward_and_input,
    gated_forward_quantized,
    quantize_input,
)
from ...kernels.gated_quantized_plain import SAVED, GatedGrads
from ...kernels.quantize import Codes, Scaling
from ...kernels.scalar import cast
from ...op import in_compute_dtype
from ...quantization.quantizers import QuantizedTensor, Quantizer, scalings
from .._linear import insist
from .part import Gradients, Part, PartGrads, Value, Wanted
from .quantized_linear import QuantizedLinearPart

ACTIVATIONS = (*PLAIN_ACTIVATIONS, *GATED_ACTIVATIONS)

Activation = _Activation | _GatedActivation


def bias_refusal(bias: Bias | None, activation: Activation) -> Refusal | None:
    """Why a bias cannot be added by the activation's kernel."""
    if bias is not None and isinstance(activation, _GatedActivation):
        return Refusal("LAYOUT", f"{type(activation).__name__} adds no bias; the GEMM before does")
    return None


class _Grads(NamedTuple):
    dx: Any
    db: Tensor | None
    y: Any


class ActivationPart(Part):
    """A plain or gated activation; before a plain one an optional bias.

    Saves its input, before the bias, unless the part before recomputes it; and the bias. The input
    is saved as codes by rows where the recipe of the part behind, or the activation, says so and
    each block of 128 columns lies within gates or linear units.

    Args:
        behind: the part behind if it is quantized; None: the input is saved as it is.

    Raises:
        NotSupportedError: a bias before a gated activation.
    """

    emits_quantized = True
    emits_quantized_grad = True

    def __init__(
        self,
        bias: Bias | None,
        activation: Activation,
        where: str,
        *,
        behind: QuantizedLinearPart | None = None,
    ) -> None:
        insist(bias_refusal(bias, activation), where)
        self.ops = (activation,) if bias is None else (bias, activation)
        self.bias, self.activation, self.behind = bias, activation, behind

    @property
    def _asked_for_codes(self) -> bool:
        behind = self.behind
        return behind is not None and (
            self.activation.cache_quantized_input or behind.recipe.save_activations == "fp8"
        )

    def saved_dtype(self, ctxs: Contexts) -> torch.dtype | None:
        if not self._asked_for_codes or not ctxs[-1].requires_grad:
            return None
        assert self.behind is not None
        (function,) = self.activation.make_settings()
        spec, features = _spec(function), self.behind.linear.local_in_features
        return SAVED.dtype if fills_blocks(2 * features if spec.up else features, spec) else None

    def forward(
        self, ctxs: Contexts, x: Any, extras: Extras, save_input: bool, quantizer: Quantizer | None
    ) -> tuple[Any, Extras]:
        """``f(x + b)``."""
        ctx, b = ctxs[-1], None if self.bias is None else self.bias.operand(x)
        y: Any
        saves_codes = save_input and ctx.requires_grad and self._asked_for_codes
        codes = None
        if quantizer is not None and quantizer.rows and not quantizer.cols:
            (function,) = self.activation.frozen_settings(ctx)
            if isinstance(self.activation, _GatedActivation):
                check_glu_input(function.function, x, type(self.activation).__name__)
            x = in_compute_dtype(x, self.ops[0])
            spec = _spec(function)
            y, codes = _quantized(x, b, spec, quantizer, saves_codes and _fills_blocks(x, spec))
            if ctx.requires_grad:
                if self.bias is not None:
                    ctxs[0].save_for_backward(b)
                ctx.save_for_backward(x)
        elif b is None:
            y = self.activation.op_forward(
                ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
            )
        else:
            assert isinstance(self.activation, _Activation)
            x = in_compute_dtype(x, self.ops[0])
            (function,) = self.activation.frozen_settings(ctx)
            y = activation_forward(x, function, b)
            if ctx.requires_grad:
                ctxs[0].save_for_backward(b)
                ctx.save_for_backward(x)
        if ctx.requires_grad and not save_input:
            ctx.to_save = ()
        if saves_codes:
            self._save_codes(ctx, codes)
        return y, [()] * len(self.ops)

    def _save_codes(self, ctx: OperationContext, codes: Codes | None) -> None:
        """Saves codes in place of the input, if its columns allow that."""
        assert ctx.to_save is not None
        (x,) = ctx.to_save
        assert x is not None
        (function,) = self.activation.frozen_settings(ctx)
        if codes is None and _fills_blocks(x, _spec(function)):
            codes = quantize_input(as_rows(x))
        if codes is not None:
            ctx.input_like = x.shape, x.dtype
            ctx.to_save = codes.rows, codes.row_scale

    @staticmethod
    def _saved_input(ctx: OperationContext) -> Value:
        if len(ctx.saved_tensors) == 1:
            x: Tensor = ctx.saved_tensors[0]
            return x
        rows, scale = ctx.saved_tensors
        return QuantizedTensor(Codes(rows, scale, None, None, None), *ctx.input_like)

    def recompute(self, ctxs: Contexts, x: Tensor | None) -> Tensor:
        x = _tensor(self._saved_input(ctxs[-1]) if x is None else x)
        (function,) = self.activation.frozen_settings(ctxs[-1])
        if isinstance(self.activation, _Activation):
            y = activation_forward(x, function, self._saved_bias(ctxs))
        else:
            y = gated_forward(x, function, None)
        return y

    def _saved_bias(self, ctxs: Contexts) -> Tensor | None:
        saved = () if self.bias is None else ctxs[0].saved_tensors
        return saved[0] if saved else None

    def backward(
        self, ctxs: Contexts, dy: Tensor, x: Tensor | None, grad_extras: Extras, wanted: Wanted
    ) -> PartGrads:
        """All gradients and the output in one kernel; dx of a gated x may overwrite it."""
        saved = ctxs[-1].saved_tensors
        gated = isinstance(self.activation, _GatedActivation)
        ours = gated and (x is not None or len(saved) > 1 or only_reference(saved))
        given = self._saved_input(ctxs[-1]) if x is None else x
        if dy.dim() != given.dim():
            dy = dy.view(*given.shape[:-1], dy.shape[-1])
        needs = ctxs[0].needs
        want_dx, want_db = needs.input, self.bias is not None and any(needs.parameters)
        (function,) = self.activation.frozen_settings(ctxs[-1])
        grads: Any
        want_y = wanted.has_output
        if want_y and want_dx and _both(wanted):
            bias = self._saved_bias(ctxs)
            grads = _gradients_quantized(dy, given, bias, function, wanted, want_db)
        elif not gated:
            x, bias = _tensor(given), self._saved_bias(ctxs)
            grads = activation_backward(dy, x, function, bias, want_dx, want_db, want_y)
        elif ours and want_dx:
            grads = gated_backward_(dy, _tensor(given), function, None, want_y)
        else:
            grads = gated_backward(dy, _tensor(given), function, None, want_dx, want_y)
        own: list[Gradients] = [()]
        if self.bias is not None:
            own = [(grads.db,) if want_db else (None,) * len(needs.parameters), ()]
        return PartGrads(grads.dx, own, [()] * len(self.ops), grads.y)


def _spec(function: Any) -> ProductSpec:
    """A product, or a function as one without linear units."""
    if isinstance(function, ProductSpec):
        return function
    return ProductSpec(function.function, function.name, function.parameters, None, (), 0)


def _tensor(x: Value) -> Tensor:
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


def _fills_blocks(x: Tensor, spec: ProductSpec) -> bool:
    return x.dim() > 0 and fills_blocks(x.shape[-1], spec)


def _quantized(
    x: Tensor, bias: Tensor | None, spec: ProductSpec, quantizer: Quantizer, want_x: bool
) -> tuple[QuantizedTensor, Codes | None]:
    """The output by rows, and codes of x if they are wanted."""
    rows = as_rows(x)

    def run(scaling: Scaling) -> Codes:
        return gated_forward_quantized(rows, bias, spec, scaling)

    (scaling,) = scalings([quantizer], x, run)
    features = x.shape[-1] // 2 if spec.up else x.shape[-1]
    shape = torch.Size((*x.shape[:-1], features))
    if not want_x:
        return QuantizedTensor(run(scaling), shape, x.dtype), None
    h, codes = gated_forward_and_input(rows, bias, spec, scaling)
    return QuantizedTensor(h, shape, x.dtype), codes


def _both(wanted: Wanted) -> bool:
    """Whether the gradient is wanted in both layouts, and the output by columns alone."""
    dx, y, _ = wanted
    return dx is not None and y is not None and dx.rows and dx.cols and y.cols and not y.rows


def _gradients_quantized(
    dy: Tensor, x: Value, bias: Tensor | None, function: Any, wanted: Wanted, want_db: bool
) -> _Grads:
    dx, y, _ = wanted
    assert dx is not None
    assert y is not None
    sums, spec = want_db or dx.column_sum, _spec(function)

    def run(dx_scaling: Scaling, y_scaling: Scaling, sums: bool = False) -> GatedGrads:
        rows = as_rows(dy), x.codes if isinstance(x, QuantizedTensor) else as_rows(x)
        return gated_backward_quantized(*rows, bias, spec, dx_scaling, y_scaling, column_sum=sums)

    dx_scaling, y_scaling = scalings([dx, y], dy, run)
    grads = run(dx_scaling, y_scaling, sums)
    db = grads.dx.column_sum
    if db is not None and bias is not None:
        db = cast(db, bias.dtype)
    return _Grads(
        QuantizedTensor(grads.dx, x.shape, x.dtype), db, QuantizedTensor(grads.h, dy.shape, x.dtype)
    )
