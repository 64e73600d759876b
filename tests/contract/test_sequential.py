"""Sequential: the list interface, extra tensors, ``op_kwargs``, and the names read in the field."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from tests.hazards.tensors import F64, close, fill, rand


def scales(*values: float) -> list[of.ConstantScale]:
    return [of.ConstantScale(v) for v in values]


def values(seq: of.Sequential) -> list[float]:
    return [op.scale for op in seq]


def product(seq: of.Sequential) -> float:
    """What the sequence computes now: what it holds must be what it runs."""
    return float(seq(torch.ones(1, dtype=torch.float64)))


def test_construction() -> None:
    ops = scales(2, 3)
    assert list(of.Sequential(*ops)) == ops
    named = of.Sequential({"first": ops[0], "second": ops[1]})
    assert list(named) == ops
    assert [name for name, _ in named.named_children()] == ["first", "second"]
    assert named.first is ops[0]
    assert len(of.Sequential()) == 0
    x = rand(3)
    close(of.Sequential()(x), x)


@pytest.mark.parametrize("index", [0, 1, 2, -1, -3])
def test_get_set_and_delete_by_index(index: int) -> None:
    ops = scales(2, 3, 5)
    seq, plain = of.Sequential(*ops), list(ops)
    assert product(seq) == 30
    assert seq[index] is plain[index]
    seq[index] = plain[index] = of.ConstantScale(7.0)
    assert list(seq) == plain
    assert product(seq) == torch.tensor([op.scale for op in plain]).prod()
    del seq[index], plain[index]
    assert list(seq) == plain
    assert product(seq) == torch.tensor([op.scale for op in plain]).prod()


@pytest.mark.parametrize("index", [3, -4])
def test_index_out_of_range(index: int) -> None:
    seq = of.Sequential(*scales(2, 3, 5))
    for use in (
        lambda: seq[index],
        lambda: seq.__setitem__(index, of.Identity()),
        lambda: seq.__delitem__(index),
        lambda: seq.pop(index),
    ):
        with pytest.raises(IndexError):
            use()
    assert product(seq) == 30


@pytest.mark.parametrize(
    "part", [slice(1, 3), slice(None, None, 2), slice(None, None, -1), slice(5, 9)], ids=str
)
def test_slices(part: slice) -> None:
    ops = scales(2, 3, 5, 7)
    seq = of.Sequential(*ops)
    assert isinstance(seq[part], of.Sequential)
    assert list(seq[part]) == ops[part]
    del seq[part], ops[part]
    assert list(seq) == ops
    assert product(seq) == torch.tensor([op.scale for op in ops]).prod()


@pytest.mark.parametrize("index", [0, 1, 3, -1])
def test_append_extend_insert_and_pop(index: int) -> None:
    ops = scales(2, 3, 5)
    seq, plain = of.Sequential(*ops), list(ops)
    assert product(seq) == 30
    new = of.ConstantScale(7.0)
    assert seq.insert(index, new) is seq
    plain.insert(index, new)
    assert list(seq) == plain
    assert product(seq) == 210
    assert seq.append(of.ConstantScale(11.0)) is seq
    assert seq.extend(scales(13, 17)) is seq
    assert product(seq) == 210 * 11 * 13 * 17
    assert seq.pop(-1).scale == 17
    assert seq.pop(plain.index(new)) is new
    assert values(seq) == [2, 3, 5, 11, 13]
    assert product(seq) == 30 * 11 * 13


def test_plus() -> None:
    seq, other = of.Sequential(*scales(2)), of.Sequential(*scales(3))
    both = seq + other
    assert values(both) == [2, 3]
    assert values(seq) == [2]
    same = seq
    seq += other
    assert same is seq
    assert values(seq) == [2, 3]
    assert product(seq) == product(both) == 6


def test_changes_after_a_call_take_effect() -> None:
    seq = of.Sequential(of.Linear(8, 8, **F64), of.SiLU())
    fill(seq)
    x = rand(3, 8)
    before = seq(x)
    seq.add_module("tail", of.ConstantScale(2.0))
    close(seq(x), 2 * before)
    seq.tail.scale = 3.0
    close(seq(x), 3 * before)
    del seq[-1]
    close(seq(x), before)


def test_a_plain_module_may_be_anything() -> None:
    seq = of.Sequential(of.ConstantScale(2.0), nn.Flatten(), of.ConstantScale(3.0), nn.Identity())
    x = rand(2, 3, 4)
    close(seq(x), 6 * x.reshape(2, 12))
    only = of.Sequential(nn.ReLU(), nn.Flatten())
    close(only(x), x.relu().reshape(2, 12))


class Tagged(of.BasicOperation):
    """Adds its extra input and gives ``tag * input`` as extra output."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self, tag: float) -> None:
        super().__init__()
        self.tag = tag

    def fuser_forward(
        self,
        basic_op_ctxs: Any,
        input_: Tensor,
        *,
        basic_op_extra_inputs: Any,
        basic_op_kwargs: Any,
        **unused: Any,
    ) -> Any:
        extra = basic_op_extra_inputs[0][0] * basic_op_kwargs[0].get("factor", 1.0)
        return input_ + extra, [(self.tag * input_,)]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        raise AssertionError("not needed here")


