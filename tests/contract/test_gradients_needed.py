"""Which operations run backward, and for which gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from tests.contract.tensors import against, rand


class Spy(of.BasicOperation):
    """Records what its contexts say; optionally has a parameter."""

    def __init__(self, parameter: bool = False) -> None:
        super().__init__()
        if parameter:
            self.weight = nn.Parameter(torch.full((8,), 2.0, dtype=torch.float64))
        self.forwards: list[bool] = []
        self.needs: list[tuple[bool, tuple[bool, ...]]] = []

    def op_forward(self, ctx: of.OperationContext, input_: Tensor, **unused: Any) -> Tensor:
        self.forwards.append(ctx.requires_grad)
        if ctx.requires_grad:
            ctx.save_for_backward(input_)
        return input_ * self.weight if self._parameters else input_ * 1

    def op_backward(self, ctx: of.OperationContext, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        self.needs.append((ctx.needs.input, ctx.needs.parameters))
        if not self._parameters:
            return grad_output, ()
        return grad_output * self.weight, ((grad_output * x).sum(0),)


@pytest.mark.parametrize("input_grad", [False, True])
@pytest.mark.parametrize("trained", [None, 1, 2])
def test_which_operations_need_backward(trained: int | None, input_grad: bool) -> None:
    """Hazard 10: gradients follow the plan, and not what saved tensors say of themselves."""
    ops = [Spy(), Spy(parameter=True), Spy(parameter=True), Spy()]
    model = of.Sequential(*ops)
    for n in (1, 2):
        ops[n].weight.requires_grad_(trained == n)
    first = 0 if input_grad else trained if trained in (1, 2) else 4
    x = rand(3, 8, grad=input_grad)
    (y,) = against(model, lambda p, x: x * p["1.weight"] * p["2.weight"], x)
    assert [op.forwards for op in ops] == [[n >= first] for n in range(4)]
    assert y.requires_grad == (first < 4)
    for n, op in enumerate(ops):
        own = (trained == n,) if n in (1, 2) else ()
        assert op.needs == ([(input_grad or n > first, own)] if n >= first else [])
