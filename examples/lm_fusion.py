"""A fusion that a user of opfuser might write: what ``train_lm.py --register`` switches on.

SwiGLU and the projection after it become one operation in both passes. It keeps only the input of
the SwiGLU for backward and computes the activation again there, so that the input of the projection
need not be saved: ``ffn_dim`` values per token and layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import opfuser
from opfuser.op import compute_dtype

NAME = "recompute_swiglu"


class RecomputedSwiGLULinear(opfuser.FusedOperation):
    """``y = (silu(gate) * up) Wᵀ`` of a packed ``[gate, up]``; saves its input and nothing else."""

    def fuser_forward(
        self,
        basic_op_ctxs: list[opfuser.OperationContext],
        input_: Tensor,
        **unused: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        dtype = compute_dtype(input_)
        gate_up = input_.to(dtype)
        # Read at every call: the parameter may be replaced between calls.
        weight = self.basic_ops[1].weight.to(dtype)
        gate, up = gate_up.chunk(2, dim=-1)
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(gate_up)
            basic_op_ctxs[1].save_for_backward(weight)
        return F.linear(F.silu(gate).mul_(up), weight), [(), ()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[opfuser.OperationContext],
        grad_output: Tensor,
        **unused: Any,
    ) -> tuple[Tensor | None, Sequence[Sequence[Tensor | None]], Sequence[Sequence[Tensor]]]:
        swiglu, linear = basic_op_ctxs
        gate_up, weight = swiglu.saved_tensors[0], linear.saved_tensors[0]
        dy = grad_output.to(weight.dtype)
        gate, up = gate_up.chunk(2, dim=-1)
        silu = F.silu(gate)
        dw = dx = None
        if linear.needs.parameters[0]:
            dw = self.basic_ops[1].weight_grad(dy, silu * up)
        if swiglu.needs.input:
            dh = dy @ weight
            dgate = torch.ops.aten.silu_backward(dh * up, gate)
            dx = torch.cat([dgate, dh.mul_(silu)], -1)
        return dx, [(), (dw,)], [(), ()]


def refuses(
    swiglu: opfuser.SwiGLU, linear: opfuser.BasicLinear, *, env: opfuser.Env
) -> opfuser.Refusal | None:
    """What the kernel above does not handle; the plan shows the reason."""
    if swiglu.glu_interleave_size is not None:
        return opfuser.Refusal("LAYOUT", "gate and up are interleaved")
    if linear.tensor_parallel_mode is not None:
        return opfuser.Refusal("COMMUNICATION", "the projection is sharded")
    return None


FUSION = opfuser.Fusion(
    name=NAME,
    stage="joint",
    pattern=(opfuser.SwiGLU, opfuser.BasicLinear),
    build=lambda swiglu, linear: RecomputedSwiGLULinear((swiglu, linear)),
    refuses=refuses,
)


def register() -> opfuser.FusionHandle:
    """Adds the fusion ahead of the built-in ones."""
    return opfuser.register_forward_backward_fusion(FUSION, prepend=True)
