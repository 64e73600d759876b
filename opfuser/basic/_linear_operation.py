"""What linear operations have in common, whatever their weight consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import gemm
from ..core.context import COMPUTE_DTYPES, any_autocast, autocast_dtype, refuse_dtype
from ..distributed.collectives import LinearSharding, gather_input, reduce_input_grad
from ..errors import InputError
from ..op import BasicOperation, Dtypes, OperationContext, OperationGrads


class LinearOperation(BasicOperation):
    """Abstract. ``y = x Wᵀ``, and perhaps more that its GEMMs add, with gradients of W apart.

    A subclass implements :meth:`operands` and :meth:`weight_grads`. The first of its saved tensors
    is the input; those behind it are what :meth:`saved_weight` makes a weight of.

    Attributes:
        in_features: last dimension of x, over all ranks.
        sharding: how W is distributed over ranks.
        weight_transposed: whether parameters are W^T. They are the first ones then.
    """

    in_features: int
    sharding: LinearSharding
    weight_transposed: bool = False

    @property
    def backward_reads_parameters(self) -> bool:  # type: ignore[override]
        return self.weight_transposed

    @property
    def communicates(self) -> bool:  # type: ignore[override]
        return self.sharding.mode is not None

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        return not self.communicates

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.autocast or dtypes.first_parameter

    def operands(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        save: bool = True,
        gather: bool = True,
        codes: bool = False,
    ) -> tuple[gemm.Operand, gemm.Weight]:
        """In forward, input and weight as the GEMM takes them: checked, cast, and gathered.

        Every forward that computes this operation begins with it, those of fusions too.

        Args:
            save: whether to save what :meth:`op_backward` reads.
            gather: whether to gather the input where the GEMM takes that of all ranks.
            codes: whether a weight that is stored in FP8 comes as it is stored, not dequantised.

        Raises:
            ArgumentError: the weight was cleared, or is in FP8 and has no scale; its gradient would
                be rounded to FP8.
            InputError: the last dimension of the input is not the local ``in_features``, or its
                dtype is not one that linear operations take.
        """
        raise NotImplementedError

    def weight_grads(
        self, dy: Tensor, x: Tensor, ctx: OperationContext, scale: float | None = None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the parameters for autograd; None for those that are not needed."""
        raise NotImplementedError

    def saved_weight(self, ctx: OperationContext, *, again: bool = False) -> gemm.Weight:
        """In backward, the weight as :meth:`operands` returned it.

        Args:
            again: whether the output is computed again, and not the gradient of the input.
        """
        return gemm.weight_of(self.read_weights(ctx, ctx.saved_tensors[1:], again))

    def read_weights(
        self, ctx: OperationContext, saved: Sequence[Tensor], again: bool = False
    ) -> Sequence[Tensor]:
        """The weights that were saved, as :meth:`saved_weight` reads them.

        Torch's functions save a view or a cast of W, which keeps its data where others are put in
        their place by ``parameter.data = other``. Of a parameter that is W^T itself they save the
        parameter, so that their gradients are of the data that it has in backward.
        """
        if again or not self.weight_transposed:
            return saved
        return [p.t() if p.dtype == w.dtype else w for p, w in zip(ctx.parameters, saved)]

    def input_operand(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """In forward, the input in the dtype of autocast, or else in that of the weight.

        Raises:
            InputError: as of :meth:`operands`.
        """
        if x.shape[-1:] != (self.sharding.local_in_features,):
            self._refuse_input(x)
        if any_autocast():
            dtype = autocast_dtype(x.device) or dtype
        if x.dtype == dtype:
            return x
        if x.dtype not in COMPUTE_DTYPES:
            refuse_dtype(x, self)
        return x.to(dtype)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        return gemm.forward(*self.operands(ctx, input_))

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        x = ctx.saved_tensors[0]
        dx, sharding = None, self.sharding
        parallel = sharding.mode is not None
        if ctx.needs.input:
            dx = gemm.dgrad(grad_output, self.saved_weight(ctx))
            if parallel:
                dx = reduce_input_grad(dx, sharding)
        if parallel and x is not None:
            x = gather_input(x, sharding)
        return dx, self.weight_grads(grad_output, x, ctx)

    def _where(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def _refuse_input(self, x: Tensor) -> NoReturn:
        raise InputError.explained(
            "The last dimension of the input must be in_features",
            where=self._where(),
            received=f"shape {tuple(x.shape)}",
            remedy=f"Pass a tensor of shape (..., {self.sharding.local_in_features})",
        )
