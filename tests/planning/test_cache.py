"""How often plans are made (hazards 24 and 27), and that none outlives its reasons (hazard 19)."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import opfuser
from opfuser.core.fusion import Fusion
from tests.planning.toys import FusedForward


def small() -> opfuser.Sequential:
    return opfuser.Sequential(opfuser.Linear(3, 3), opfuser.Dropout(0.5), opfuser.Linear(3, 3))


def test_shapes_and_values_do_not_plan_again(plans: list[Any]) -> None:
    seq, x = small(), torch.ones(2, 3)
    seq.plan(x)
    for rows in range(4):
        seq(torch.randn(rows, 3))
        seq(torch.randn(2, rows, 3).transpose(0, 1))
    with torch.no_grad():
        for p in seq.parameters():
            p.zero_()
    seq.load_state_dict(copy.deepcopy(seq.state_dict()))
    seq(x)
    seq.zero_grad()
    for p in seq.parameters():
        p.grad = torch.ones_like(p)
    seq(x)
    for _ in range(2):
        others = {name: torch.ones_like(p).requires_grad_() for name, p in seq.named_parameters()}
        functional_call(seq, others, x)
        seq.plan(x)
    assert len(plans) == 1


def test_alternating_between_modes_plans_once_per_mode(plans: list[Any]) -> None:
    seq, x = small(), torch.ones(2, 3)
    for _ in range(3):
        for train, grad, autocast in ((1, 1, 0), (0, 0, 0), (1, 0, 1), (1, 1, 1)):
            seq.train(bool(train))
            with torch.set_grad_enabled(bool(grad)), torch.autocast("cpu", enabled=bool(autocast)):
                seq(x)
        seq[0].requires_grad_(False)
        seq(x)
        seq.requires_grad_()
    assert len(plans) == 5


def test_an_operation_called_alone_plans_once(plans: list[Any]) -> None:
    for op in (opfuser.Linear(3, 3), opfuser.Bias(3), opfuser.GELU()):
        plans.clear()
        for rows in (1, 2, 3):
            op(torch.ones(rows, 3))
            op(torch.ones(rows, 3, requires_grad=True)).sum().backward()
        assert len(plans) == 2


def test_registering_and_removing_take_effect_at_the_next_call(plans: list[Any]) -> None:
    seq, x = opfuser.Sequential(opfuser.Identity(), opfuser.Identity()), torch.ones(2)
    seq(x)
    pattern = (opfuser.Identity, opfuser.Identity)
    with opfuser.register_forward_fusion(Fusion("mine", "forward", pattern, FusedForward)):
        assert seq.plan(x).fused("forward") == {"mine": 1}
    seq(x)
    assert len(plans) == 2


def test_switching_off_and_on_again_plans_once(plans: list[Any]) -> None:
    """A block that disables a fusion at every step must not plan at every step."""
    seq, x = small(), torch.ones(2, 3)
    pattern = (opfuser.BasicLinear, opfuser.Bias)
    with opfuser.register_forward_fusion(Fusion("mine", "forward", pattern, FusedForward)):
        for _ in range(3):
            with opfuser.disable("mine"):
                seq.plan(x)
            seq.plan(x)
    assert len(plans) == 2


def test_old_plans_are_dropped(plans: list[Any]) -> None:
    """A flag that is set to something new at every step must not pile plans up."""
    seq, x = small(), torch.ones(2, 3)
    kept = []
    for n in range(200):
        seq[1].counter = n
        seq(x)
        kept.append(weakref.ref(seq.last_plan))
    gc.collect()
    assert len(plans) == 200
    assert sum(ref() is not None for ref in kept) < 100


# What operations and hooks keep on a module between calls costs neither plans nor memory.


class Remembers(opfuser.Identity):
    """Counts its calls and keeps what it saw last."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean = 0, 0.0
        self.seen: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        self.calls += 1
        self.mean = float(input_.mean())
        self.seen = {"input": input_}
        self.last = input_.detach()
        return input_


def call_often(seq: opfuser.Sequential) -> int:
    """How many of many inputs are alive in the end."""
    refs = []
    for _ in range(10):
        x = torch.rand(2, 3, requires_grad=True) * 1
        refs.append(weakref.ref(x))
        seq(x)
        del x
    return sum(ref() is not None for ref in refs)


def test_an_operation_with_state(plans: list[Any]) -> None:
    seq = opfuser.Sequential(opfuser.GELU(), Remembers(), opfuser.GELU())
    assert call_often(seq) == 0  # it keeps the output of what stands before it
    assert seq[1].calls == 10
    assert len(plans) <= 2
    before = len(plans)
    seq[1].flag = True  # set between calls
    call_often(seq)
    assert len(plans) > before


@pytest.mark.parametrize("kept", [lambda o: o, lambda o: [o], lambda o: {"output": o}])
def test_a_hook_that_keeps_an_activation(plans: list[Any], kept: Any) -> None:
    seq = opfuser.Sequential(opfuser.GELU(), opfuser.ConstantScale(2.0))
    seq[1].register_forward_hook(lambda module, args, out: setattr(module, "kept", kept(out)))
    assert call_often(seq) <= 1
    assert len(plans) <= 3
