"""A parameter in the place of another one is no change of its operation; what differs is noticed.

So it is when wrappers swap parameters around every call: tests/distributed/test_sharded_host.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.core.change_tracking import Clock
from tests.engine.toys import F64, Times, grads, randn, same


def model() -> opfuser.Sequential:
    linear = opfuser.Linear(3, 3, bias=False, dtype=F64)
    return opfuser.Sequential(Times(), opfuser.Bias(3, dtype=F64), linear)


def check(seq: opfuser.Sequential, x: Tensor) -> None:
    """Values, and the gradients of the parameters that are there now."""
    times, bias, linear = seq
    x_plus_bias = x * times.w + (0 if bias.bias is None else bias.bias)
    expected = nn.functional.linear(x_plus_bias, linear.weight)
    y = seq(x)
    wrt = [p for p in seq.parameters() if p.requires_grad]
    same(y, expected)
    same(grads(y, wrt), grads(expected, wrt))


def put(how: str, op: nn.Module, name: str, new: nn.Parameter) -> None:
    if how == "set":
        setattr(op, name, new)
    elif how == "registered":
        op.register_parameter(name, new)
    else:
        op._parameters[name] = new


@pytest.mark.parametrize("how", ["set", "registered", "written"])
def test_one_of_the_same_kind_is_no_change(plans: list[Any], how: str) -> None:
    seq, x = model(), randn(2, 3)
    check(seq, x)
    before = Clock.now
    for _ in range(2):
        for op, name in ((seq[0], "w"), (seq[2], "weight"), (seq[2].basic_ops[0], "weight")):
            put(how, op, name, nn.Parameter(randn(*getattr(op, name).shape)))
            check(seq, x)
    assert Clock.now == before
    assert len(plans) == 1


def parameter(*shape: int, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(randn(*shape), requires_grad)


class Change(NamedTuple):
    """A change of ``model()``, and whether the calls after it follow another plan."""

    make: Callable[[opfuser.Sequential], object]
    plans: bool


CHANGES = {
    "shape": Change(lambda s: setattr(s[2], "weight", parameter(5, 3)), True),
    "frozen": Change(lambda s: setattr(s[0], "w", parameter(3, requires_grad=False)), True),
    "none": Change(lambda s: setattr(s[1], "bias", None), True),
    "tied": Change(lambda s: setattr(s[1], "bias", s[0].w), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_is_noticed(plans: list[Any], name: str) -> None:
    """And going back to what was there before."""
    seq, x = model(), randn(2, 3)
    check(seq, x)
    before = [(op, dict(op._parameters)) for op in seq]
    CHANGES[name].make(seq)
    check(seq, x)
    assert len(plans) == 1 + CHANGES[name].plans
    for op, parameters in before:
        for key, parameter in parameters.items():
            setattr(op, key, parameter)
    check(seq, x)
    assert len(plans) == 1 + CHANGES[name].plans


class Counted(opfuser.Bias):
    """Is told of its parameters, as wrappers of users do it."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self.__dict__.setdefault("told", []).append(param)


class Derived(Times):
    """Freezes something that it derives from its parameter."""

    def make_settings(self) -> tuple[int]:
        return (self.w.numel(),)


def test_who_is_to_see_a_parameter_sees_it() -> None:
    counted, derived = Counted(3), Derived()
    news = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    for new in news:
        counted.bias = new
    assert all(a is b for a, b in zip(counted.told[1:], news, strict=True))
    assert derived.settings == (3,)
    derived.w = nn.Parameter(torch.ones(5))
    assert derived.settings == (5,)


def test_what_is_no_parameter_is_refused_as_by_torch() -> None:
    linear = opfuser.Linear(3, 3)
    with pytest.raises(TypeError, match=r"cannot assign .* as parameter 'weight'"):
        linear.weight = torch.ones(3, 3)
    other = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    other *= torch.ones(3, 3, requires_grad=True)
    with pytest.raises(ValueError, match="Cannot assign non-leaf Tensor to parameter 'weight'"):
        linear.weight = other
