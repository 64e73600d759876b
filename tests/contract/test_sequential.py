"""What code for te.ops reads of a Sequential and of a fuser, private names included."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import opfuser as of
from tests.contract.te_style import GatedTap
from tests.contract.tensors import F64, against, close, rand


def test_module_groups() -> None:
    plain, linear, gelu = nn.Identity(), of.Linear(8, 8, **F64), of.GELU()
    seq = of.Sequential(linear, gelu, plain, of.ConstantScale(2.0))
    assert seq._module_groups is None
    seq(rand(3, 8))
    first, between, last = seq._module_groups
    assert isinstance(first, of.OperationFuser)
    assert between is plain
    assert isinstance(last, of.OperationFuser)
    assert first._basic_ops == [*linear.basic_ops, gelu]
    assert last._basic_ops == [seq[3]]


def test_steps_of_the_plan_last_used() -> None:
    seq = of.Sequential(of.MakeExtraOutput(), of.Linear(8, 8, bias=False, **F64), of.Bias(8, **F64))
    make, linear, bias = seq[0], seq[1].basic_ops[0], seq[2]
    x = rand(3, 8, grad=True)
    with of.disable("*"):
        seq(x)
        fuser = seq._module_groups[0]
        assert fuser._forward_ops == [(make, [0]), (linear, [1]), (bias, [2])]
        assert fuser._backward_ops == [(make, [0]), (linear, [1]), (bias, [2])]
        with torch.no_grad():
            seq(x)
        assert fuser._backward_ops == []
    seq(x)
    (fused, indices), last = fuser._backward_ops
    assert isinstance(fused, of.fused.BackwardLinearAdd)
    assert list(fused.basic_ops) == [make, linear]
    assert indices == [0, 1]
    assert last == (bias, [2])


def test_a_fuser_used_directly() -> None:
    make, tap, add = of.MakeExtraOutput(), GatedTap(), of.AddExtraInput()
    make.set_extra_output_channel(0, "a", output_to_caller=False)
    tap.set_extra_output_channel(0, "b")
    add.set_extra_input_channel(0, "a")
    fuser = of.OperationFuser([make, of.Identity(), add, tap])
    assert fuser._basic_op_extra_input_sources == [[], [], [(0, 0)], [None]]
    assert fuser.num_extra_inputs == 1

    def formula(p: Any, x: torch.Tensor, e: torch.Tensor) -> Any:
        return 2 * x * e, 2 * x + e

    inputs = [rand(2, 3, grad=True) for _ in range(2)]
    against(fuser, formula, *inputs, parameters=())
    x, e = inputs
    y, _ = fuser(x, e, basic_op_kwargs=[{}, {}, {}, {"power": 3}])
    close(y, 2 * x * e**3)


def test_lists_of_fusion_functions() -> None:
    def one(ops: Any, *, recipe: Any) -> Any:
        return ops

    for register, name in (
        (of.register_forward_fusion, "forward_fusion_functions"),
        (of.register_backward_fusion, "backward_fusion_functions"),
        (of.register_forward_backward_fusion, "forward_backward_fusion_functions"),
    ):
        before = list(getattr(of.OperationFuser, name))
        with register(one), register(one, prepend=True):
            assert list(getattr(of.OperationFuser, name)) == [one, *before, one]
            assert list(getattr(of.OperationFuser([of.Identity()]), name)) == [one, *before, one]
        assert list(getattr(of.OperationFuser, name)) == before
