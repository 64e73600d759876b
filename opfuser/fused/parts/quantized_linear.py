"""A linear operation whose GEMMs take FP8 operands, as a part of a joint fusion."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ... import gemm
from ...basic._weight_grad import ScaledProduct, WeightGradient
from ...basic.add_extra_input import AddExtraInput
from ...basic.bias import bias_grad
from ...core.context import Contexts, Extras, OperationContext
from ...core.fusion import Env
from ...distributed.collectives import (
    gather_input,
    gather_output_grad,
    reduce_input_grad,
    reduce_output,
)
from ...gemm.scaled import Accumulation, scaled_dgrad, scaled_forward
from ...kernels.quantize import Codes, amax_of
from ...kernels.scalar import cast
from ...quantization.products import accumulation
from ...quantization.quantizers import OperandQuantizer, QuantizedTensor, Quantizer, kept_weights
from ...quantization.weights import decode_weight
from ...recipe import Recipe
from .._linear import AnyBias, AnyLinear
from .linear import LinearPart
from .part import Gradients


def linear_part(
    linear: AnyLinear,
    bias: AnyBias | None,
    where: str,
    *,
    add: AddExtraInput | None = None,
    env: Env | None = None,
) -> LinearPart:
    """The part for a linear operation in a call, quantised where its recipe says so."""
    if (
        env is None
        or env.recipe is None
        or linear.communicates  # LinearPart refuses it
        or linear.quantized_refusal(env) is not None
    ):
        return LinearPart(linear, bias, where, add=add)
    return QuantizedLinearPart(linear, bias, where, add=add, recipe=env.recipe)


class _Weight(NamedTuple):
    """The weight of a call.

    Attributes:
        w: its values, or codes.
        scale: of codes that are stored.
        amax: the largest value, where codes of both passes need it.
        operands: what quantises it.
    """

    w: Tensor
    scale: Tensor | None
    amax: Tensor | None
    operands: OperandQuantizer

    def in_high_precision(self, dtype: torch.dtype) -> Tensor:
        """The values."""
        return self.w if self.scale is None else decode_weight(self.w, self.scale, dtype)


class QuantizedLinearPart(LinearPart):
    """As :class:`LinearPart`, with products of FP8 codes.

    Saves the weight, and of its input the codes by columns, one byte each, unless the part before
    recomputes it. The weight is quantised in each pass for the layout that it needs there; its
    largest value, where scales come from that, is saved. So are scales that are kept from call to
    call, for what backward quantises again: other calls may change them before.

    Where ranks exchange data, it is in the dtype of the operation: an input or a gradient is
    gathered before it is quantised, and outputs of GEMMs are reduced. A gathered input is not
    saved, but that of this rank, and gathered again in backward.
    """

    communicates: ClassVar[bool] = True

    def __init__(
        self,
        linear: AnyLinear,
        bias: AnyBias | None,
        where: str,
        *,
        add: AddExtraInput | None = None,
        recipe: Recipe,
    ) -> None:
        super().__init__(linear, bias, where, add=add)
        self.recipe = recipe
        self.features = linear.sharding.local_out_features, linear.sharding.local_in_features
        self.quantized_ops = (linear,)

    def input_quantizer(self, ctxs: Contexts, *, save_input: bool) -> Quantizer | None:
        by_cols = self._saves(ctxs, save_input)
        gathers = self.linear.sharding.gathers_input
        plain = self.recipe.fprop != "fp8" or (by_cols and not self._saves_codes)
        if plain or gathers or not self.recipe.handed_on:
            return None
        return Quantizer(self._operands, "input", True, by_cols)

    def _saves(self, ctxs: Contexts, save_input: bool) -> bool:
        """Whether forward saves the input in some form."""
        ctx = ctxs[0]
        # Where nothing requires a gradient, needs are empty.
        return (
            save_input and ctx.requires_grad and (self.recomputed or True in ctx.needs.parameters)
        )

    @property
    def _saves_codes(self) -> bool:
        # What recomputes the output needs more of the input than wgrad does.
        gathers = self.linear.sharding.gathers_input
        return not self.recomputed and self.recipe.wgrad == "fp8" and not gathers

    def forward(
        self, ctxs: Contexts, x: Any, extras: Extras, save_input: bool, quantizer: Quantizer | None
    ) -> tuple[Tensor, Extras]:
        ctx, sharding = ctxs[0], self.linear.sharding
        ctx.kept_weights = kept_weights()
        local, w = self.linear.operands(ctx, x, save=False, gather=False, codes=True)
        assert not isinstance(w, gemm.LowRank)  # which no recipe takes
        ctx.dtype, weight = local.dtype, self._given_weight(ctx, gemm.joined(w))
        x = gather_input(local, sharding)
        b = None if self.bias is None else self.bias.operand(x, w)
        saves = self._saves(ctxs, save_input)
        by_cols = saves and self._saves_codes
        codes = None
        if isinstance(x, QuantizedTensor):
            codes = x.codes
        elif by_cols or self.recipe.fprop == "fp8":
            rows = self.recipe.fprop == "fp8"
            codes = Quantizer(self._operands, "input", rows, by_cols).codes(gemm.as_rows(x))
        reduced = sharding.mode == "row"
        y = self._product(ctx, x, codes, weight, None if reduced else b)
        if ctx.requires_grad:
            kept = (codes.cols, codes.col_scale) if by_cols and codes is not None else (None, None)
            saved = local if saves and not by_cols else None
            again = self._rounds_again(ctx, weight, by_cols)
            used = weight.operands.used_scales() if again else None
            numbers = weight.scale, weight.amax, used
            ctx.save_for_backward(saved, *kept, *numbers, *gemm.tensors_of(w))
            if self.recomputed and self.bias is not None:
                ctxs[1].save_for_backward(b)
        if reduced:
            y = reduce_output(y, sharding)
            y = y if b is None else y.add_(b)
        nothing = [()] * len(self.ops)
        if self.add is None:
            return y, nothing
        (z,) = extras[-1]
        assert z is not None
        return self.add.reference(y, z), nothing

    def _given_weight(self, ctx: OperationContext, w: Tensor) -> _Weight:
        scale, amax = self.linear.scale_of(w), None
        both = self.recipe.fprop == "fp8" and self.recipe.dgrad == "fp8" and ctx.needs.input
        if scale is None and ctx.kept_weights is None and both:
            amax = self._operands.weight_amax(w)
        return _Weight(w, scale, amax, self._operands)

    def _saved_weight(self, ctx: OperationContext) -> _Weight:
        scale, amax, _, *tensors = ctx.saved_tensors[3:]
        w = gemm.joined(gemm.weight_of(tensors))
        return _Weight(w, scale, amax, self._operands_again(ctx))

    def _rounds_again(self, ctx: OperationContext, weight: _Weight, by_cols: bool) -> bool:
        """Whether backward quantises again what forward has quantised.

        Not so where weights are kept, but a checkpoint, which may not see that they are, has to
        save as many tensors again.
        """
        recipe = self.recipe
        of_weight = recipe.dgrad == "fp8" and ctx.needs.input and weight.scale is None
        of_input = recipe.wgrad == "fp8" and True in ctx.needs.parameters and not by_cols
        return recipe.fprop == "fp8" and (of_weight or of_input or self.recomputed)

    def _product(
        self, ctx: OperationContext, x: Any, codes: Codes | None, weight: _Weight, b: Tensor | None
    ) -> Tensor:
        if self.recipe.fprop != "fp8":
            return gemm.forward(x, weight.in_high_precision(x.dtype), b)
        assert codes is not None
        features = weight.w.shape[0]
        shape = x.numel() // x.shape[-1], features
        how = self._how("fprop", weight.w, x.dtype)
        y = scaled_forward(codes, self._codes(ctx, weight, rows=True), shape, b, how)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], features)

    def recompute(self, ctxs: Contexts, x: Tensor | None) -> Tensor:
        saved = ctxs[0].saved_tensors[0]
        b = None if self.bias is None else ctxs[1].saved_tensors[0]
        x = saved if x is None else cast(x, ctxs[0].dtype)
        codes = None
        if self.recipe.fprop == "fp8":
            operands = self._operands_again(ctxs[0])
            codes = Quantizer(operands, "input", True, False).codes(gemm.as_rows(x))
        return self._product(ctxs[0], x, codes, self._saved_weight(ctxs[0]), b)

    def grad_output_quantizer(self, ctxs: Contexts) -> Quantizer | None:
        wanted, needs = self._grad_quantizer(ctxs), ctxs[0].needs
        some = True in needs.parameters
        plain = (needs.input and not wanted.rows) or (some and not wanted.cols)
        gathers = self.linear.sharding.scatters_output
        if plain or gathers or self.add is not None or not (wanted.rows or wanted.cols):
            return None
        return wanted if self.recipe.handed_on else None

    def _grad_quantizer(self, ctxs: Contexts) -> Quantizer:
        """For the gradient of the output, once for both GEMMs, and the sums for the bias."""
        needs, recipe = ctxs[0].needs, self.recipe
        # The bias behind the operation sees the rows of this rank, the GEMMs those of all.
        sums = not self.linear.sharding.scatters_output and self.bias is not None
        return Quantizer(
            self._operands,
            "grad_output",
            needs.input and recipe.dgrad == "fp8",
            all(needs.parameters) and recipe.wgrad == "fp8",
            sums and True in ctxs[1].needs.parameters,
        )

    def _input_grad(self, ctxs: Contexts, dy: Any) -> Tensor:
        ctx, sharding = ctxs[0], self.linear.sharding
        weight = self._saved_weight(ctx)
        dy = self._whole(ctxs, dy)
        if self.recipe.dgrad != "fp8":
            dx = gemm.dgrad(dy, weight.in_high_precision(ctx.dtype))
            return reduce_input_grad(dx, sharding)
        rows = dy.numel() // dy.shape[-1]
        how = self._how("dgrad", weight.w, ctx.dtype)
        codes = self._codes(ctx, weight, rows=False)
        dx = scaled_dgrad(self._grad_codes(ctxs, dy), codes, rows, how)
        if dy.dim() != 2:
            dx = dx.view(*dy.shape[:-1], weight.w.shape[1])
        return reduce_input_grad(dx, sharding)

    def recomputed_input_quantizer(self, ctxs: Contexts) -> Quantizer | None:
        if self.recipe.wgrad != "fp8" or not self.recipe.handed_on:
            return None
        return Quantizer(self._operands_again(ctxs[0]), "input", False, True)

    def parameter_grads(self, ctxs: Contexts, dy: Any, x: Any) -> list[Gradients]:
        db = None
        dws: Gradients = (None,) * len(ctxs[0].needs.parameters)
        if True in ctxs[0].needs.parameters:
            dws = self._weight_grads(ctxs, self._whole(ctxs, dy), x)
        own: list[Gradients] = [dws]
        if self.bias is not None:
            needs = ctxs[1].needs.parameters
            if True in needs:
                wanted = self._grad_quantizer(ctxs)
                if wanted.column_sum and (wanted.rows or wanted.cols):
                    db = self._grad_codes(ctxs, dy).column_sum
                db = bias_grad(dy) if db is None else cast(db, dy.dtype)
                own.append(self.bias.gradients(db, needs))
            else:
                own.append((None,) * len(needs))
        return own if self.add is None else [*own, ()]

    def _weight_grads(self, ctxs: Contexts, dy: Any, x: Any) -> Gradients:
        ctx = ctxs[0]
        saved, cols, col_scale, _, _, _, w = ctx.saved_tensors[:7]
        if isinstance(x, QuantizedTensor):
            codes = x.codes
        elif self.recipe.wgrad != "fp8" or cols is None:
            x = gather_input(saved if x is None else cast(x, ctx.dtype), self.linear.sharding)
            if self.recipe.wgrad != "fp8":
                return self.linear.weight_grads(dy, x, ctx)
            operands = self._operands_again(ctx)
            codes = Quantizer(operands, "input", False, True).codes(gemm.as_rows(x))
        else:
            codes = Codes(None, None, cols, col_scale, None)
        dtype = self.linear.weight_grad_dtype(ctx, w)
        how = self._how("wgrad", w, dtype)

        def gradient(n: int | None) -> WeightGradient:
            if n is None:
                return ScaledProduct(self._grad_codes(ctxs, dy), codes, how)
            columns = self.linear.columns()[n]
            return ScaledProduct(self._codes_of_columns(ctxs, dy, columns), codes, how)

        return self.linear.hand_over_all(gradient, ctx)

    def _codes_of_columns(self, ctxs: Contexts, dy: Tensor, columns: slice) -> Codes:
        """Some columns of the gradient of the output for wgrad, with a scale that is that of all.

        Of projections of which some are frozen.
        """
        role = self._grad_quantizer(ctxs).role
        rows = gemm.as_rows(cast(dy, ctxs[0].dtype)).contiguous()
        how: Any = {"rows": False, "cols": True, "amax": amax_of(rows)}
        return self._operands.quantize(role, rows[:, columns].contiguous(), **how)

    def _whole(self, ctxs: Contexts, dy: Any) -> Any:
        """The gradient of the output as the GEMMs take it, gathered once for both."""
        sharding, ctx = self.linear.sharding, ctxs[0]
        if not sharding.scatters_output:
            return dy
        whole: Tensor | None = ctx.__dict__.get("whole_output_grad")
        if whole is None:
            whole = ctx.whole_output_grad = gather_output_grad(dy, sharding)
        return whole

    def _grad_codes(self, ctxs: Contexts, dy: Any) -> Codes:
        """The gradient of the output, quantised once."""
        if isinstance(dy, QuantizedTensor):
            return dy.codes
        ctx = ctxs[0]
        codes: Codes | None = ctx.__dict__.get("grad_codes")
        if codes is None:
            rows = gemm.as_rows(cast(dy, ctx.dtype)).contiguous()
            codes = ctx.grad_codes = self._grad_quantizer(ctxs).codes(rows)
        return codes

    @property
    def _operands(self) -> OperandQuantizer:
        return OperandQuantizer(self.linear, self.recipe)

    def _operands_again(self, ctx: OperationContext) -> OperandQuantizer:
        """In backward, for what forward has quantised."""
        return OperandQuantizer(self.linear, self.recipe, ctx.saved_tensors[5])

    def _codes(self, ctx: OperationContext, weight: _Weight, *, rows: bool) -> Codes:
        source = self.linear._parameters.get("weight")
        how: Any = {"rows": rows, "cols": not rows, "scale": weight.scale, "amax": weight.amax}
        return weight.operands.weight(weight.w, source, ctx.kept_weights, **how)

    def _how(self, product: str, w: Tensor, dtype: torch.dtype) -> Accumulation:
        return accumulation(self.recipe, product, self.features, dtype, w.device)
