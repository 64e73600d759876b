"""For each built-in fusion an example, and its parts called without the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from opfuser import AddExtraInput, BasicLinear, Bias, ConstantScale, MakeExtraOutput
from opfuser.basic.activation import SiLU
from opfuser.basic.layer_norm import LayerNorm
from opfuser.basic.rms_norm import RMSNorm
from opfuser.op import FusibleOperation, GradNeeds, OperationContext

EXAMPLES: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "forward_linear_scale_add": (
        lambda: [BasicLinear(6, 4), ConstantScale(0.3), AddExtraInput()],
        4,
    ),
    "forward_linear_bias_add": (lambda: [BasicLinear(6, 4), Bias(4), AddExtraInput()], 4),
    "forward_linear_bias_activation": (lambda: [BasicLinear(6, 4), Bias(4)], 0),
    "forward_add_rms_norm": (lambda: [AddExtraInput(), MakeExtraOutput(), RMSNorm(6)], 6),
    "forward_add_layer_norm": (lambda: [AddExtraInput(), MakeExtraOutput(), LayerNorm(6)], 6),
    "backward_add_rms_norm": (lambda: [MakeExtraOutput(), RMSNorm(6)], 0),
    "backward_add_layer_norm": (lambda: [MakeExtraOutput(), LayerNorm(6)], 0),
    "backward_linear_add": (lambda: [MakeExtraOutput(), BasicLinear(6, 4)], 0),
    "backward_linear_scale": (lambda: [BasicLinear(6, 4), ConstantScale(0.3)], 0),
    "backward_activation_bias": (lambda: [Bias(6), SiLU()], 0),
}
"""For each fusion what it covers, for inputs of width 6, and the width of the extra input."""


def filled(ops: list[nn.Module]) -> list[nn.Module]:
    with torch.no_grad():
        for op in ops:
            for p in op.parameters():
                p.copy_(torch.randn(p.shape))
    return ops


def extras(name: str, *rows: int) -> list[Tensor]:
    width = EXAMPLES[name][1]
    return [torch.randn(*rows, width)] if width else []


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
            torch.ones(3, 6) if x is None else x,
            basic_op_extra_inputs=[more if isinstance(o, AddExtraInput) else [] for o in ops],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[{} for _ in ops],
        )
    return y, ctxs
