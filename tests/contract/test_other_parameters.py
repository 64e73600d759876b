"""Hazards 3 and 15: parameters replaced, passed or shared; they are read at every call.

In sequences whose operations are fused. Parametrised ones: tests/engine/test_other_parameters.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, against, close, fill, leaf, rand


def model() -> of.Sequential:
    return fill(of.Sequential(of.RMSNorm(6, **F64), of.Linear(6, 4, **F64), of.ConstantScale(0.5)))


def formula(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.rms_norm(x, (6,), p["0.weight"], 1e-5)
    return 0.5 * F.linear(h, p["1.weight"], p["1.bias"])


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "1.bias"])
def test_hazard_03_parameter_replaced_after_the_first_call(name: str) -> None:
    seq, x = model(), rand(5, 6, grad=True)
    against(seq, formula, x)
    seq.zero_grad()
    owner, _, attribute = name.rpartition(".")
    old = seq.get_parameter(name)
    setattr(seq.get_submodule(owner), attribute, nn.Parameter(rand(*old.shape)))
    against(seq, formula, x)
    assert old.grad is None, "the gradient went to the parameter that was replaced"


def test_hazard_03_parameter_replaced_between_forward_and_backward() -> None:
    seq, x, dy = model(), rand(5, 6, grad=True), rand(5, 4)
    y = seq(x)
    old = dict(seq.named_parameters())
    tensors = {key: leaf(p) for key, p in old.items()}
    seq[0].weight = nn.Parameter(rand(6))
    seq[1].weight = nn.Parameter(rand(4, 6))
    y.backward(dy)
    x64 = leaf(x)
    formula(tensors, x64).backward(dy)
    close(x.grad, x64.grad)
    for key, p in old.items():
        close(p.grad, tensors[key].grad)
    assert seq[1].weight.grad is None


def test_hazard_03_functional_call() -> None:
    """With tensors that are no leaves: gradients flow on to what they are made of."""
    seq, x = model(), rand(5, 6, grad=True)
    seq(x)
    roots = {key: rand(*p.shape, grad=True) for key, p in seq.named_parameters()}

    def call(x: Tensor) -> Tensor:
        return functional_call(seq, {key: root * 2 for key, root in roots.items()}, (x,))

    against(
        call,
        lambda p, x: formula({key: 2 * root for key, root in p.items()}, x),
        x,
        parameters=roots.items(),
    )
    assert all(p.grad is None for p in seq.parameters())


def _shared_weight() -> nn.Module:
    first, second = fill(of.Linear(8, 8, **F64)), fill(of.Linear(8, 8, **F64))
    second.weight = first.weight
    assert second.weight is first.weight
    return of.Sequential(first, of.GELU(), second)


def _repeated(*between: nn.Module) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        norm, linear = fill(of.RMSNorm(8, **F64)), fill(of.Linear(8, 8, **F64))
        return of.Sequential(norm, linear, *between, of.GELU(), norm, linear)

    return make


def _of_shared(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.gelu(F.linear(x, p["0.weight"], p["0.bias"]), approximate="tanh")
    return F.linear(h, p["0.weight"], p["2.bias"])


def _of_repeated(p: dict[str, Tensor], x: Tensor) -> Tensor:
    for n in range(2):
        x = F.gelu(x, approximate="tanh") if n else x
        x = F.linear(F.rms_norm(x, (8,), p["0.weight"], 1e-5), p["1.weight"], p["1.bias"])
    return x


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (_shared_weight, _of_shared),
        (_repeated(), _of_repeated),
        (_repeated(nn.Identity()), _of_repeated),
    ],
    ids=["weight", "operation", "operation of two groups"],
)
def test_hazard_15_what_occurs_twice_collects_all_its_gradients(
    make: Callable[[], nn.Module], want: Callable[..., Tensor]
) -> None:
    seq = make()
    assert len(list(seq.parameters())) == 3
    against(seq, want, rand(3, 8, grad=True))
    assert all(torch.isfinite(p.grad).all() for p in seq.parameters())
