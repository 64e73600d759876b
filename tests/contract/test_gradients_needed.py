"""Which operations run backward, and for which gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, against, fill, rand


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


@pytest.mark.parametrize(("input_grad", "weight_grad"), [(True, False), (False, True), (1, 1)])
@pytest.mark.parametrize("leading", [0, 2])
def test_hazard_10_gradients_follow_the_plan_not_saved_tensors(
    input_grad: bool, weight_grad: bool, leading: int
) -> None:
    """What ``requires_grad`` says of a saved tensor means nothing inside of a Function."""
    head: list[nn.Module] = [of.ConstantScale(0.5), of.SiLU()][:leading]
    seq = fill(of.Sequential(*head, of.BasicLinear(8, 8, **F64), of.SiLU(), Spy(True)))
    seq.requires_grad_(bool(weight_grad))

    def formula(p: dict[str, Tensor], x: Tensor) -> Tensor:
        a = x * 1.5
        for op in head:
            a = a * 0.5 if isinstance(op, of.ConstantScale) else F.silu(a)
        w, v = (value for name, value in p.items() if name.endswith("weight"))
        return F.silu(F.linear(a, w)) * v

    # The input of the sequence is no leaf.
    x, named = rand(3, 8, grad=bool(input_grad)), seq.named_parameters()
    (y,) = against(lambda x: seq(x * 1.5), formula, x, parameters=named)
    assert y.requires_grad
