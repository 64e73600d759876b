"""The names of the contract, and where they can be imported from."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

import opfuser as of
from opfuser import basic, fused

BASIC = (
    "BasicLinear Bias LayerNorm RMSNorm L2Normalization GELU QGELU ReLU SReLU SiLU "
    "GLU GEGLU QGEGLU ReGLU SReGLU SwiGLU SiTUGLU ClampedSwiGLU "
    "ScaledSwiGLU ScaledSiTUGLU ScaledClampedQGeGLU ScaledSReLU GroupedLinear "
    "AddExtraInput MakeExtraOutput ConstantScale Dropout Identity Reshape Quantize "
    "AllReduce AllGather ReduceScatter"
).split()
FUSED = (
    "ForwardLinearBiasActivation ForwardLinearBiasAdd ForwardLinearScaleAdd "
    "BackwardActivationBias BackwardAddRMSNorm BackwardLinearAdd BackwardLinearScale"
).split()
BASES = (
    "Sequential FusibleOperation BasicOperation FusedOperation OperationContext OperationFuser "
    "Linear"
).split()
REGISTER = (
    "register_forward_fusion register_backward_fusion register_forward_backward_fusion"
).split()


def test_basic_operations() -> None:
    for name in BASIC:
        cls = getattr(of, name)
        assert getattr(basic, name) is cls
        assert name in basic.__all__
        assert issubclass(cls, of.BasicOperation)
        assert cls.__name__ == name


def test_fused_operations() -> None:
    assert of.fused is fused, "reachable as an attribute, as te.ops.fused is"
    for name in FUSED:
        cls = getattr(fused, name)
        assert issubclass(cls, of.FusedOperation)
        assert cls.__name__ == name
        own = f"fuser_{'forward' if name.startswith('Forward') else 'backward'}"
        assert getattr(cls, own) is not getattr(of.FusibleOperation, own), name


def test_bases_and_functions() -> None:
    for name in BASES:
        assert inspect.isclass(getattr(of, name))
        assert getattr(of, name).__name__ == name
    assert all(inspect.isfunction(getattr(of, name)) for name in REGISTER)
    assert issubclass(of.FusibleOperation, nn.Module)
    assert issubclass(of.BasicOperation, of.FusibleOperation)
    assert issubclass(of.FusedOperation, of.FusibleOperation)
    assert issubclass(of.Linear, of.FusedOperation)
    assert issubclass(of.Sequential, nn.Module)
    assert not issubclass(of.Sequential, of.FusibleOperation)
    linear = of.Linear(4, 3)
    assert linear.is_fused_op
    assert [type(op) for op in linear.basic_ops] == [of.BasicLinear, of.Bias]
    assert [op.is_fused_op for op in linear.basic_ops] == [False, False]
    assert [type(op) for op in of.Linear(4, 3, bias=False).basic_ops] == [of.BasicLinear]


@pytest.mark.parametrize(
    ("make", "inputs", "outputs"),
    [
        (of.AddExtraInput, 1, 0),
        (of.MakeExtraOutput, 0, 1),
        (of.ScaledSwiGLU, 1, 0),
        (of.ScaledSiTUGLU, 1, 0),
        (of.ScaledClampedQGeGLU, 1, 0),
        (of.ScaledSReLU, 1, 0),
        (lambda: of.GroupedLinear(2, 4, 3), 1, 0),
        (lambda: of.GroupedLinear(2, 4, 3, scale_bias=True), 2, 0),
        (lambda: of.GroupedLinear(2, 4, 3, bias=False, scale_bias=True), 1, 0),
        (of.Identity, 0, 0),
        (lambda: of.Bias(4), 0, 0),
    ],
)
def test_numbers_of_extra_tensors(make: type, inputs: int, outputs: int) -> None:
    op = make()
    assert (op.num_extra_inputs, op.num_extra_outputs) == (inputs, outputs)
