"""Extra inputs, extra outputs, channels and op_kwargs, with numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import AddExtraInput, ConstantScale, Identity, MakeExtraOutput
from opfuser.errors import (
    ArgumentTypeError,
    ChannelError,
    ExtraInputCountError,
)
from opfuser.fuser import OperationFuser
from tests.engine.toys import Mixed, RowSum, Square, Stop, Times, grads, randn, same


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def mixed(x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    return x * e, x + e


@pytest.mark.parametrize("between", [[], [Twice()], [opfuser.Sequential(Twice())]], ids=str)
def test_extra_tensors_come_and_go_in_operation_order(between: list[nn.Module]) -> None:
    """Within a run, across runs, and with nested Sequentials."""
    seq = opfuser.Sequential(
        Mixed(), ConstantScale(2.0), *between, opfuser.Sequential(Mixed(), Square()), Mixed()
    )
    factor = 2 if between else 1
    tensors = [randn(2, 3, grad=True) for _ in range(4)]
    y, *extras = seq(*tensors)
    x, first = mixed(tensors[0], tensors[1])
    x, second = mixed(2 * x * factor, tensors[2])
    x, third = mixed(x * x, tensors[3])
    same([y, *extras], [x, first, second, third])
    same(grads((y, *extras), tensors), grads((x, first, second, third), tensors))
    assert (seq.num_extra_inputs, seq.num_extra_outputs) == (3, 3)


def test_a_subclass_of_sequential_takes_its_extra_tensors_in_its_place() -> None:
    class Block(opfuser.Sequential):
        pass

    seq = opfuser.Sequential(Mixed(), Block(Mixed(), Mixed()), AddExtraInput())
    tensors = [randn(2, 3, grad=True) for _ in range(5)]
    x, first = mixed(*tensors[:2])
    x, second = mixed(x, tensors[2])
    x, third = mixed(x, tensors[3])
    expected = (x + tensors[4], first, second, third)
    ours = seq(*tensors)
    same(ours, expected)
    same(grads(ours, tensors), grads(expected, tensors))


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("how", ["one run", "two runs", "fuser", "plan", "alone"])
def test_a_wrong_number_of_extra_inputs(count: int, how: str) -> None:
    ops = [Identity(), Mixed(), AddExtraInput()]
    asked = "op 1 (Mixed), op 2 (AddExtraInput)"
    expected = 2
    seq = opfuser.Sequential(*ops)
    call: Any = seq
    if how == "two runs":
        call = opfuser.Sequential(*ops[:2], Twice(), ops[2])
    elif how == "fuser":
        call = OperationFuser(ops)
    elif how == "plan":
        call = seq.plan
    elif how == "alone":
        call, expected, asked = Mixed(), 1, "op 0 (Mixed)"
    if count == expected:
        return
    with pytest.raises(ExtraInputCountError) as error:
        call(*(randn(2, 3) for _ in range(count + 1)))
    assert str(error.value) == (
        f"Expected {expected} extra inputs but got {count} (asked for by {asked}). "
        "Pass one tensor per extra input after the main input, in operation order."
    )


def test_extra_inputs_that_nobody_asks_for() -> None:
    for module in (opfuser.Sequential(Identity()), Identity(), opfuser.Sequential(Twice())):
        with pytest.raises(ExtraInputCountError, match="no operation asks for any"):
            module(randn(2), randn(2))


@pytest.mark.parametrize("bad", [None, 3, [1.0]])
def test_inputs_that_are_no_tensors(bad: Any) -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"are tensors\. Received: Tensor, (NoneType|int|list)"
    ):
        opfuser.Sequential(AddExtraInput())(randn(2), bad)
    with pytest.raises(ArgumentTypeError, match=r"are tensors\. Received: (NoneType|int|list)"):
        opfuser.Sequential(Identity())(bad)


# ---------------------------------------------------------------------- gradients


def test_an_extra_output_that_nobody_uses() -> None:
    seq, (x, e) = (
        opfuser.Sequential(Times(), Mixed(), Square()),
        (randn(2, 3, grad=True), randn(2, 3, grad=True)),
    )
    y, _ = seq(x, e)
    wrt = [x, e, seq[0].w]
    same(grads(y, wrt), grads((x * seq[0].w * e) ** 2, wrt))


def test_only_the_extra_output_is_used() -> None:
    seq, (x, e) = (
        opfuser.Sequential(Times(), Mixed(), Times()),
        (randn(2, 3, grad=True), randn(2, 3, grad=True)),
    )
    _, extra = seq(x, e)
    wrt = [x, e, seq[0].w]
    same(grads(extra, wrt), grads(x * seq[0].w + e, wrt))
    (unused,) = torch.autograd.grad(seq(x, e)[1].sum(), [seq[2].w], allow_unused=True)
    assert unused is None or not unused.any()


def test_no_gradient_comes_back_from_behind() -> None:
    """The operation behind returns None: the gradient of the output is zero, in its shape."""
    seq, x = opfuser.Sequential(Times(), RowSum(), Stop()), randn(2, 3, grad=True)
    y, sums = seq(x)
    assert y.shape == (2, 3)
    assert sums.shape == (2, 1)
    same(grads(sums, [x, seq[0].w]), grads((x * seq[0].w).sum(-1, keepdim=True), [x, seq[0].w]))


def test_gradients_stop_where_an_operation_passes_none() -> None:
    seq, x = opfuser.Sequential(Times(), Stop(), Times()), randn(2, 3, grad=True)
    dx, first, second = grads(seq(x), [x, seq[0].w, seq[2].w])
    for grad in (dx, first):
        assert grad is None or not grad.any()
    same(second, grads(torch.ones(2, 3, dtype=x.dtype) * seq[2].w, [seq[2].w])[0])


def test_extra_outputs_in_front_of_the_first_gradient_need_none() -> None:
    seq, x = opfuser.Sequential(MakeExtraOutput(), RowSum(), Times()), randn(2, 3)
    y, tap, sums = seq(x)
    assert y.requires_grad
    assert not tap.requires_grad
    assert not sums.requires_grad
    same([y, tap, sums], [2 * x * seq[2].w, x, x.sum(-1, keepdim=True)])
    same(grads(y, [seq[2].w]), grads(2 * x * seq[2].w, [seq[2].w]))


def test_one_tensor_for_everything() -> None:
    """``model(x, x)``: gradients add up, and nothing is written to."""
    seq = opfuser.Sequential(Mixed(), AddExtraInput(in_place=True), MakeExtraOutput(in_place=True))
    x = randn(2, 3, grad=True)
    before = x.detach().clone()
    ours = seq(x, x, x)
    expected = (x * x + x, x + x, x * x + x)
    same(ours, expected)
    same(grads(ours, [x]), grads(expected, [x]))
    same(x.detach(), before)


def test_outputs_that_are_one_tensor_have_gradients_of_their_own() -> None:
    seq, x = (
        opfuser.Sequential(Times(), MakeExtraOutput(), MakeExtraOutput()),
        randn(2, 3, grad=True),
    )
    y, one, two = seq(x)
    expected = x * seq[0].w
    same(grads((y, one, two), [x]), grads((expected, expected, expected), [x]))


# ---------------------------------------------------------------------- channels


def producer(channel: str = "skip", **kwargs: Any) -> MakeExtraOutput:
    op = MakeExtraOutput()
    op.set_extra_output_channel(0, channel, **kwargs)
    return op


def consumer(channel: str = "skip") -> AddExtraInput:
    op = AddExtraInput()
    op.set_extra_input_channel(0, channel)
    return op


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("public", [False, True])
def test_channels_with_several_readers(split: bool, public: bool) -> None:
    middle: list[nn.Module] = [Twice()] if split else [ConstantScale(2.0)]
    seq = opfuser.Sequential(
        Times(),
        producer(output_to_caller=public),
        Times(),
        consumer(),
        *middle,
        consumer(),
        Square(),
    )
    x = randn(2, 3, grad=True)
    skip = x * seq[0].w
    expected: Any = (2 * (skip * seq[2].w + skip) + skip) ** 2
    expected = (expected, skip) if public else expected
    ours = seq(x)
    same(ours, expected)
    wrt = [x, seq[0].w, seq[2].w]
    same(grads(ours, wrt), grads(expected, wrt))


def test_a_channel_around_a_plain_module_and_a_hook() -> None:
    seq = opfuser.Sequential(producer(output_to_caller=False), Times(), Twice(), consumer())
    x = randn(2, 3, grad=True)
    for _ in range(2):
        expected = 2 * x * seq[1].w + x
        same(seq(x), expected)
        same(grads(seq(x), [x, seq[1].w]), grads(expected, [x, seq[1].w]))
        seq[0].register_forward_hook(lambda *_: None)


def test_residuals() -> None:
    inner = opfuser.Residual(Times(), opfuser.Residual(Square()))
    seq = opfuser.Sequential(inner, copy.deepcopy(inner), opfuser.Residual(Twice()))
    x = randn(2, 3, grad=True)
    expected = x
    for n in range(2):
        branch = expected * seq[n][1].w
        expected = expected + branch + branch**2
    expected = 3 * expected
    same(seq(x), expected)
    wrt = [x, *seq.parameters()]
    same(grads(seq(x), wrt), grads(expected, wrt))


def test_a_channel_error_leaves_the_sequential_usable() -> None:
    seq = opfuser.Sequential(consumer())
    for _ in range(2):
        with pytest.raises(ChannelError, match="has no producer"):
            seq(randn(2))
    seq.insert(0, producer(output_to_caller=False))
    same(seq(torch.ones(2)), torch.full((2,), 2.0))


def test_channels_do_not_apply_to_an_operation_called_alone() -> None:
    tap, add = producer(output_to_caller=False), consumer()
    x = randn(2)
    y, extra = tap(x)
    same(add(y, extra), 2 * x)
    same(opfuser.Sequential(tap, add)(x), 2 * x)
