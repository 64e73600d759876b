"""Linear operations of groups of rows whose GEMMs take operands of a recipe, in both passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..basic._grouped_products import GroupedProducts, matrices
from ..basic._grouped_weight_grad import GroupedProduct, ScaledGroupedProduct
from ..basic._weight_grad import ScaledProduct
from ..basic.grouped_linear import GroupedLinear
from ..context import (
    BackwardResult,
    Contexts,
    ExtraTensors,
    ForwardArguments,
    ForwardResult,
    OperationContext,
)
from ..fusion import Env, Fusion, Refusal, Requires
from ..gemm import RowGroups
from ..gemm.scaled import Accumulation
from ..gemm.scaled_groups import (
    codes_of_groups,
    padded_groups,
    scaled_grouped_dgrad,
    scaled_grouped_forward,
)
from ..kernels.quantize import Codes
from ..op import BasicOperation, FusedOperation
from ..quantization.products import accumulation
from ..quantization.quantizers import OperandQuantizer, kept_weights
from ..recipe import Recipe

__all__ = ["FUSION", "QuantizedGroupedLinear"]


class QuantizedGroupedLinear(FusedOperation):
    r"""GroupedLinear, as a recipe of quantised compute says.

    .. math:: y_g = x_g\, W_g^T + b_g

    x, the weights and the gradient of y are rounded to FP8, MXFP8 or NVFP4 with scales; the
    products are those of the rounded tensors. A scale of a whole tensor is one for the rows of all
    groups, which are quantised together; each group has its own scales of blocks. Each weight has
    its own scale, but for those that are kept from call to call: there the weights share one. Saves
    the codes of x by columns, one byte each or half of one in NVFP4, and their scales, with up to
    127 rows of padding for a group.

    Split sizes are read by the host: on a GPU it waits for them once a call.

    Kernels: ``torch.nn.functional.scaled_mm``, once for each group that has rows, or those of the
    provider that the recipe names, which may multiply all groups at once; opfuser's quantisation of
    both layouts in one pass.

    Args:
        linear: the operation.
        recipe: of :mod:`opfuser.recipe`.

    Raises:
        InputError: in forward, as in the operation that it replaces.
        NotSupportedError: in forward, if split sizes are on the meta device.
    """

    replayable = False  # as the operation that it replaces

    def __init__(self, *, linear: GroupedLinear, recipe: Recipe) -> None:
        super().__init__([linear])
        self.linear, self.recipe = linear, recipe

    @property
    def quantized_ops(self) -> Sequence[BasicOperation]:
        return (self.linear,)

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        (ctx,) = basic_op_ctxs
        ctx.kept_weights = kept_weights()
        products = _QuantizedProducts(self.linear, self.recipe, ctx)
        return self.linear.forward_by(products, ctx, input_, given)

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
    ) -> BackwardResult:
        (ctx,) = basic_op_ctxs
        products = _QuantizedProducts(self.linear, self.recipe, ctx, ctx.saved_tensors[-1])
        return self.linear.backward_by(products, ctx, grad_output)


class _QuantizedProducts(GroupedProducts):
    """Products of codes, for one pass of a call."""

    def __init__(
        self,
        linear: GroupedLinear,
        recipe: Recipe,
        ctx: OperationContext,
        used: Tensor | None = None,
    ) -> None:
        self.linear, self.recipe, self.ctx = linear, recipe, ctx
        self.quantizer = OperandQuantizer(linear, recipe, used)
        self._grad_codes: Codes | None = None

    def reads_sizes(self, x: Tensor, out_features: int) -> bool:
        return True

    def forward(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        groups: RowGroups,
        *,
        out: Tensor | None,
        save: bool,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        rows, cols = self.recipe.fprop == "fp8", save and self.recipe.wgrad == "fp8"
        codes = None
        if rows or cols:
            codes = self._quantized("input", x, groups, rows=rows, cols=cols)
        self.ctx.compute_dtype = x.dtype
        # Backward is given views of the weights, by which nothing is kept.
        sources = [w if isinstance(w, nn.Parameter) else None for w in weights]
        self.ctx.kept_sources = [] if self.ctx.kept_weights is None else sources
        saved: tuple[Tensor | None, ...] = (x if save else None, None, None)
        if codes is not None and cols:
            saved = None, codes.cols, codes.col_scale
        if codes is None or not rows:
            return super().forward(x, weights, groups, out=out, save=save)[0], (*saved, None)
        w = self._weights(weights, x.dtype, rows=True)
        out = x.new_empty(x.shape[0], weights[0].shape[-2]) if out is None else out
        y = scaled_grouped_forward(codes, w, groups, out, self._how("fprop", x, x.dtype))
        ctx, used = self.ctx, None
        if ctx.requires_grad and ctx.needs.input and self.recipe.dgrad == "fp8":
            used = self.quantizer.used_scales()  # for the weights
        return y, (*saved, used)

    def output_grad(self, dy: Tensor, saved: Sequence[Tensor | None]) -> Tensor:
        return dy.to(self.ctx.compute_dtype)

    def dgrad(
        self, dy: Tensor, weights: Sequence[Tensor], groups: RowGroups, *, out: Tensor | None
    ) -> Tensor:
        if self.recipe.dgrad != "fp8":
            return super().dgrad(dy, weights, groups, out=out)
        codes = self._codes(dy, groups)
        w = self._weights(weights, dy.dtype, rows=False)
        out = dy.new_empty(dy.shape[0], weights[0].shape[-1]) if out is None else out
        return scaled_grouped_dgrad(codes, w, groups, out, self._how("dgrad", dy, dy.dtype))

    def wgrad(
        self,
        dy: Tensor,
        saved: Sequence[Tensor | None],
        weights: Sequence[Tensor],
        groups: RowGroups,
    ) -> GroupedProduct | ScaledGroupedProduct:
        x, cols, col_scale, _ = saved
        if self.recipe.wgrad != "fp8":
            return super().wgrad(dy, (x,), weights, groups)
        dys = codes_of_groups(self._codes(dy, groups), groups)
        xs = codes_of_groups(Codes(None, None, cols, col_scale, None), groups)
        how = self._how("wgrad", dy, weights[0].dtype)
        return ScaledGroupedProduct([ScaledProduct(*pair, how) for pair in zip(dys, xs)])

    def _quantized(
        self, role: str, x: Tensor, groups: RowGroups, *, rows: bool, cols: bool
    ) -> Codes:
        padded = padded_groups(x, groups)
        padding = padded.shape[0] - x.shape[0]
        return self.quantizer.quantize(role, padded, rows=rows, cols=cols, padding=padding)

    def _codes(self, dy: Tensor, groups: RowGroups) -> Codes:
        """The gradient of the output, quantised once for both GEMMs."""
        if self._grad_codes is None:
            needs = self.ctx.needs
            self._grad_codes = self._quantized(
                "grad_output",
                dy.contiguous(),
                groups,
                rows=needs.input and self.recipe.dgrad == "fp8",
                cols=self.linear.wants_weights(self.ctx) and self.recipe.wgrad == "fp8",
            )
        return self._grad_codes

    def _weights(self, weights: Sequence[Tensor], dtype: torch.dtype, *, rows: bool) -> list[Codes]:
        """Of each group, by rows or else by columns."""
        ws = list(matrices(weights, dtype))
        sources = self.ctx.kept_sources or [None] * len(weights)
        sources = sources * (len(ws) // len(weights))
        return self.quantizer.weights(ws, sources, self.ctx.kept_weights, rows=rows, cols=not rows)

    def _how(self, product: str, x: Tensor, dtype: torch.dtype) -> Accumulation:
        features = self.linear.out_features, self.linear.in_features
        return accumulation(self.recipe, product, features, dtype, x.device)


def _refuses(linear: GroupedLinear, *, env: Env) -> Refusal | None:
    return linear.quantized_refusal(env)


def _build(linear: GroupedLinear, *, env: Env) -> QuantizedGroupedLinear:
    assert env.recipe is not None
    return QuantizedGroupedLinear(linear=linear, recipe=env.recipe)


FUSION = Fusion(
    name="quantized_grouped_linear",
    stage="joint",
    pattern=(GroupedLinear,),
    refuses=_refuses,
    build=_build,
    requires=Requires(recipe=True),
)
