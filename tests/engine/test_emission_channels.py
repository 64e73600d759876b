"""What programs do with extra tensors: who holds them, and where their gradients go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser import BasicLinear, ConstantScale, MakeExtraOutput, Sequential
from opfuser.core.buffer_reuse import only_reference
from opfuser.op import BasicOperation, FusedOperation, OperationContext
from tests.engine.toys import F64, Stop, Times, consumer, grads, producer, randn, same


class Fresh(BasicOperation):
    """``y = x``, and the extra output ``2 x`` in memory of its own.

    Notes whether nobody else held the gradient of the latter.
    """

    num_extra_outputs = 1

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(made=[], alone=[])

    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        extra = 2 * input_
        self.made.append(weakref.ref(extra))
        return input_ * 1, [(extra,)]

    def fuser_backward(
        self, ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        self.alone.append(only_reference(basic_op_grad_extra_outputs[0]))
        ((more,),) = basic_op_grad_extra_outputs
        return grad_output if more is None else grad_output + 2 * more, [()], [()]


def fresh(to_caller: bool = False) -> Fresh:
    return Fresh().set_extra_output_channel(0, "skip", output_to_caller=to_caller)


class Reader(BasicOperation):
    """``y = x + factor e``. Notes whether nobody else held e, which it may then overwrite."""

    num_extra_inputs = 1

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.__dict__["alone"] = []

    def fuser_forward(
        self, ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        self.alone.append(only_reference(basic_op_extra_inputs[0]))
        return input_ + self.factor * basic_op_extra_inputs[0][0], [()]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        return grad_output, [()], [(self.factor * grad_output,)]


def reader(factor: float = 1.0) -> Reader:
    return Reader(factor).set_extra_input_channel(0, "skip")


class Looks(BasicOperation):
    """Does nothing but call a function in either pass."""

    def __init__(self, forward: Callable[[], Any], backward: Callable[[], Any] = list) -> None:
        super().__init__()
        self.__dict__["look"] = forward, backward

    def op_forward(self, ctx: OperationContext, input_: Tensor, **unused: Any) -> Tensor:
        self.look[0]()
        return input_ * 1

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        self.look[1]()
        return grad_output, ()


# Extra outputs: who holds them, and for how long.


@pytest.mark.parametrize("to_caller", [False, True])
def test_the_last_reader_of_an_extra_output_has_the_only_reference(to_caller: bool) -> None:
    seq = Sequential(fresh(to_caller), reader(), ConstantScale(2.0), reader())
    with torch.no_grad():
        seq(randn(2, 3))
    assert (seq[1].alone, seq[3].alone) == ([False], [not to_caller])


@pytest.mark.parametrize("readers", [1, 2])
def test_the_gradient_of_a_channel_is_held_by_nobody_else(readers: int) -> None:
    seq, x = Sequential(fresh(), *[reader() for _ in range(readers)]), randn(2, 3, grad=True)
    seq(x).sum().backward()
    assert seq[0].alone == [True]


@pytest.mark.parametrize("readers", [0, 1])
def test_an_extra_output_is_gone_behind_its_last_reader(readers: int) -> None:
    found: list[bool] = []
    make = fresh()
    after = Looks(lambda: found.append(make.made[-1]() is None))
    seq = Sequential(make, *[reader() for _ in range(readers)], after, ConstantScale(2.0))
    x = randn(2, 3)
    with torch.no_grad():
        seq(x)
    seq(x.requires_grad_())
    assert found == [True, True]


# Gradients: sums, zeros, steps that are left out.


@pytest.mark.parametrize("to_caller", [False, True])
def test_gradients_of_a_channel_are_added_in_the_order_of_backward(to_caller: bool) -> None:
    """The caller's first. In fp32 the order shows."""
    factors = [1.0, 2.0**24, -(2.0**24)]
    seq = Sequential(fresh(to_caller), *map(reader, factors))
    x = torch.ones(3, requires_grad=True)
    ys = seq(x)
    own = torch.full((3,), 0.75)
    outputs, given = (ys, [torch.ones(3), own]) if to_caller else ([ys], [torch.ones(3)])
    (dx,) = torch.autograd.grad(outputs, x, given)
    assert torch.equal(own, torch.full((3,), 0.75))
    terms = [own] if to_caller else []
    terms += [torch.full((3,), factor) for factor in reversed(factors)]

    def result(ordered: Sequence[Tensor]) -> Tensor:
        total = ordered[0]
        for term in ordered[1:]:
            total = total + term
        return 1 + 2 * total

    assert torch.equal(dx, result(terms))
    assert not torch.equal(dx, result(terms[::-1]))


