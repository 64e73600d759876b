"""Right operations, whose steps tests replace one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opfuser.op import BasicOperation, OperationContext


class Scaled(BasicOperation):
    """``y = w x²``, with one step after the other open to being spoilt."""

    class Saved(NamedTuple):
        x: Tensor
        w: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, 2.0, -1.0]))

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        if ctx.requires_grad:
            self.save(ctx, input_)
        return self.compute(input_)

    def save(self, ctx: OperationContext, x: Tensor) -> None:
        ctx.save_for_backward(x, self.w)

    def compute(self, x: Tensor) -> Tensor:
        return x * x * self.w

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = 2 * grad_output * x * w if ctx.needs.input else None
        dw = None
        if ctx.needs.parameters[0]:
            dw = (grad_output * x * x).reshape(-1, 3).sum(0)
        return dx, (dw,)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self.w * input_.square()


def spoilt(**methods: Callable[..., Any]) -> Scaled:
    """The operation with some of its methods replaced."""
    return type("Scaled", (Scaled,), methods)()
