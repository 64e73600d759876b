"""A projection of a MergedLinear that is not a plain linear module any more is called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from opfuser import MergedLinear, RMSNorm, Sequential
from opfuser.errors import NotSupportedError
from opfuser.testing import assert_fused, assert_not_fused

F64 = torch.float64


def sequence() -> Sequential:
    torch.manual_seed(0)
    return Sequential(RMSNorm(6), MergedLinear(6, {"q_proj": 4, "v_proj": 3})).double()


class Twice(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


def wrapped(op: MergedLinear) -> None:
    op.q_proj = Twice(op.q_proj)


def unwrapped(op: MergedLinear) -> None:
    op.q_proj = op.q_proj.base


def hooked(op: MergedLinear) -> None:
    op.hook = op.q_proj.register_forward_hook(lambda module, args, y: 2 * y)


def unhooked(op: MergedLinear) -> None:
    op.hook.remove()


def assigned(op: MergedLinear) -> None:
    plain = op.q_proj.forward
    op.q_proj.forward = lambda x: 2 * plain(x)


def removed(op: MergedLinear) -> None:
    del op.q_proj.forward


def put_back(op: MergedLinear) -> None:
    op.q_proj.forward = nn.Linear.forward.__get__(op.q_proj)


CHANGES = {
    "a wrapper": (wrapped, unwrapped, "q_proj is a .*Twice"),
    "a hook": (hooked, unhooked, "q_proj carries hooks"),
    "a forward": (assigned, removed, "q_proj has a forward of its own"),
    "a forward that is put back": (assigned, put_back, "q_proj has a forward of its own"),
}
each_change = pytest.mark.parametrize(("there", "back", "why"), CHANGES.values(), ids=CHANGES)


@each_change
def test_the_modules_are_called_as_long_as_one_is_replaced(
    there: Callable[[Any], None], back: Callable[[Any], None], why: str
) -> None:
    seq, x = sequence(), torch.randn(5, 6, dtype=F64, requires_grad=True)
    wrt = [x, *seq.parameters()]
    factor = torch.tensor([2.0] * 4 + [1.0] * 3, dtype=F64)
    before = seq(x)
    assert_fused(seq, x, joint={"norm_linear": 1})
    there(seq[1])
    for _ in range(2):
        y = seq(x)
        torch.testing.assert_close(y, before * factor)
        torch.testing.assert_close(seq[1](seq[0](x)), y)
        grads = (
            torch.autograd.grad(y.sum(), wrt),
            torch.autograd.grad((before * factor).sum(), wrt, retain_graph=True),
        )
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b)
    (at, refusal), *_ = seq.plan(x).record("norm_linear").refusals
    assert (at, refusal.code) == (0, "FORWARD")
    assert_not_fused(seq, "norm_linear", x, code="FORWARD")
    assert re.fullmatch(f"MergedLinear calls its modules: {why}", refusal.detail)
    assert seq.plan(x).assumed == ("MergedLinear returns torch.float64",)
    back(seq[1])
    torch.testing.assert_close(seq(x), before)
    assert_fused(seq, x, joint={"norm_linear": 1})


def test_a_bias_that_comes_or_goes_counts() -> None:
    op = MergedLinear(6, {"a": 2, "b": 3}, bias=("a",))
    x = torch.randn(4, 6)
    seq, before = Sequential(op), op(x)
    seq(x)
    op.b.bias = nn.Parameter(torch.ones(3))
    op.a.bias = None
    expected = before.detach() + torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])
    for module in (seq, op):
        torch.testing.assert_close(module(x), expected)


def test_any_module_may_take_the_place() -> None:
    op, x = MergedLinear(6, {"a": 2, "b": 3}), torch.randn(4, 6)
    seq = Sequential(op)
    seq(x)
    for module in (nn.Linear(6, 2), nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Identity()):
        op.a = module
        torch.testing.assert_close(seq(x), torch.cat([module(x), op.b(x)], -1))
    assert list(op.state_dict()) == ["b.weight", "b.bias"]


def test_pruned() -> None:
    seq, x = sequence(), torch.randn(5, 6, dtype=F64)
    seq(x)
    prune.random_unstructured(seq[1].q_proj, "weight", amount=0.5)
    h = seq[0](x)
    expected = torch.cat([seq[1].q_proj(h), seq[1].v_proj(h)], -1)
    torch.testing.assert_close(seq(x), expected)
    prune.remove(seq[1].q_proj, "weight")
    torch.testing.assert_close(seq(x), expected)


def test_main_grad_is_not_left_out_in_silence() -> None:
    seq, x = sequence(), torch.randn(5, 6, dtype=F64)
    seq[1].accumulate_into_main_grad = True
    wrapped(seq[1])
    text = "give gradients to autograd, not to main_grad.*calls its modules: q_proj is a "
    with pytest.raises(NotSupportedError, match=text):
        seq(x)
