"""How often plans are made."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import opfuser
from opfuser.fusion import Fusion
from opfuser.op import FusedOperation
from tests.planning.toys import FusedForward


def small() -> opfuser.Sequential:
    return opfuser.Sequential(opfuser.Linear(3, 3), opfuser.Dropout(0.5), opfuser.Linear(3, 3))


def test_alternating_modes_never_plans_twice(plans: list[Any]) -> None:
    seq, x = small(), torch.ones(2, 3)
    for _ in range(3):
        seq.train()
        seq(x).sum().backward()
        seq.eval()
        with torch.no_grad():
            seq(x)
        with torch.inference_mode():
            seq(x)
        seq(x.clone().requires_grad_())
        with torch.autocast("cpu", torch.bfloat16):
            seq(x)
    assert len(plans) == 4


def test_shapes_and_values_do_not_plan_again(plans: list[Any]) -> None:
    seq = small()
    for rows in range(4):
        seq(torch.randn(rows, 3))
        seq(torch.randn(2, rows, 3).transpose(0, 1))
    with torch.no_grad():
        for p in seq.parameters():
            p.zero_()
    seq.load_state_dict(copy.deepcopy(seq.state_dict()))
    seq(torch.ones(2, 3))
    seq.zero_grad()
    for p in seq.parameters():
        p.grad = torch.ones_like(p)
    seq(torch.ones(2, 3))
    assert len(plans) == 1


def test_freezing_in_turn_plans_once_per_combination(plans: list[Any]) -> None:
    seq, x = small(), torch.ones(2, 3)
    for _ in range(3):
        for first in (True, False):
            seq[0].requires_grad_(first)
            seq(x)
    assert len(plans) == 2


def test_functional_call_in_turn_plans_once(plans: list[Any]) -> None:
    seq, x = small(), torch.ones(2, 3)
    for _ in range(3):
        parameters = {name: p.detach().clone() for name, p in seq.named_parameters()}
        functional_call(seq, {n: p.requires_grad_() for n, p in parameters.items()}, x)
        seq(x)
    assert len(plans) == 1


def test_a_plan_asked_for_is_the_plan_used(plans: list[Any]) -> None:
    seq, x = small(), torch.ones(2, 3)
    seq.plan(x)
    seq(x)
    seq.plan(x)
    assert len(plans) == 1


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
    for n in range(200):
        seq[1].counter = n
        seq(x)
    (group,) = seq._module_groups
    assert len(plans) == 200
    assert len(group._schedules) < 100


def test_one_operation_called_alone_plans_once(plans: list[Any]) -> None:
    op = opfuser.Bias(3)
    for _ in range(3):
        op(torch.ones(2, 3))
    assert len(plans) == 1


# ---------------------------------------------------------------------- registry


def test_registering_and_removing_take_effect_at_the_next_call() -> None:
    runs: list[str] = []

    class Noted(FusedOperation):
        def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
            runs.append("fused")
            return input_ * 1, [(), ()]

    def fuse(ops: Sequence[Any], *, recipe: Any) -> list[Any]:
        return [Noted(ops)]

    seq = opfuser.Sequential(opfuser.Identity(), opfuser.Identity())
    x = torch.ones(2)
    seq(x)
    assert runs == []
    handle = opfuser.register_forward_fusion(fuse)
    seq(x)
    assert runs == ["fused"]
    handle.enabled = False
    seq(x)
    assert runs == ["fused"]
    handle.enabled = True
    with opfuser.disable(handle.name):
        seq(x)
    assert runs == ["fused"]
    seq(x)
    assert runs == ["fused"] * 2
    handle.remove()
    seq(x)
    assert runs == ["fused"] * 2
