"""An operation whose ``forward`` is not the library's is called as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from opfuser.testing import assert_fused, assert_not_fused
from tests.engine.toys import F64, consumer, grads, producer, randn, same


class Zero(of.Linear):
    def forward(self, input: Tensor, *unused: Any, **options: Any) -> Tensor:
        return super().forward(input) * 0


class ZeroCall(of.BasicLinear):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 0


class ZeroSequential(of.Sequential):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * 0


def assigned(linear: nn.Module) -> nn.Module:
    plain = linear.forward
    linear.forward = lambda x: plain(x) * 0
    return linear


def part_assigned() -> nn.Module:
    linear = of.Linear(3, 3, dtype=F64)
    assigned(linear.basic_ops[1])
    return linear


MADE: dict[str, Callable[[], nn.Module]] = {
    "subclass": lambda: Zero(3, 3, dtype=F64),
    "call": lambda: ZeroCall(3, 3, dtype=F64),
    "assigned": lambda: assigned(of.Linear(3, 3, dtype=F64)),
    "sequential": lambda: ZeroSequential(of.Linear(3, 3, dtype=F64)),
    "nested": lambda: assigned(of.Sequential(of.Linear(3, 3, dtype=F64))),
    "part": part_assigned,
}


@pytest.mark.parametrize("kind", MADE)
def test_gives_in_a_sequential_what_it_gives_alone(kind: str) -> None:
    linear, x = MADE[kind](), randn(2, 3, grad=True)
    seq = of.Sequential(of.GELU(), linear, of.ConstantScale(2.0), of.Bias(3, dtype=F64))
    nn.init.ones_(seq[-1].bias)
    expected = linear(nn.functional.gelu(x, approximate="tanh")) * 2 + seq[-1].bias
    wrt = [x, *seq.parameters()]
    assert torch.all(expected == 1)
    same(seq(x), expected)
    same(grads(seq(x), wrt), grads(expected, wrt))


def test_the_record_says_so() -> None:
    seq, x = of.Sequential(of.GELU(), Zero(3, 3), of.Bias(3)), torch.randn(2, 3, requires_grad=True)
    for plan in (seq.plan(x), (seq(x), seq.last_plan)[1]):
        assert plan is not None
        (at, why), *_ = plan.record("activation_linear").refusals
        assert (at, str(why)) == (0, "FORWARD: Zero has a forward of its own")
    assert seq.plan(x).assumed == ("Zero returns torch.float32",)
    assert_not_fused(seq, "activation_linear", x, code="FORWARD")


def test_extra_tensors_reach_it() -> None:
    add = consumer()
    plain = add.forward
    add.forward = lambda x, z: plain(x, z) * 3
    seq = of.Sequential(producer(output_to_caller=False), of.ConstantScale(2.0), add)
    x = randn(2, 3, grad=True)
    same(seq(x), 9 * x)
    same(grads(seq(x), [x]), grads(9 * x, [x]))


def test_setting_and_taking_it_away_counts_at_the_next_call() -> None:
    linear = of.Linear(3, 3)
    seq, x = of.Sequential(linear, of.GELU()), torch.randn(2, 3)
    for _ in range(2):
        assert not torch.any(seq(x) == 0)
        assert_fused(seq, x, forward={"forward_linear_bias_activation": 1})
        assigned(linear)
        assert torch.all(seq(x) == 0)
        del linear.forward
