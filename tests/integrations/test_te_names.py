"""Names of te.ops that code moving over calls."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import opfuser as of
from opfuser.errors import ArgumentError
from opfuser.recipe import DelayedScaling, Float8CurrentScaling
from tests.contract.tensors import F64, against, close, fill, rand


def test_import_paths() -> None:
    """``ops.X``, where code says ``import transformer_engine.pytorch.ops as ops``."""
    fuser = importlib.import_module("opfuser.fuser")
    for name in ("forward", "backward", "forward_backward"):
        assert getattr(fuser, f"register_{name}_fusion") is getattr(of, f"register_{name}_fusion")
    assert of.fuser.OperationFuser is of.OperationFuser
    for module in ("op", "sequential", "linear", "basic", "fused"):
        importlib.import_module(f"opfuser.{module}")


FUSED = {
    "ForwardLinearBiasActivation": [of.BasicLinear(4, 4), of.Bias(4)],
    "ForwardLinearBiasAdd": [of.BasicLinear(4, 4), of.Bias(4), of.AddExtraInput()],
    "ForwardLinearScaleAdd": [of.BasicLinear(4, 4), of.ConstantScale(2.0), of.AddExtraInput()],
    "BackwardActivationBias": [of.Bias(4), of.GELU()],
    "BackwardAddRMSNorm": [of.MakeExtraOutput(), of.RMSNorm(4)],
    "BackwardLinearAdd": [of.MakeExtraOutput(), of.BasicLinear(4, 4)],
    "BackwardLinearScale": [of.BasicLinear(4, 4), of.ConstantScale(2.0)],
}


@pytest.mark.parametrize("name", FUSED)
def test_static_methods_of_fused_operations(name: str) -> None:
    """They replace what fits in a list of operations, and leave the rest."""
    kind: Any = getattr(of.fused, name)
    fuse = kind.fuse_forward_ops if name.startswith("Forward") else kind.fuse_backward_ops
    first, last = of.Identity(), of.Dropout(0.0)
    env = of.Env(torch.device("cuda"), torch.bfloat16)
    got = fuse([first, *FUSED[name], last], recipe=None, env=env)
    assert [type(op) for op in got] == [of.Identity, kind, of.Dropout]
    assert (got[0], list(got[1].basic_ops), got[2]) == (first, FUSED[name], last)
    assert fuse([first], recipe=None) == [first]


def test_a_static_method_inside_of_a_function_of_the_user() -> None:
    def mine(ops: Any, **unused: Any) -> Any:
        return of.fused.ForwardLinearScaleAdd.fuse_forward_ops(ops, **unused)

    linear, add = of.BasicLinear(4, 4, **F64), of.AddExtraInput()
    sequence = of.Sequential(linear, of.ConstantScale(0.5), add)
    x, z = rand(3, 4, grad=True), rand(3, 4, grad=True)
    with of.disable("forward_linear_scale_add", "pointwise_chain"):
        handle = of.register_forward_fusion(mine, name="mine")
        with handle:
            assert sequence.plan(x, z).fused("forward") == {"mine": 1}
            against(sequence, lambda p, x, z: 0.5 * (x @ p["0.weight"].t()) + z, x, z)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_of_groups_become_one(called: bool, bias: bool) -> None:
    op = fill(of.GroupedLinear(2, 4, 6, bias=bias, **F64))
    assert op.has_bias == bias
    twin = of.GroupedLinear(2, 4, 6, bias=bias, single_grouped_weight=True, **F64)
    with torch.no_grad():
        twin.weight.copy_(torch.stack([op.weight0, op.weight1]))
        for n in range(2 if bias else 0):
            getattr(twin, f"bias{n}").copy_(getattr(op, f"bias{n}"))
    sequence, sizes = of.Sequential(op), torch.tensor([2, 3])
    if called:
        sequence(rand(5, 4, grad=True), sizes).sum().backward()
    op.make_grouped_weights()
    op.make_grouped_weights()
    assert op.single_grouped_weight
    names = [name for name, _ in op.named_parameters()]
    assert names == [name for name, _ in twin.named_parameters()]
    for own, other in zip(op.parameters(), twin.parameters()):
        own.grad = None
        assert torch.equal(own, other)
    x, dy = rand(5, 4), rand(5, 6)
    for module in (sequence, of.Sequential(twin)):
        module(x, sizes).backward(dy)
    for own, other in zip(op.parameters(), twin.parameters()):
        close(own.grad, other.grad)


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
def test_scales_begin_anew() -> None:
    sequence = of.Sequential(of.Linear(16, 16))
    linear = sequence[0].basic_ops[0]
    x = torch.randn(16, 16)

    def call(x: torch.Tensor) -> torch.Tensor:
        with of.autocast(recipe=DelayedScaling(amax_history_len=4)):
            return sequence(x)

    first = call(x)
    call(100 * x)
    assert not torch.equal(call(x), first), "the scale of large values is too small"
    linear.reset_recipe_state(recipe=None)
    assert list(sequence.state_dict()) == ["0.weight", "0.bias"]
    assert torch.equal(call(x), first)
    linear.reset_recipe_state(recipe=DelayedScaling(amax_history_len=4))
    assert sequence.state_dict()["0.quantization.amax_history"].tolist() == [[0.0] * 3] * 4
    assert torch.equal(call(x), first)
    linear.reset_recipe_state(recipe=Float8CurrentScaling())
    assert list(sequence.state_dict()) == ["0.weight", "0.bias"]
    with pytest.raises(ArgumentError, match=r"(?s)recipe is one of.*'delayed'"):
        linear.reset_recipe_state(recipe="delayed")
