"""Linear operations of groups of rows whose GEMMs take operands of a recipe, in both passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..basic._grouped_products import GroupedProducts, matrices
from ..basic._grouped_weight_grad import GroupedProduct, ScaledGroupedProduct
from ..basic.grouped_linear import GroupedLinear
from ..basic.permute import Permute
from ..core.context import (
    BackwardResult,
    Contexts,
    Extras,
    ForwardArguments,
    ForwardResult,
    GradNeeds,
    OperationContext,
)
from ..core.fusion import Env, Fusion, Refusal, Requires
from ..gemm import RowGroups
from ..gemm.scaled import Accumulation
from ..gemm.scaled_groups import (
    grouped_scaled_dgrad,
    grouped_scaled_forward,
    grouped_scaled_wgrad,
)
from ..kernels.groups import Grouped, group_ends
from ..kernels.quantize import Codes
from ..op import BasicOperation, FusedOperation, FusibleOperation
from ..quantization.products import accumulation
from ..quantization.quantizers import GroupQuantizer, OperandQuantizer, QuantizedTensor
from ..quantization.region import kept_weights
from ..recipe import Recipe


class QuantizedGroupedLinear(FusedOperation):
    r"""GroupedLinear in the format of a recipe of quantized compute.

    .. math:: y_g = x_g\, W_g^T + b_g

    x, the weights and the gradient of y are rounded to FP8, MXFP8 or NVFP4 with scales; the
    products are those of the rounded tensors. With one scale per tensor, the rows of all groups
    share it; scales of blocks and of columns are separate for each group. Each weight has its own
    scale, unless scales are kept between calls: then the weights share one. Saves the codes of x by
    columns, one byte each (half a byte in NVFP4), and their scales, with up to 127 rows of padding
    per group, and 128 for an empty group.

    Split sizes on a GPU stay there: nothing waits for them, and launches cover all groups. As in
    :class:`GroupedLinear`, they are not checked, and rows beyond their sum are undefined.

    The gradient of y is freed once it is rounded, unless a bias reads it.

    Kernels: on GPUs of compute capability 9.0, torch's grouped GEMM of codes with a scale per row,
    to which a tensor's one scale is broadcast; opfuser's own for weight gradients of groups with
    fewer than 2048 rows, blocks of 128, E5M2, other results and other GPUs; and opfuser's
    quantization of both layouts in one pass, which inserts the padding between groups. Weights that
    are stored as one save a copy. Codes of MXFP8 and NVFP4 are decoded to bf16, which is exact, and
    multiplied by opfuser's grouped GEMM of bf16 on every GPU.

    Args:
        linear: the operation.
        recipe: of :mod:`opfuser.recipe`.

    Raises:
        InputError: in forward, as in the operation that it replaces.
    """

    frees_output_grad = True

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        recipe = self.recipe
        if "bf16" in (recipe.fprop, recipe.dgrad, recipe.wgrad):
            return self.linear.replayable
        return self.linear.only_launches

    def __init__(self, *, linear: GroupedLinear, recipe: Recipe) -> None:
        super().__init__([linear])
        self.linear, self.recipe = linear, recipe

    @property
    def quantized_ops(self) -> Sequence[BasicOperation]:
        return (self.linear,)

    def takes_groups(
        self, env: Env, needs: Sequence[GradNeeds | None], gathers: FusibleOperation
    ) -> GroupQuantizer | None:
        recipe, linear, need = self.recipe, self.linear, needs[0]
        if type(gathers) is not Permute or recipe.fprop != "fp8":
            return None
        # Only those sizes say how the rows are gathered.
        sizes, own = gathers._extra_output_channels[1], linear._extra_input_channels[0]
        if sizes is None or own != sizes or gathers.num_experts != linear.num_groups:
            return None
        saves = need is not None and any(need.parameters[: linear.weight_count])
        if saves and recipe.wgrad != "fp8":
            return None
        return GroupQuantizer(OperandQuantizer(linear, recipe), linear.num_groups, True, saves)

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        (ctx,) = basic_op_ctxs
        ctx.kept_weights = kept_weights()
        products = _QuantizedProducts(self.linear, self.recipe, ctx)
        return self.linear.forward_by(products, ctx, input_, given)

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        (ctx,) = basic_op_ctxs
        products = _QuantizedProducts(self.linear, self.recipe, ctx, ctx.saved_tensors[-1])
        grad_output = products.encoded(grad_output)  # values are freed before the GEMMs
        return self.linear.backward_by(products, ctx, grad_output)


class _QuantizedProducts(GroupedProducts):
    """Products of codes for one pass of a call, which find the groups on the device."""

    # Where the groups end, once it is known.
    ends: Tensor | None = None

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

    def forward(
        self,
        x: Any,
        weights: Sequence[Tensor],
        groups: RowGroups,
        *,
        out: Tensor | None,
        save: bool,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        rows, cols = self.recipe.fprop == "fp8", save and self.recipe.wgrad == "fp8"
        ends = groups.ends
        self.ends = group_ends(groups.sizes.to(x.device), x.shape[0]) if ends is None else ends
        codes = x.codes if isinstance(x, QuantizedTensor) else None
        if codes is None and (rows or cols):
            codes = self.quantized("input", x, rows=rows, cols=cols)
        self.ctx.compute_dtype = x.dtype
        # Backward is given views of the weights, by which nothing is kept.
        sources = [w if isinstance(w, nn.Parameter) else None for w in weights]
        self.ctx.kept_sources = [] if self.ctx.kept_weights is None else sources
        saved: tuple[Tensor | None, ...] = (x if save else None, None, None)
        if codes is not None and cols:
            saved = None, codes.cols, codes.col_scale
        saved = *saved, self.ends
        if codes is None or not rows:
            return super().forward(x, weights, groups, out=out, save=save)[0], (*saved, None)
        y = self.product(codes, weights, x, out, forward=True)
        ctx, used = self.ctx, None
        if ctx.requires_grad and ctx.needs.input and self.recipe.dgrad == "fp8":
            used = self.quantizer.used_scales()  # for the weights
        return y, (*saved, used)

    def output_grad(self, dy: Tensor, saved: Sequence[Tensor | None]) -> Tensor:
        self.ends = saved[3]
        return dy.to(self.ctx.compute_dtype)

    def dgrad(
        self, dy: Tensor, weights: Sequence[Tensor], groups: RowGroups, *, out: Tensor | None
    ) -> Tensor:
        if self.recipe.dgrad != "fp8":
            return super().dgrad(dy, weights, groups, out=out)
        codes = self._codes(dy)
        dx = self.product(codes, weights, dy, out, forward=False)
        self._grad_codes = codes._replace(rows=None, row_scale=None)
        return dx

    def wgrad(
        self,
        dy: Tensor,
        saved: Sequence[Tensor | None],
        weights: Sequence[Tensor],
        groups: RowGroups,
    ) -> GroupedProduct | ScaledGroupedProduct:
        x, cols, col_scale, *_ = saved
        if self.recipe.wgrad != "fp8":
            return super().wgrad(dy, (x,), weights, groups)
        dys, xs, ends = self._codes(dy), Codes(None, None, cols, col_scale, None), self.ends
        assert ends is not None
        how = self.how("wgrad", ends.device, weights[0].dtype)
        return ScaledGroupedProduct(
            lambda dtype: grouped_scaled_wgrad(dys, xs, ends, how._replace(dtype=dtype)), how.dtype
        )

    def _codes(self, dy: Tensor) -> Codes:
        """The gradient of the output, quantized once for both GEMMs."""
        if self._grad_codes is None:
            needs = self.ctx.needs
            self._grad_codes = self.quantized(
                "grad_output",
                dy.contiguous(),
                rows=needs.input and self.recipe.dgrad == "fp8",
                cols=self.linear.wants_weights(self.ctx) and self.recipe.wgrad == "fp8",
            )
        return self._grad_codes

    def how(self, product: str, device: torch.device, dtype: torch.dtype) -> Accumulation:
        """How a product is computed: by no provider, as none takes groups."""
        features = self.linear.out_features, self.linear.in_features
        how = accumulation(self.recipe, product, features, dtype, device)
        return how._replace(provider=None)

    def encoded(self, dy: Tensor) -> Any:
        """The gradient of the output as codes, if nothing but GEMMs of codes reads it."""
        _, _, *saved = self.ctx.saved_tensors
        reads_values = self.linear.has_bias or "bf16" in (self.recipe.dgrad, self.recipe.wgrad)
        if reads_values or dy.dim() != 2 or saved[3] is None:
            return dy
        rows = self.output_grad(dy, saved)
        codes = self._codes(rows)
        by_cols = codes if codes.cols is None else codes._replace(rows=None, row_scale=None)
        return QuantizedTensor(by_cols, dy.shape, rows.dtype)

    def reads_sizes(self, x: Tensor, out_features: int) -> bool:
        modes = self.recipe.fprop, self.recipe.dgrad, self.recipe.wgrad
        return "bf16" in modes and super().reads_sizes(x, out_features)

    def quantized(self, role: str, x: Tensor, *, rows: bool, cols: bool) -> Codes:
        groups = Grouped(self.linear.num_groups, self.ends)
        return self.quantizer.quantize_groups(role, x, groups, rows=rows, cols=cols)

    def product(
        self,
        x: Codes,
        weights: Sequence[Tensor],
        like: Tensor | QuantizedTensor,
        out: Tensor | None,
        *,
        forward: bool,
    ) -> Tensor:
        ws, sources = matrices(weights, like.dtype), self.ctx.kept_sources
        kept = self.ctx.kept_weights
        w = self.quantizer.weights(ws, sources, kept, rows=forward, cols=not forward)
        how = self.how("fprop" if forward else "dgrad", like.device, like.dtype)
        assert self.ends is not None
        multiply = grouped_scaled_forward if forward else grouped_scaled_dgrad
        return multiply(x, w, self.ends, how, out)


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
