"""Hazards 3 and 15: parameters passed, parametrized, made by hooks or shared.

Replaced ones: ``check_op`` and ``check_fusion`` try that for each operation and fusion.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune

import opfuser
from opfuser.errors import ArgumentError
from tests.engine.toys import F64, Square, Times, grads, randn, same


def test_functional_call_with_tensors_made_by_other_operations() -> None:
    """Also where the parameter itself needs no gradient."""
    seq, x = opfuser.Sequential(Times(), Square()), randn(2, 3)
    scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
    expected = (x * scale * seq[0].w) ** 2
    y = functional_call(seq, {"0.w": scale * seq[0].w}, x)
    same(y, expected)
    same(grads(y, [scale, seq[0].w]), grads(expected, [scale, seq[0].w]))
    seq.requires_grad_(False)
    for _ in range(2):
        assert not seq(x).requires_grad
        y = functional_call(seq, {"0.w": scale.expand(3)}, x)
        same(grads(y, [scale]), grads((x * scale) ** 2, [scale]))


@pytest.mark.parametrize("between", [None, [], [nn.Tanh()]], ids=["weight", "operation", "groups"])
def test_hazard_15_what_occurs_twice_collects_all_its_gradients(between: Any) -> None:
    """A weight of two operations; an operation of one group, or of two."""
    one = two = opfuser.Linear(3, 3, dtype=F64)
    if between is None:
        two = opfuser.Linear(3, 3, dtype=F64)
        two.weight = one.weight
    seq, x = opfuser.Sequential(one, Square(), *(between or []), two), randn(2, 3, grad=True)
    h = nn.functional.linear(x, one.weight, one.bias) ** 2
    expected = nn.functional.linear(torch.tanh(h) if between else h, two.weight, two.bias)
    wrt = [x, *seq.parameters()]
    assert len(wrt) == (4 if between is None else 3)
    same(grads(seq(x), wrt), grads(expected, wrt))


MADE: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: opfuser.Linear(3, 3, dtype=F64),
    "BasicLinear": lambda: opfuser.BasicLinear(3, 3, dtype=F64),
    "Bias": lambda: opfuser.Bias(3, dtype=F64),
}
PARAMETRIzED: dict[str, Callable[[nn.Module, str], Any]] = {
    "custom": lambda m, name: parametrize.register_parametrization(m, name, nn.Softplus()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
}


@pytest.mark.parametrize(
    ("where", "kind", "when"),
    [
        ("Linear", "custom", "before"),
        ("Linear", "weight_norm", "after"),
        ("BasicLinear", "spectral_norm", "after"),
        ("Bias", "weight_norm", "before"),
    ],
)
def test_parametrize(where: str, kind: str, when: str) -> None:
    """Hazard 3: gradients reach the originals, wherever the first call is."""
    ours = MADE[where]()
    name = "bias" if where == "Bias" else "weight"
    with torch.no_grad():
        getattr(ours, name).copy_(randn(*getattr(ours, name).shape))
    seq, x = opfuser.Sequential(Times(), ours, Square()), randn(2, 3, grad=True)
    if when == "after":
        seq(x)
    PARAMETRIzED[kind](ours, name)
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


def test_parametrized_operation_in_copies_and_state_dicts() -> None:
    seq, x = opfuser.Sequential(opfuser.Linear(3, 3, dtype=F64), Square()), randn(2, 3)
    parametrizations.weight_norm(seq[0])
    assert sorted(seq.state_dict()) == [
        "0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1",
    ]  # fmt: skip
    twin = copy.deepcopy(seq)
    same(twin(x), seq(x))
    twin.load_state_dict(seq.state_dict())
    same(twin(x), seq(x))


def test_a_part_is_not_parametrized_on_its_own() -> None:
    linear = opfuser.Linear(3, 3)
    parametrize.register_parametrization(linear.basic_ops[0], "weight", nn.Identity())
    with pytest.raises(ArgumentError) as error:
        linear(torch.ones(2, 3))
    assert str(error.value) == (
        "The parameters of a compound are parametrized on the compound (Linear). Received: a "
        "parametrization of one of its basic_ops. Register it on the compound itself."
    )


# Computed by a forward pre-hook, as torch.nn.utils.prune and its kin do.

PAIRS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "RMSNorm": (opfuser.RMSNorm, lambda n, dtype: nn.RMSNorm(n, eps=1e-5, dtype=dtype)),
    "Linear": (
        lambda n, dtype: opfuser.Linear(n, n, dtype=dtype),
        lambda n, dtype: nn.Linear(n, n, dtype=dtype),
    ),
}
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "prune": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch recommends parametrizations instead
@pytest.mark.parametrize(
    ("pair", "change"),
    [*((pair, "prune") for pair in PAIRS), ("Linear", "weight_norm"), ("Linear", "spectral_norm")],
)
def test_gradients_of_parameters_made_by_hooks(pair: str, change: str) -> None:
    ours, theirs = (make(8, dtype=F64) for make in PAIRS[pair])
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    for module in (ours, theirs):
        torch.manual_seed(1)
        CHANGES[change](module)
    x = randn(4, 8)
    for _ in range(2):
        opfuser.Sequential(ours, opfuser.GELU())(x).sin().sum().backward()
        nn.GELU("tanh")(theirs(x)).sin().sum().backward()
    expected = dict(theirs.named_parameters())
    assert dict(ours.named_parameters()).keys() == expected.keys()
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param.grad, expected[name].grad, rtol=1e-9, atol=1e-12)
