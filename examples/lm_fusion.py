"""A fusion that a user of opfuser might write: what ``train_lm.py --register`` switches on.

Attention and the projection after it become one operation in both passes. It saves only the packed
queries, keys and values for backward and recomputes the attention there. Neither the output of the
attention nor its statistics are saved: ``dim`` values less per token and layer, for the time of one
more forward of the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import opfuser
from opfuser.op import compute_dtype

NAME = "recompute_attention"


class RecomputedAttentionLinear(opfuser.FusedOperation):
    """``y = attention(qkv) Wᵀ`` of packed qkv; saves qkv and nothing else."""

    def fuser_forward(
        self,
        basic_op_ctxs: list[opfuser.OperationContext],
        input_: Tensor,
        **unused: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        attention, linear = self.basic_ops
        dtype = compute_dtype(input_)
        qkv = input_.to(dtype)
        # Read at every call: the parameter may be replaced between calls.
        weight = linear.weight.to(dtype)
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(qkv)
            basic_op_ctxs[1].save_for_backward(weight)
        return F.linear(attention(qkv), weight), [(), ()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[opfuser.OperationContext],
        grad_output: Tensor,
        **unused: Any,
    ) -> tuple[Tensor | None, Sequence[Sequence[Tensor | None]], Sequence[Sequence[Tensor]]]:
        attention, linear = self.basic_ops
        (qkv,), (weight,) = (ctx.saved_tensors for ctx in basic_op_ctxs)
        dy = grad_output.to(weight.dtype)
        with torch.enable_grad():
            qkv = qkv.detach().requires_grad_(basic_op_ctxs[0].needs.input)
            h = attention(qkv)
        dw = dx = None
        if basic_op_ctxs[1].needs.parameters[0]:
            dw = linear.weight_grad(dy, h.detach())
        if qkv.requires_grad:
            (dx,) = torch.autograd.grad(h, qkv, dy @ weight)
        return dx, [(), (dw,)], [(), ()]


def refuses(
    attention: opfuser.DotProductAttention, linear: opfuser.BasicLinear, *, env: opfuser.Env
) -> opfuser.Refusal | None:
    """The reason to decline, which the plan shows."""
    if linear.tensor_parallel_mode is not None:
        return opfuser.Refusal("COMMUNICATION", "the projection is sharded")
    return None


FUSION = opfuser.Fusion(
    name=NAME,
    stage="joint",
    pattern=(opfuser.DotProductAttention, opfuser.BasicLinear),
    build=lambda attention, linear: RecomputedAttentionLinear((attention, linear)),
    refuses=refuses,
)


def register() -> opfuser.FusionHandle:
    """Registers the fusion before the built-in ones."""
    return opfuser.register_forward_backward_fusion(FUSION, prepend=True)
