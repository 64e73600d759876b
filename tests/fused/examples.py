"""For each built-in fusion an example, and its parts called without the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from opfuser import (
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    CrossEntropy,
    Dropout,
    MakeExtraOutput,
    QKNorm,
    RotaryEmbedding,
    SwiGLU,
)
from opfuser.basic.activation import SiLU
from opfuser.basic.layer_norm import LayerNorm
from opfuser.basic.rms_norm import RMSNorm
from opfuser.fusion import Fusion, Repeated
from opfuser.op import FusedOperation, FusibleOperation, GradNeeds, OperationContext


def asking(op: nn.Module) -> nn.Module:
    """The operation with the flag that asks for its block to be computed again in backward."""
    op.recompute_mlp = True  # type: ignore[assignment]  # any attribute may be one
    return op


def residual_mlp(activation: nn.Module) -> list[nn.Module]:
    norm = [AddExtraInput(), MakeExtraOutput(), RMSNorm(6)]
    return [*norm, BasicLinear(6, 10), Bias(10), activation, BasicLinear(5, 4), Bias(4)]


EXAMPLES: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "linear_cross_entropy": (lambda: [BasicLinear(6, 9), CrossEntropy(reduction="sum")], 0),
    "recompute_mlp": (lambda: residual_mlp(SwiGLU()), 6),
    "recompute_mlp_where_asked": (lambda: residual_mlp(asking(SwiGLU())), 6),
    "activation_linear_add": (
        lambda: [Bias(6), SiLU(), BasicLinear(6, 4), Bias(4), AddExtraInput()],
        4,
    ),
    "activation_linear": (lambda: [Bias(6), SiLU(), BasicLinear(6, 4), Bias(4)], 0),
    "pointwise_norm": (
        lambda: [Bias(6), Dropout(0.3), AddExtraInput(), MakeExtraOutput(), LayerNorm(6)],
        6,
    ),
    "pointwise_chain": (lambda: [Bias(6), SiLU(), Dropout(0.3), AddExtraInput()], 6),
    "norm_linear": (
        lambda: [AddExtraInput(), MakeExtraOutput(), LayerNorm(6), BasicLinear(6, 4), Bias(4)],
        6,
    ),
    "forward_qk_norm_rotary": (lambda: [QKNorm(1, 2), RotaryEmbedding(1, 2)], 0),
    "forward_linear_scale_add": (
        lambda: [BasicLinear(6, 4), ConstantScale(0.3), AddExtraInput()],
        4,
    ),
    "forward_linear_bias_add": (lambda: [BasicLinear(6, 4), Bias(4), AddExtraInput()], 4),
    "forward_add_rms_norm": (lambda: [AddExtraInput(), MakeExtraOutput(), RMSNorm(6)], 6),
    "forward_add_layer_norm": (lambda: [AddExtraInput(), MakeExtraOutput(), LayerNorm(6)], 6),
    "forward_linear_bias_activation": (lambda: [BasicLinear(6, 4), Bias(4)], 0),
    "backward_qk_norm_rotary": (lambda: [QKNorm(1, 2), RotaryEmbedding(1, 2)], 0),
    "backward_add_rms_norm": (lambda: [MakeExtraOutput(), RMSNorm(6)], 0),
    "backward_add_layer_norm": (lambda: [MakeExtraOutput(), LayerNorm(6)], 0),
    "backward_linear_add": (lambda: [MakeExtraOutput(), BasicLinear(6, 4)], 0),
    "backward_linear_scale": (lambda: [BasicLinear(6, 4), ConstantScale(0.3)], 0),
    "backward_activation_bias": (lambda: [Bias(6), SiLU()], 0),
}
"""What each fusion covers, for inputs of width 6, and the width of the term that it adds or 0."""

ONLY_ON = {
    "pointwise_chain": "cuda",
    "pointwise_norm": "cuda",
}
"""Fusions that are for one type of device."""

OF_CHAINS = {"pointwise_chain", "pointwise_norm"}
"""Fusions that only kernels make sense of: not on a CPU, but in the interpreter; not in float64."""


def filled(ops: list[nn.Module]) -> list[nn.Module]:
    with torch.no_grad():
        for op in ops:
            for p in op.parameters():
                p.copy_(torch.randn(p.shape))
    return ops


def extras(name: str, *rows: int) -> list[Tensor]:
    if name == "linear_cross_entropy":
        return [torch.randint(9, rows)]
    width = EXAMPLES[name][1]
    return [torch.randn(*rows, width)] if width else []


def built(fusion: Fusion, ops: Sequence[nn.Module]) -> FusedOperation:
    """The fused operation in place of ``ops``, one for each element of the fusion's pattern."""
    if isinstance(fusion.pattern[0], Repeated):
        n = len(ops) - len(fusion.pattern) + 1
        return fusion.build(tuple(ops[:n]), *ops[n:])
    return fusion.build(*ops)


def call(
    op: FusibleOperation,
    ops: Sequence[nn.Module],
    more: Sequence[Tensor],
    *,
    x: Tensor | None = None,
    requires_grad: bool = True,
) -> tuple[Tensor, list[OperationContext]]:
    """The output of ``op`` and the contexts of ``ops``, which it covers, after its forward."""
    ctxs = []
    for part in ops:
        ctx = OperationContext()
        ctx.requires_grad = requires_grad
        ctx.needs = GradNeeds(True, tuple(True for _ in part.parameters()), ())
        ctxs.append(ctx)
    with torch.no_grad():
        y, _ = op.fuser_forward(
            ctxs,
            torch.ones(1, 3, 6) if x is None else x,
            basic_op_extra_inputs=[list(more) if isinstance(o, AddExtraInput) else [] for o in ops],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[{} for _ in ops],
        )
    return y, ctxs