@pytest.mark.parametrize("split", [False, True])
def test_extra_tensors_are_taken_and_given_in_operation_order(split: bool) -> None:
    plain: list[nn.Module] = [nn.Identity()] if split else []
    seq = of.Sequential(Tagged(2.0), *plain, Tagged(3.0), of.Sequential(*plain, Tagged(5.0)))
    x, a, b, c = (rand(3) for _ in range(4))
    y, *extras = seq(x, a, b, c)
    close(y, x + a + b + c)
    for got, want in zip(extras, (2 * x, 3 * (x + a), 5 * (x + a + b)), strict=True):
        close(got, want)


def test_op_kwargs_reach_their_operation() -> None:
    first, last = Tagged(2.0), Tagged(3.0)
    seq = of.Sequential(of.Identity(), first, nn.Identity(), last)
    x, a, b = (rand(3) for _ in range(3))
    for key in (last, 3, -1):
        y, *_ = seq(x, a, b, op_kwargs={key: {"factor": 10.0}})
        close(y, x + a + 10 * b)
    y, *_ = seq(x, a, b, op_kwargs={first: {"factor": 2.0}, -1: {"factor": 10.0}})
    close(y, x + 2 * a + 10 * b)
    y, *_ = seq(x, a, b, op_kwargs={})
    close(y, x + a + b)
    y, *_ = seq(x, a, b)
    close(y, x + a + b)


@pytest.mark.parametrize(
    "key",
    [
        lambda seq: of.ConstantScale(2.0),  # not in the sequence
        lambda seq: seq[1],  # a plain module
        lambda seq: seq[2],  # a compound of two operations
        lambda seq: 1,
        lambda seq: 2,
    ],
)
def test_unknown_key_of_op_kwargs(key: Any) -> None:
    seq = of.Sequential(of.ConstantScale(2.0), nn.Identity(), of.Linear(8, 8, **F64))
    with pytest.raises(ValueError, match="op_kwargs"):
        seq(rand(3, 8), op_kwargs={key(seq): {"factor": 1.0}})


def test_unknown_keyword_and_index_of_op_kwargs() -> None:
    seq = of.Sequential(of.ConstantScale(2.0), of.GELU())
    with pytest.raises(ValueError, match="factor"):
        seq(rand(3, 8), op_kwargs={0: {"factor": 1.0}})
    with pytest.raises(IndexError):
        seq(rand(3, 8), op_kwargs={2: {}})


def test_module_groups() -> None:
    plain = nn.Identity()
    linear, gelu = of.Linear(8, 8, **F64), of.GELU()
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
    assert indices == [0, 1]
    assert last == (bias, [2])
    assert [i for _, covered in fuser._forward_ops for i in covered] == [0, 1, 2]


def test_sources_of_extra_inputs() -> None:
    make, add, free = of.MakeExtraOutput(), of.AddExtraInput(), of.AddExtraInput()
    make.set_extra_output_channel(0, "a", output_to_caller=False)
    add.set_extra_input_channel(0, "a")
    fuser = of.OperationFuser([make, of.Identity(), add, free])
    assert fuser._basic_op_extra_input_sources == [[], [], [(0, 0)], [None]]
    assert fuser.num_extra_inputs == 1
    x, h = rand(3), rand(3)
    close(fuser(x, h), 2 * x + h)


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
