"""Linear transformations of one input with separate weights, whose outputs are concatenated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from .. import gemm
from ..core.context import COMPUTE_DTYPES, refuse_dtype
from ..core.fusion import Env, Refusal
from ..distributed.collectives import LinearSharding, gather_input, refuse_reference
from ..errors import ArgumentError, InputError
from ..gemm_providers import GemmChoice
from ..op import OperationContext, OperationGrads
from ..quantization.recipe_state import init_new_operation
from ..quantization.tensor_quantizer import TensorQuantizer
from ..runtime.tracing import columns, functional, joined_columns
from ._linear_operation import LinearOperation
from ._projections import OfProjections, Projection
from ._recipes import check_own_recipe, choices_of, features_refusal, quantizer_of, recipe_refusal
from ._weight_grad import (
    Computed,
    Product,
    WeightGradient,
    handed_over,
    keep_weights,
    kept_weights,
    refuse_both,
)
from .bias import bias_grad


class BasicMergedLinear(OfProjections, LinearOperation):
    r"""Concatenated linear transformations: :math:`y = [x W_1^T, x W_2^T, \dots]`.

    Shapes: x ``(..., in_features)``, W_i ``(sizes[i], in_features)``, y ``(..., Σ sizes)``. Dtypes,
    attributes and errors as in ``BasicLinear``; the weights are of one dtype. See ``MergedLinear``,
    of which it is a part.

    Args:
        projections: by name; they become submodules.
        accumulate_into_main_grad: see ``BasicLinear``, for each weight.
        accumulate_into_grad: likewise.
        sharding: how the weights are distributed over ranks, whose slices the projections have;
            None: they are not.

    Raises:
        ArgumentError: both of the flags.
        InputError: x has the wrong last dimension or dtype.
    """

    kernels = ("GEMM",)
    parameter: ClassVar[str] = "weight"
    read_only: ClassVar[frozenset[str]] = OfProjections.read_only | {
        "in_features",
        "out_features",
        "sharding",
    }
    recipe: str | None = "inherit"
    takes_part_in_recipes: ClassVar[bool] = True

    class Settings(NamedTuple):
        accumulate_into_main_grad: bool
        accumulate_into_grad: bool

    def __init__(
        self,
        projections: Mapping[str, Projection],
        *,
        accumulate_into_main_grad: bool = False,
        accumulate_into_grad: bool = False,
        sharding: LinearSharding | None = None,
    ) -> None:
        super().__init__(projections)
        self.in_features = next(iter(projections.values())).in_features
        self.out_features = sum(self.sizes)
        alone = LinearSharding(None, None, 1, False, self.in_features, self.out_features)
        self.sharding = sharding or alone
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.accumulate_into_grad = accumulate_into_grad
        self.make_settings()  # checks them
        init_new_operation(self)

    @property
    def Saved(self) -> type[tuple[Any, ...]]:  # type: ignore[override]  # noqa: N802
        """The input, and a weight for each projection; None where no gradient reads it."""
        names = ("input", *(f"weight{n}" for n in range(len(self.names))))
        return NamedTuple("Saved", [(n, Tensor | None) for n in names])  # type: ignore[return-value]

    def make_settings(self) -> BasicMergedLinear.Settings:
        both = self.accumulate_into_main_grad, self.accumulate_into_grad
        refuse_both(*both, type(self).__name__)
        check_own_recipe(self.recipe, type(self).__name__)
        return self.Settings(*both)

    def quantized_refusal(self, env: Env) -> Refusal | None:
        for size in self.sizes:  # so that each is quantised with others as it is alone
            no = features_refusal((size, self.in_features), env)
            if no is not None:
                return no
        features = self.out_features, self.in_features
        return recipe_refusal(self.recipe, features, self._first_weight().dtype, env)

    def gemm_choices(self, env: Env) -> Iterable[GemmChoice]:
        if env.recipe is None:
            return ()
        features, own = (self.out_features, self.in_features), self._first_weight().dtype
        return choices_of(env, features, own, into_main_grad=self.accumulate_into_main_grad)

    def num_quantizers(self, mode: str) -> int:
        return 2 if mode == "forward" else 1

    def _quantizer(self, mode: str, index: int) -> TensorQuantizer | None:
        return quantizer_of(self, self._first_weight(), mode, index)

    def scale_of(self, weight: Tensor) -> Tensor | None:
        """None: the weights are stored in high precision."""
        return None

    def operands(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        save: bool = True,
        gather: bool = True,
        codes: bool = False,
    ) -> tuple[gemm.Operand, gemm.Weight]:
        weights = self._weights()
        x = self.input_operand(input_, weights[0].dtype)
        if any(self.frozen_settings(ctx)):
            keep_weights(ctx, weights)
        w = gemm.stacked(weights)
        if w.dtype != x.dtype:
            w = w.to(x.dtype)
        if save and ctx.requires_grad:
            needs = ctx.needs
            saved = w.matrices if needs.input else (None,) * len(weights)
            ctx.save_for_backward(x if True in needs.parameters else None, *saved)
        sharding = self.sharding
        return (x if sharding.mode is None or not gather else gather_input(x, sharding)), w

    def _first_weight(self) -> nn.Parameter:
        """For its dtype and device; not checked, as outside of forward it may be a DTensor."""
        first: Any = self._modules[self.names[0]]
        w: nn.Parameter | None = first._parameters.get("weight")
        return self._weights()[0] if w is None else w

    def _weights(self) -> list[nn.Parameter]:
        modules, cols, weights = self._modules, self.in_features, []
        dtype = None
        for name, rows in zip(self.names, self.sizes):
            module: Any = modules[name]
            w = module._parameters.get("weight")
            if w is None:
                w = self.parameter_not_registered(name)
            dtype = dtype or w.dtype
            if w.dtype != dtype or w.shape != (rows, cols):
                self._refuse_weights()
            weights.append(w)
        return weights

    def _refuse_weights(self) -> NoReturn:
        found = [(name, getattr(self._modules[name], "weight")) for name in self.names]  # noqa: B009
        raise ArgumentError.explained(
            "Projections have weights of one dtype, and of the shapes that they were made with",
            where=f"{type(self).__name__}({self.extra_repr()})",
            received=", ".join(f"{n} {tuple(w.shape)} {w.dtype}" for n, w in found),
            remedy="Cast all of them, or use one Linear each",
        )

    def weight_grads(
        self, dy: Tensor, x: Tensor, ctx: OperationContext, scale: float | None = None
    ) -> tuple[Tensor | None, ...]:
        if True not in ctx.needs.parameters:
            return (None,) * len(ctx.needs.parameters)
        if dy.dtype != x.dtype:
            dy = dy.to(x.dtype)  # once for all

        def gradient(n: int | None) -> Product:
            return Product(dy if n is None else columns(dy, self.sizes)[n], x, scale)

        return self.hand_over_all(gradient, ctx)

    def hand_over_all(
        self, gradient: Callable[[int | None], WeightGradient], ctx: OperationContext
    ) -> tuple[Tensor | None, ...]:
        """The same for gradients in any form: one GEMM for all where nobody else takes them.

        A compiler sees one for each, as what it joins for one GEMM it copies.

        Args:
            gradient: returns that of a projection, or of all: None.
            ctx: this operation's context in backward.
        """
        into_main_grad, into_grad = self.frozen_settings(ctx)
        needed = ctx.needs.parameters
        pieces: Sequence[Tensor] = ()
        if all(needed) and not functional():
            whole = gradient(None)
            if not (into_main_grad or (into_grad and isinstance(whole, Product))):
                return tuple(whole.value().split(self.sizes))
            if not isinstance(whole, Product):  # whose GEMM adds to nothing
                pieces = whole.value().split(self.sizes)
        used = kept_weights(ctx)

        def handed(n: int) -> Tensor | None:
            return handed_over(
                Computed(pieces[n]) if pieces else gradient(n),
                used[n] if used else None,
                lambda: self._weights()[n],
                type(self).__name__,
                main_grad=into_main_grad,
                grad=into_grad,
            )

        return tuple([handed(n) if need else None for n, need in enumerate(needed)])

    def weight_grad_dtype(self, ctx: OperationContext, w: gemm.Weight) -> torch.dtype:
        """The dtype that the gradients of the weights go to, w of :meth:`operands`."""
        dtype = self._first_weight().dtype
        into_main_grad = self.frozen_settings(ctx).accumulate_into_main_grad
        return torch.promote_types(dtype, torch.float32) if into_main_grad else dtype

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        if self.sharding.mode is not None:
            refuse_reference(self.sharding.group, type(self).__name__)
        weights = self._weights()
        return torch.cat([input_.to(w.dtype) @ w.t() for w in weights], -1)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, {super().extra_repr()}"
        if self.sharding.mode is not None:
            text += f", tensor_parallel_mode={self.sharding.mode!r}"
        return text + (", sequence_parallel=True" if self.sharding.sequence_parallel else "")


class MergedBias(OfProjections):
    r"""Adds the biases of projections to their concatenated outputs.

    Shapes: x and y ``(..., Σ sizes)``, b_i ``(sizes[i],)``. Nothing is added to the output of a
    projection without bias. Dtypes and errors as in ``Bias``.

    Args:
        projections: by name; they become submodules.

    Raises:
        InputError: x has the wrong last dimension.
    """

    parameter: ClassVar[str] = "bias"

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        if input_.dtype not in COMPUTE_DTYPES:
            refuse_dtype(input_, self)
        return input_.add(self.operand(input_))

    def operand(self, x: Tensor, weight: gemm.Weight | None = None) -> Tensor:
        """As of ``Bias``: the biases as one, (Σ sizes,), zero where a projection has none."""
        width = x.shape[-1] if weight is None and x.dim() else 0
        if weight is not None:
            width = weight.shape[0]
        if width != sum(self.sizes):
            self._refuse_input(x, width)
        biases: list[Tensor] = []
        for name in self.owners:
            module: Any = self._modules[name]
            b = module._parameters.get("bias")
            biases.append(self.parameter_not_registered(name) if b is None else b)
        if len(biases) == len(self.names) and len({b.dtype for b in biases}) == 1:
            whole = gemm.one_behind_another(biases)
            if whole is not None:
                return whole.to(x.dtype)
        found = iter(biases)
        return joined_columns(
            [
                next(found).to(x.dtype) if name in self.owners else x.new_zeros(size)
                for name, size in zip(self.names, self.sizes)
            ]
        )

    def gradients(self, db: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """For each bias its share of the gradient ``db`` (Σ sizes,), if it is needed."""
        shares = [
            share for name, share in zip(self.names, columns(db, self.sizes)) if name in self.owners
        ]
        return tuple([share if need else None for share, need in zip(shares, needed)])

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        needed = ctx.needs.parameters
        dx = grad_output if ctx.needs.input else None
        if True not in needed:
            return dx, (None,) * len(needed)
        return dx, self.gradients(bias_grad(grad_output), needed)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return input_ + self.operand(input_)

    def _refuse_input(self, x: Tensor, width: int) -> NoReturn:
        raise InputError.explained(
            "The last dimension of the input must be the sum of the sizes of the biases",
            where=f"{type(self).__name__}({self.extra_repr()})",
            received=f"shape {(*x.shape[:-1], width)}",
            remedy=f"Pass a tensor of shape (..., {sum(self.sizes)})",
        )
