"""Parameters that are not where they were: functional_call, parametrisations, replacement."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import opfuser
from tests.engine.toys import F64, Square, Times, grads, model, randn, run, same


def test_functional_call() -> None:
    """Values of, and gradients to, the tensors that are substituted; the module is as before."""
    seq, x = model(), randn(2, 3, grad=True)
    expected = run(seq, x)
    others = {n: randn(*p.shape, grad=True) for n, p in seq.named_parameters()}
    for _ in range(2):
        y = functional_call(seq, others, x)
        twin = copy.deepcopy(seq)
        twin.load_state_dict(others)
        wrt = [x, *twin.parameters()]
        same(y, twin(x))
        same(grads(y, [x, *others.values()]), grads(twin(x), wrt))
        same(run(seq, x), expected)
    seq.zero_grad()
    functional_call(seq, others, x).sum().backward()
    assert all(p.grad is None for p in seq.parameters())


def test_functional_call_with_tensors_made_by_other_operations() -> None:
    seq, x = opfuser.Sequential(Times(), Square()), randn(2, 3)
    scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
    y = functional_call(seq, {"0.w": scale * seq[0].w}, x)
    expected = (x * scale * seq[0].w) ** 2
    same(y, expected)
    same(grads(y, [scale, seq[0].w]), grads(expected, [scale, seq[0].w]))


def test_functional_call_without_gradients() -> None:
    seq, x = opfuser.Sequential(Times(), Square()).requires_grad_(False), randn(2, 3)
    w = randn(3, grad=True)
    assert not seq(x).requires_grad
    y = functional_call(seq, {"0.w": w}, x)
    same(grads(y, [w]), grads((x * w) ** 2, [w]))
    assert not seq(x).requires_grad


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["custom", "weight_norm", "spectral_norm"])
@pytest.mark.parametrize("where", ["Linear", "BasicLinear", "Bias"])
def test_parametrize(when: str, kind: str, where: str) -> None:
    """Gradients reach the originals."""
    if where == "Bias" and kind == "spectral_norm":
        return  # is for matrices
    torch.manual_seed(0)
    ours: nn.Module = {
        "Linear": lambda: opfuser.Linear(3, 3, dtype=F64),
        "BasicLinear": lambda: opfuser.BasicLinear(3, 3, dtype=F64),
        "Bias": lambda: opfuser.Bias(3, dtype=F64),
    }[where]()
    name = "bias" if where == "Bias" else "weight"
    with torch.no_grad():
        getattr(ours, name).copy_(randn(*getattr(ours, name).shape))
    seq, x = opfuser.Sequential(Times(), ours, Square()), randn(2, 3, grad=True)
    if when == "after":
        seq(x)
    change = {
        "custom": lambda m: parametrize.register_parametrization(m, name, nn.Softplus()),
        "weight_norm": lambda m: parametrizations.weight_norm(m, name),
        "spectral_norm": lambda m: parametrizations.spectral_norm(m, name),
    }[kind]
    change(ours)
    seq.eval()  # spectral_norm iterates at every call in training
    for _ in range(2):
        y = seq(x)
        value = getattr(ours, name)
        base = x * seq[0].w
        bias = 0 if where == "BasicLinear" else ours.bias
        expected = (base + value if where == "Bias" else base @ value.t() + bias) ** 2
        same(y, expected)
        wrt = [x, *seq.parameters()]
        assert len(wrt) >= 3
        same(grads(y, wrt), grads(expected, wrt))
    parametrize.remove_parametrizations(ours, name)
    same(seq(x), expected)


def test_parametrised_operation_in_copies_and_state_dicts() -> None:
    seq, x = opfuser.Sequential(opfuser.Linear(3, 3, dtype=F64), Square()), randn(2, 3)
    parametrizations.weight_norm(seq[0])
    assert sorted(seq.state_dict()) == [
        "0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1",
    ]  # fmt: skip
    twin = copy.deepcopy(seq)
    same(twin(x), seq(x))
    twin.load_state_dict(seq.state_dict())
    same(twin(x), seq(x))


def test_replaced_parameters_count_at_the_next_call() -> None:
    seq, x = opfuser.Sequential(opfuser.Linear(3, 3, dtype=F64), Times()), randn(2, 3, grad=True)
    run(seq, x)
    seq[0].weight = nn.Parameter(randn(3, 3))
    seq[0].basic_ops[1].bias = nn.Parameter(randn(3))
    seq[1].w = nn.Parameter(randn(3))
    wrt = [x, seq[0].weight, seq[0].bias, seq[1].w]
    assert [id(p) for p in seq.parameters()] == [id(p) for p in wrt[1:]]
    expected = (x @ seq[0].weight.t() + seq[0].bias) * seq[1].w
    same(seq(x), expected)
    same(grads(seq(x), wrt), grads(expected, wrt))


def test_a_parameter_replaced_between_forward_and_backward() -> None:
    seq, x = opfuser.Sequential(opfuser.Linear(3, 3, dtype=F64), Times()), randn(2, 3, grad=True)
    old = [seq[0].weight, seq[0].bias, seq[1].w]
    expected = (x @ old[0].t() + old[1]) * old[2]
    y = seq(x)
    seq[0].weight = nn.Parameter(randn(3, 3))
    seq[0].bias = None
    seq[1].w = nn.Parameter(randn(3))
    same(grads(y, [x, *old]), grads(expected, [x, *old]))


def test_a_cleared_bias() -> None:
    linear, x = opfuser.Linear(3, 3, dtype=F64), randn(2, 3)
    seq = opfuser.Sequential(linear, Square())
    seq(x)
    linear.bias = None
    same(seq(x), (x @ linear.weight.t()) ** 2)
    assert [n for n, _ in seq.named_parameters()] == ["0.weight"]
