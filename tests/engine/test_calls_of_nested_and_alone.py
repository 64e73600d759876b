"""Nested sequences that carry hooks, compounds called alone, and what operations return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser.errors import (
    ArgumentTypeError,
    ChannelError,
    ExtraInputCountError,
    InputError,
    OpKwargsError,
)
from opfuser.op import FusedOperation
from tests.engine.toys import Power, randn, same


def ignore(*_: Any) -> None:
    """A hook that only looks on."""


class ScaleAndAdd(FusedOperation):
    """A compound with an extra input."""

    def __init__(self) -> None:
        super().__init__([opfuser.ConstantScale(2.0), opfuser.AddExtraInput()])


@pytest.mark.parametrize("part", [0, 1])
def test_a_compound_with_a_hooked_part_alone(part: int) -> None:
    compound, x, z = ScaleAndAdd(), randn(2, 3), randn(2, 3)
    seen: list[int] = []
    compound.basic_ops[part].register_forward_hook(lambda *_: seen.append(1))
    same(compound(x, z), 2 * x + z)
    assert seen == [1]
    for extras in ((), (z, z)):
        with pytest.raises(
            ExtraInputCountError, match=f"Expected 1 extra inputs but got {len(extras)}"
        ):
            compound(x, *extras)


def test_op_kwargs_reach_into_a_nested_sequence_with_a_hook() -> None:
    power = Power()
    seq, x = opfuser.Sequential(opfuser.Sequential(power), opfuser.ConstantScale(2.0)), randn(2, 3)
    seq[0].register_forward_hook(ignore)
    same(seq(x, op_kwargs={power: {"power": 3}}), 2 * x**3)


def test_a_channel_out_of_a_nested_sequence_with_a_hook() -> None:
    make, add = opfuser.MakeExtraOutput(), opfuser.AddExtraInput()
    make.set_extra_output_channel(0, "r", output_to_caller=False)
    add.set_extra_input_channel(0, "r")
    seq = opfuser.Sequential(opfuser.Sequential(make), add)
    seq[0].register_forward_hook(ignore)
    with pytest.raises(ChannelError) as error:
        seq(randn(2, 3))
    assert "has no producer" in str(error.value)
    assert "do not reach into a nested Sequential that carries hooks" in str(error.value)


def test_op_kwargs_of_the_wrong_kind() -> None:
    power, x = Power(), randn(2, 3)
    seq = opfuser.Sequential(power)
    for wrong in ([1], 3):
        with pytest.raises(OpKwargsError, match=f"is a mapping. Received: {type(wrong).__name__}"):
            seq(x, op_kwargs=wrong)
    for value in (3, None):
        with pytest.raises(OpKwargsError, match=f"Received: {type(value).__name__} for 0"):
            seq(x, op_kwargs={0: value})
    with pytest.raises(OpKwargsError, match="an operation that another key names too"):
        seq(x, op_kwargs={0: {"power": 2}, power: {"power": 3}})
    with pytest.raises(OpKwargsError, match=r"GELU\). Received: speed"):
        opfuser.GELU()(x, speed=3)


@pytest.mark.parametrize("index", ["0", 0.0, None])
def test_the_index_of_a_channel_is_an_int(index: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="The index of an extra input is an int"):
        opfuser.AddExtraInput().set_extra_input_channel(index, "r")


def test_a_forward_that_returns_nothing() -> None:
    class Forgets(opfuser.BasicOperation):
        def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Any:
            return None

    for grad in (True, False):
        with pytest.raises(ArgumentTypeError) as error:
            opfuser.Sequential(opfuser.Identity(), Forgets())(randn(2, grad=grad))
        assert str(error.value) == (
            "The forward of an operation returns a tensor (op 1 (Forgets)). Received: NoneType."
        )


def test_an_input_error_names_the_place() -> None:
    seq = opfuser.Sequential(opfuser.GELU(), opfuser.RMSNorm(3), opfuser.RMSNorm(4))
    with pytest.raises(InputError, match=r"It came to op 2 \(RMSNorm\) of the sequence"):
        seq(torch.ones(2, 3))
    with pytest.raises(InputError) as error:
        seq[1](torch.ones(2, 4))
    assert "came to" not in str(error.value)
