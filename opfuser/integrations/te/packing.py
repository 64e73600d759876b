"""From the layouts of Transformer Engine's attention to that of ours, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opfuser import BasicOperation, OperationContext
from opfuser.errors import ArgumentError, InputError


class DeinterleaveHeads(BasicOperation):
    """Packed queries, keys and values in the order of :class:`opfuser.DotProductAttention`.

    Of K groups of H / K query heads, a key head and a value head each makes all query heads, then
    all key heads, then all value heads: what ``qkv_weight_interleaved=True`` needs, whose rows
    cannot change places in a weight that is shared.

    Shapes: input and output ``(..., (H + 2 K) D)``. Saves nothing. One copy in each pass.

    Args:
        num_heads: H.
        num_kv_heads: K.

    Raises:
        ArgumentError: H is not a positive multiple of K.
        InputError: in forward, if the last dimension is not a multiple of H + 2 K.
    """

    class Settings(NamedTuple):
        num_heads: int
        num_kv_heads: int

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.make_settings()

    def make_settings(self) -> DeinterleaveHeads.Settings:
        heads, groups = self.num_heads, self.num_kv_heads
        if groups < 1 or heads < 1 or heads % groups:
            raise ArgumentError.explained(
                "num_heads must be a positive multiple of num_kv_heads",
                where="DeinterleaveHeads",
                received=f"num_heads={heads}, num_kv_heads={groups}",
            )
        return self.Settings(heads, groups)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        return self._pack(input_, *self.frozen_settings(ctx))

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[()]]:
        if not ctx.needs.input:
            return None, ()
        heads, groups = self.frozen_settings(ctx)
        each = grad_output.unflatten(-1, (heads + 2 * groups, -1))
        parts = each.split([heads, groups, groups], -2)
        return torch.cat([t.unflatten(-2, (groups, -1)) for t in parts], -2).flatten(-3), ()

    def _pack(self, x: Tensor, heads: int, groups: int) -> Tensor:
        if not x.dim() or x.shape[-1] % (heads + 2 * groups):
            raise InputError.explained(
                "The last dimension must hold heads of one size",
                where="DeinterleaveHeads",
                received=f"shape {tuple(x.shape)} for {heads + 2 * groups} heads",
            )
        each = heads // groups
        size = x.shape[-1] // (heads + 2 * groups)
        parts = x.unflatten(-1, (groups, each + 2, size)).split([each, 1, 1], -2)
        return torch.cat([t.flatten(-3, -2) for t in parts], -2).flatten(-2)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self._pack(input_, *self.make_settings())

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.num_kv_heads}"


class SwapSequenceAndBatch(BasicOperation):
    """``y = x.transpose(0, 1)``: a view, (sequence, batch, ...) of (batch, sequence, ...).

    Saves nothing.

    Raises:
        InputError: in forward, if x has fewer than two dimensions.
    """

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        return self.reference(input_)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[()]]:
        return (grad_output.transpose(0, 1) if ctx.needs.input else None), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        if input_.dim() < 2:
            raise InputError.explained(
                "The input must have the dimensions of sequence and batch",
                where="SwapSequenceAndBatch",
                received=f"shape {tuple(input_.shape)}",
            )
        return input_.transpose(0, 1)