class Twins(BasicOperation):
    """``y = x + 2 a + 3 b`` of two extra inputs."""

    num_extra_inputs = 2

    def fuser_forward(
        self, ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        ((a, b),) = basic_op_extra_inputs
        return input_ + 2 * a + 3 * b, [()]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        return grad_output, [()], [(2 * grad_output, 3 * grad_output)]


def test_an_operation_reads_a_channel_twice() -> None:
    twins = Twins().set_extra_input_channel(0, "skip").set_extra_input_channel(1, "skip")
    x = randn(2, 3, grad=True)
    seq = Sequential(producer(output_to_caller=False), twins, consumer())
    same(grads(seq(x), [x]), grads(7 * x, [x]))


def test_extra_inputs_of_the_caller_have_their_own_gradients() -> None:
    x, a, b, c = (randn(2, 3, grad=True) for _ in range(4))
    seq = Sequential(Twins(), Times(), Reader(5.0))
    expected = (x + 2 * a + 3 * b) * seq[1].w + 5 * c
    wrt = [x, a, b, c, seq[1].w]
    same(grads(seq(x, a, b, c), wrt), grads(expected, wrt))


@pytest.mark.parametrize("read", ["output", "extra"])
def test_steps_that_no_gradient_reaches_do_not_run(read: str) -> None:
    ran: list[str] = []

    def notes(name: str) -> Looks:
        return Looks(list, lambda: ran.append(name))

    seq = Sequential(notes("before"), MakeExtraOutput(), notes("between"), Stop(), notes("behind"))
    x = randn(2, 3, grad=True)
    y, extra = seq(x)
    wanted = y if read == "output" else extra
    (dx,) = torch.autograd.grad(wanted.sum(), x, allow_unused=True)
    # The gradient of the output that is not differentiated is zero for the step behind.
    assert ran == (["behind"] if read == "output" else ["behind", "before"])
    same(dx, None if read == "output" else torch.ones_like(x))


def test_zeros_have_the_shape_of_the_output_that_forward_made_alone() -> None:
    """The backward of a tap and a linear operation is one step, their forwards are two."""
    model = Sequential(MakeExtraOutput(), BasicLinear(3, 5, dtype=F64), Stop())
    x = torch.randn(2, 3, dtype=F64, requires_grad=True)
    plan = model.plan(x)
    assert [step.indices for step in plan.forward] == [(0,), (1,), (2,)]
    assert [step.indices for step in plan.backward] == [(0, 1), (2,)]
    _, tapped = outputs = model(x)
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert torch.equal(x.grad, torch.ones_like(tapped))  # type: ignore[arg-type]
    (weight,) = model.parameters()
    assert torch.equal(weight.grad, torch.zeros_like(weight))  # type: ignore[arg-type]


def test_nothing_runs_in_front_of_the_first_gradient() -> None:
    """There, what operations save is dropped, and their contexts say that no backward will run."""
    asked: list[bool] = []
    ran: list[int] = []

    class Saves(BasicOperation):
        def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
            asked.append(ctx.requires_grad)
            ctx.save_for_backward(input_ + 1)
            return input_ * 1

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            ran.append(len(ctx.saved_tensors))
            return grad_output, ()

    seq = Sequential(Saves(), Times(), Saves())
    y = seq(randn(2, 3))
    assert asked == [False, True]
    assert len(y.grad_fn.saved_tensors) == 3
    y.sum().backward()
    assert ran == [1]


class Needs(BasicOperation):
    """``y = x``; notes what its context says."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["noted"] = []

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        self.noted.append((ctx.requires_grad, tuple(ctx.needs)))
        if ctx.requires_grad:
            ctx.save_for_backward(3 * input_)
        return input_ * 1

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, ()


class BackwardNeedsTimes(FusedOperation):
    """The backward of Needs and Times; reads what both saved."""

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        (tripled,), (x, w) = (ctx.saved_tensors for ctx in ctxs)
        same(tripled, 3 * x)
        dx = grad_output * w if ctxs[0].needs.input else None
        return dx, [(), ((grad_output * x).sum(0),)], [(), ()]


def test_who_shares_a_backward_step_saves_for_it() -> None:
    """Also an operation that owes no gradient, which no pattern fuses, but a function may."""

    def fuse(ops: Any) -> list[Any]:
        return [BackwardNeedsTimes(ops)]

    seq, x = Sequential(Needs(), Times()), randn(2, 3)
    with opfuser.register_backward_fusion(fuse, name="needs_times"):
        seq(x).sum().backward()
        assert seq.last_plan.fused("backward") == {"needs_times": 1}
    same(seq[1].w.grad, x.sum(0))
    assert seq[0].noted == [(True, (False, (), ()))]
