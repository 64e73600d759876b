"""Differentiating twice through a sequence raises one clear error, and never drops a term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from opfuser.errors import DoubleBackwardError
from tests.contract.tensors import F64, fill, rand


def square(y: Tensor) -> Tensor:
    return y.square().sum()


class Squared(of.BasicOperation):
    """Keeps its input where nobody sees it but itself."""

    def op_forward(self, ctx: of.OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        ctx.inputs = [input_]
        return input_.square()

    def op_backward(self, ctx: of.OperationContext, grad_output: Tensor) -> Any:
        return 2 * ctx.inputs[0] * grad_output, ()


# The gradient of a sum of scaled values is a constant: there is nothing to differentiate.
CASES: dict[str, tuple[Callable[[], nn.Module], list[Callable[[Tensor], Tensor]]]] = {
    "linear": (lambda: of.Sequential(of.Linear(8, 8, **F64)), [square, torch.sum]),
    "nothing saved": (lambda: of.Sequential(of.ConstantScale(2.0)), [square]),
    "curved": (
        lambda: of.Sequential(of.Linear(8, 8, **F64), of.GELU(), of.RMSNorm(8, **F64)),
        [torch.sum],
    ),
    "a tensor in a context": (lambda: of.Sequential(Squared()), [square, torch.sum]),
    "operation alone": (lambda: of.Linear(8, 8, **F64), [square]),
    "between plain modules": (lambda: of.Sequential(nn.Tanh(), of.SiLU(), nn.Tanh()), [torch.sum]),
}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradient_penalty(name: str, beside: bool) -> None:
    """Where another loss has gradients, a penalty that has none would be dropped in silence."""
    make, losses = CASES[name]
    for loss in losses:
        seq, x = fill(make()), rand(3, 8, grad=True)
        y = loss(seq(x))
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        with pytest.raises(DoubleBackwardError, match=r"differentiated only once.*reference\(\)"):
            (g.square().sum() + (y if beside else 0)).backward()


def test_gradient_of_a_parameter() -> None:
    seq, x = fill(of.Sequential(of.Linear(8, 8, **F64), of.SiLU())), rand(3, 8)
    (g,) = torch.autograd.grad(seq(x).sum(), seq[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        g.sum().backward()
