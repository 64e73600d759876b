"""Differentiating twice through a sequence raises one clear error, and never drops a term."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from opfuser.errors import DoubleBackwardError
from tests.contract.tensors import F64, close, fill, leaf, rand

MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: of.Sequential(of.Linear(8, 8, **F64)),
    "nothing saved": lambda: of.Sequential(of.ConstantScale(2.0)),
    "curved": lambda: of.Sequential(of.Linear(8, 8, **F64), of.GELU(), of.RMSNorm(8, **F64)),
    "operation alone": lambda: of.Linear(8, 8, **F64),
    "between plain modules": lambda: of.Sequential(nn.Tanh(), of.SiLU(), nn.Tanh()),
}


def square(y: Tensor) -> Tensor:
    return y.square().sum()


# The gradient of a sum of scaled values is a constant: there is nothing to differentiate.
CASES = [(model, square) for model in MODELS]
CASES += [(model, torch.sum) for model in MODELS if model != "nothing saved"]


@pytest.mark.parametrize(("model", "loss"), CASES)
def test_gradient_penalty(model: str, loss: Callable[[Tensor], Tensor]) -> None:
    seq, x = fill(MODELS[model]()), rand(3, 8, grad=True)
    (g,) = torch.autograd.grad(loss(seq(x)), x, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="differentiated only once"):
        g.square().sum().backward()


@pytest.mark.parametrize(("model", "loss"), CASES)
def test_gradient_penalty_beside_another_loss(model: str, loss: Callable[[Tensor], Tensor]) -> None:
    """Where the other loss has gradients, a penalty that has none would be dropped in silence."""
    seq, x = fill(MODELS[model]()), rand(3, 8, grad=True)
    y = loss(seq(x))
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="differentiated only once"):
        (y + g.square().sum()).backward()


def test_gradient_of_a_parameter() -> None:
    seq, x = fill(of.Sequential(of.Linear(8, 8, **F64), of.SiLU())), rand(3, 8)
    (g,) = torch.autograd.grad(seq(x).sum(), seq[0].weight, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        g.sum().backward()


def test_create_graph_alone_does_no_harm() -> None:
    seq, x = fill(of.Sequential(of.Linear(8, 8, **F64), of.SiLU())), rand(3, 8, grad=True)
    grads = torch.autograd.grad(seq(x).square().sum(), [x, *seq.parameters()], create_graph=True)
    leaves = [leaf(x), *map(leaf, seq.parameters())]
    want = torch.nn.functional.silu(torch.nn.functional.linear(*leaves)).square().sum()
    for got, expected in zip(grads, torch.autograd.grad(want, leaves)):
        close(got, expected)


def test_the_error_says_what_to_do() -> None:
    x = rand(3, 8, grad=True)
    (g,) = torch.autograd.grad(of.SiLU()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"reference\(\)"):
        g.sum().backward()
