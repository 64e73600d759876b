"""What a program does and leaves out, seen by the operations that it calls."""

from __future__ import annotations

import linecache
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import profiler

import opfuser
from opfuser import AddExtraInput, BasicLinear, ConstantScale, MakeExtraOutput, Sequential
from opfuser.buffer_reuse import only_reference
from opfuser.engine import program as programs
from opfuser.engine.program import Program
from opfuser.op import BasicOperation, FusedOperation, OperationContext
from opfuser.recipe import Float8BlockScaling
from tests.engine.toys import (
    F64,
    Mixed,
    Power,
    RowSum,
    Square,
    Stop,
    Times,
    consumer,
    grads,
    producer,
    randn,
    same,
    without_collector,
)


def program_of(seq: Sequential) -> Program:
    """That of a sequence whose calls had all the same key."""
    ((program,),) = [
        tuple(group._programs.values()) for group in seq._module_groups or () if group is not None
    ]
    return program


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


def test_the_caller_gets_extra_outputs_that_somebody_read() -> None:
    x = randn(2, 3)
    y, extra = Sequential(fresh(to_caller=True), reader())(x)
    same([y, extra], [3 * x, 2 * x])


IN_PLACE = {
    "the caller's": (lambda add: [ConstantScale(2.0), add], lambda x, e: (x, e), True),
    "the input": (lambda add: [add], lambda x, e: (x, x), False),
    "an extra output": (
        lambda add: [MakeExtraOutput(), ConstantScale(2.0), add], lambda x, e: (x, x), False,
    ),
    "another extra input": (
        lambda add: [add, ConstantScale(2.0), AddExtraInput()], lambda x, e: (x, e, e), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", IN_PLACE)
def test_the_sum_in_place_is_written_where_nobody_else_reads(case: str, training: bool) -> None:
    make, arguments, overwritten = IN_PLACE[case]
    add = AddExtraInput(in_place=True)
    x, e = randn(2, 3), randn(2, 3)
    given = arguments(x, e)
    expected = Sequential(*make(AddExtraInput()))(*[t.clone() for t in given])
    before = given[-1].clone()
    if training:
        given = tuple(t.clone() for t in given)  # no leaves, which autograd lets nobody change
        given[0].requires_grad_()
    same(Sequential(*make(add))(*given), expected)
    assert torch.equal(given[-1], before) == (training or not overwritten)


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


def test_zeros_stand_for_the_gradient_of_an_output_that_nobody_differentiates() -> None:
    """They have shape and dtype of the output, not those of the extra output."""
    seq, x = Sequential(Times(), RowSum(), Square(), Stop()), randn(2, 3, grad=True)
    (dx,) = torch.autograd.grad(seq(x)[1].sum(), x)
    same(dx, seq[0].w.detach().expand(2, 3))


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


# Which functions of an operation are called.


class Whole(BasicOperation):
    """``y = 2 x``, as ``op_forward`` and ``op_backward`` have it."""

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return 2 * grad_output, ()


class ForwardOfItsOwn(Whole):
    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        return 3 * input_, [()]


class BackwardOfItsOwn(Whole):
    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        return 3 * grad_output, [()], [()]


class BothOfItsOwn(Whole):
    fuser_forward = ForwardOfItsOwn.fuser_forward
    fuser_backward = BackwardOfItsOwn.fuser_backward


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        (Whole, (2, 2)),
        (ForwardOfItsOwn, (3, 2)),
        (BackwardOfItsOwn, (2, 3)),
        (BothOfItsOwn, (3, 3)),
    ],
)
def test_what_a_class_overrides_is_called(
    kind: type[BasicOperation], factors: tuple[int, int]
) -> None:
    x = randn(2, 3, grad=True)
    y = Sequential(kind(), Times())(x)
    w = torch.linspace(0.5, 2.0, 3, dtype=F64)
    same(y, factors[0] * x * w)
    same(torch.autograd.grad(y.sum(), [x]), (factors[1] * w.expand(2, 3),))


# Parameters and settings.


class Reads(BasicOperation):
    """``y = a x + b``; backward reads the parameters that forward had."""

    backward_reads_parameters = True

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((3,), a, dtype=F64))
        self.b = nn.Parameter(torch.full((3,), b, dtype=F64))

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_ * self.a + self.b

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        (x,), (a, b) = ctx.saved_tensors, ctx.parameters
        assert b is not None
        return grad_output * a, ((grad_output * x).sum(0), grad_output.sum(0) * b / b)


class ReadsInAStep(FusedOperation):
    """Both passes of two of them, one after the other."""

    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        for op, ctx in zip(self.basic_ops, ctxs):
            input_ = op.op_forward(ctx, input_)
        return input_, [(), ()]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        found = []
        for op, ctx in reversed(list(zip(self.basic_ops, ctxs))):
            grad_output, own = op.op_backward(ctx, grad_output)
            found.append(own)
        return grad_output, found[::-1], [(), ()]


TWO = opfuser.Fusion("two", "joint", (Reads, Reads), lambda *ops: ReadsInAStep(ops))


@contextmanager
def fused(fusion: opfuser.Fusion | None) -> Iterator[None]:
    if fusion is None:
        yield
    else:
        with opfuser.register_forward_backward_fusion(fusion):
            yield


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("fusion", [None, TWO], ids=["", "fused"])
def test_each_operation_reads_its_own_parameters(
    fusion: opfuser.Fusion | None, replaced: bool
) -> None:
    """Those of the forward, each with a gradient of its own."""
    seq = Sequential(Reads(2.0, 3.0), Times(), Reads(5.0, 7.0), Reads(11.0, 13.0), Times())
    x = randn(2, 3, grad=True)
    wrt = [x, *seq.parameters()]
    with fused(fusion):
        y = seq(x)
        assert bool(seq.last_plan.fused("backward")) == (fusion is not None)
    expected = (x * seq[0].a + seq[0].b) * seq[1].w
    for op in (seq[2], seq[3]):
        expected = expected * op.a + op.b
    expected = expected * seq[4].w
    if replaced:
        for op in (seq[0], seq[2], seq[3]):
            op.a = nn.Parameter(torch.zeros(3, dtype=F64))
    same(y, expected)
    same(grads(y, wrt), grads(expected, wrt))


def test_parameters_of_operations_without_a_backward_are_not_kept() -> None:
    seq = Sequential(Reads(2.0, 3.0).requires_grad_(False), Times(), Reads(5.0, 7.0))
    y = seq(randn(2, 3))
    kept = [t for t in y.grad_fn.saved_tensors if isinstance(t, nn.Parameter)]
    assert [id(t) for t in kept] == [id(t) for t in (seq[1].w, seq[2].a, seq[2].b)]


class Settings(NamedTuple):
    factor: float


class Scaled(BasicOperation):
    """``y = factor x`` with settings."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def make_settings(self) -> Settings:
        return Settings(self.factor)

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return input_ * ctx.settings.factor

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output * ctx.settings.factor, ()


class ScaledTap(Scaled):
    """Besides, its output as an extra output, so that its step follows the general protocol."""

    num_extra_outputs = 1

    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        y = self.op_forward(ctxs[0], input_)
        return y, [(y,)]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        return self.op_backward(ctxs[0], grad_output)[0], [()], [()]


@pytest.mark.parametrize("kind", [Scaled, ScaledTap])
def test_settings_are_those_of_the_forward(kind: type[Scaled]) -> None:
    """Of each call and each operation, also where an operation was changed since."""
    seq, x = Sequential(kind(2.0), kind(3.0)), randn(2, 3, grad=True)

    def call() -> Tensor:
        result = seq(x)
        return result if kind is Scaled else result[0]

    first = call()
    seq[0].factor = 5.0
    second = call()
    seq[1].factor = 7.0
    for y, factor in ((first, 6), (second, 15)):
        same(y, factor * x)
        same(grads(y, [x]), grads(factor * x, [x]))


# Keywords.


class KeywordTap(BasicOperation):
    """``y = x + add``, and the extra output ``x``."""

    num_extra_outputs = 1

    def fuser_forward(
        self, ctxs: Any, input_: Tensor, *, basic_op_kwargs: Any, **unused: Any
    ) -> Any:
        return input_ + basic_op_kwargs[0].get("add", 0), [(input_,)]

    def fuser_backward(
        self, ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ((more,),) = basic_op_grad_extra_outputs
        return grad_output if more is None else grad_output + more, [()], [()]


KEYWORDS = {0: {"power": 2}, 1: {"add": 1}, 3: {"power": 3}}


def with_keywords(x: Tensor) -> tuple[Tensor, Tensor]:
    return ((x**2 + 1) * 2) ** 3, x**2


def test_keywords_reach_their_operations_and_no_later_call() -> None:
    seq = Sequential(Power(), KeywordTap(), ConstantScale(2.0), Power())
    x = randn(2, 3, grad=True)
    for _ in range(2):
        found, expected = seq(x, op_kwargs=KEYWORDS), with_keywords(x)
        same(found, expected)
        same(grads(found, [x]), grads(expected, [x]))
        same(seq(x), (2 * x, x))


# What operations of users may return.


class Returns(BasicOperation):
    """``y = w x e`` and the extra output ``x``; returns both passes' results as it is told."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self, forward: Any, backward: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0], dtype=F64))
        self.__dict__["forms"] = forward, backward

    def fuser_forward(
        self, ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        ((e,),) = basic_op_extra_inputs
        ctxs[0].save_for_backward(input_, e, self.w)
        return self.forms[0](input_ * e * self.w, input_)

    def fuser_backward(
        self, ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        x, e, w = ctxs[0].saved_tensors
        ((more,),) = basic_op_grad_extra_outputs
        dx = grad_output * e * w + more
        return self.forms[1](dx, (grad_output * x * e).sum().reshape(1), grad_output * x * w)


FORWARDS = [
    lambda y, extra: (y, [(extra,)]),
    lambda y, extra: [y, ([extra],)],
    lambda y, extra: (y, [iter([extra])]),
]
BACKWARDS = [
    lambda dx, dw, de: (dx, [(dw,)], [(de,)]),
    lambda dx, dw, de: [dx, ([dw],), ([de],)],
    lambda dx, dw, de: (dx, [iter([dw])], [iter([de])]),
]


@pytest.mark.parametrize("number", range(3))
def test_results_may_be_lists_tuples_and_iterators(number: int) -> None:
    seq = Sequential(Times(), Returns(FORWARDS[number], BACKWARDS[number]))
    x, e = randn(2, 3, grad=True), randn(2, 3, grad=True)
    u = x * seq[0].w
    for _ in range(2):  # verified, and not
        wrt = [x, e, *seq.parameters()]
        expected = u * e * seq[1].w, u
        same(seq(x, e), expected)
        same(grads(seq(x, e), wrt), grads(expected, wrt, retain_graph=True))


class Plainly(BasicOperation):
    """``y = 2 x + 0 w``, without a gradient of w, which it returns as it is told."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=F64))
        self.__dict__["form"] = form

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return self.form(2 * grad_output)


class PlainlyAlone(FusedOperation):
    """The backward of one of them as a step of its own kind."""

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        return 2 * grad_output, [None], [None]


@pytest.mark.parametrize(
    "form", [lambda dx: (dx, None), lambda dx: [dx, [None]], lambda dx: (dx, iter([None]))]
)
def test_none_stands_for_a_row_of_gradients(form: Callable[[Tensor], Any]) -> None:
    fusion = opfuser.Fusion("alone", "backward", (Plainly,), lambda op: PlainlyAlone([op]))
    x = randn(2, 3, grad=True)
    seq = Sequential(Times(), Plainly(form))
    expected = grads(2 * x * seq[0].w, [x, seq[0].w])
    same(grads(seq(x), [x, *seq.parameters()]), [*expected, None])
    with opfuser.register_backward_fusion(fusion):
        y = seq(x)
        assert seq.last_plan.fused("backward") == {"alone": 1}
        same(grads(y, [x, *seq.parameters()]), [*expected, None])


# Codes between steps.


class Emits(BasicOperation):
    """``y = x``; notes how it may hand on its output and its gradient."""

    emits_quantized = True
    emits_quantized_grad = True

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["noted"] = []

    def op_forward(
        self,
        ctx: Any,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        self.noted.append(next_op_input_quantizer)
        return input_ * 1

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        self.noted.append(ctx.grad_input_quantizer)
        return grad_output, ()


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
@pytest.mark.parametrize("watched", [False, True])
def test_codes_are_handed_on_where_nobody_is_told_of_them(watched: bool) -> None:
    seq = Sequential(opfuser.Linear(128, 128), Emits(), opfuser.Linear(128, 128))
    x = torch.randn(5, 128, requires_grad=True)

    def call() -> Tensor:
        with opfuser.autocast(recipe=Float8BlockScaling()):
            y: Tensor = seq(x)
        for _ in range(2):  # the second one finds the contexts as the first one found them
            y.sum().backward(retain_graph=True)
        return y

    if watched:
        with opfuser.watch_quantization(seq):
            call()
        assert seq[1].noted == [None] * 3
    seq[1].noted.clear()
    y = call()
    assert [quantizer.role for quantizer in seq[1].noted] == ["input", "grad_output", "grad_output"]
    with opfuser.watch_quantization(seq):
        y.sum().backward()
    assert seq[1].noted[3:] == [None]


# Memory.


class Keeps(BasicOperation):
    """Saves a tensor of its own, without being asked; knows which of those are alive."""

    def __init__(self, refs: list[Any], alive: list[Any]) -> None:
        super().__init__()
        self.__dict__.update(refs=refs, alive=alive)

    def keep(self, ctx: Any, x: Tensor) -> Tensor:
        self.alive.append([ref() is not None for ref in self.refs])
        ctx.save_for_backward(x + 1)
        self.refs.append(weakref.ref(ctx.to_save[0]))
        return x * 1

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return self.keep(ctx, input_)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        self.alive.append([ref() is not None for ref in self.refs])
        return grad_output, ()


class KeepsAndTaps(Keeps):
    """The same with an extra output."""

    num_extra_outputs = 1

    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        return self.keep(ctxs[0], input_), [(input_,)]

    def fuser_backward(
        self, ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        return self.op_backward(ctxs[0], grad_output)[0], [()], [()]


KINDS = {
    "plain": (Keeps, Keeps, Keeps),
    "general": (KeepsAndTaps, KeepsAndTaps, KeepsAndTaps),
    "one after the other": (Keeps, KeepsAndTaps, Keeps),
}


@pytest.mark.parametrize("kinds", KINDS)
def test_a_forward_without_gradients_frees_what_operations_save(kinds: str) -> None:
    refs: list[Any] = []
    alive: list[Any] = []
    seq = Sequential(*[kind(refs, alive) for kind in KINDS[kinds]], ConstantScale(2.0))
    with torch.no_grad():
        seq(randn(2, 3))
    assert alive == [[], [False], [False, False]]


@pytest.mark.parametrize("kinds", KINDS)
def test_what_was_saved_is_freed_step_by_step_in_backward(kinds: str) -> None:
    refs: list[Any] = []
    alive: list[Any] = []
    seq = Sequential(*[kind(refs, alive) for kind in KINDS[kinds]])
    y = seq(randn(2, 3, grad=True))
    y = y if isinstance(y, Tensor) else y[0]
    alive.clear()
    y.sum().backward()
    assert alive == [[True] * 3, [True, True, False], [True, False, False]]


def test_what_a_program_is_made_of_goes_with_it() -> None:
    """Its functions and its texts, without the garbage collector."""
    seq, x = Sequential(Times(), Mixed(), RowSum()), randn(2, 3, grad=True)
    with without_collector():
        y = seq(x, randn(2, 3))[0]
        y.sum().backward()
        made = program_of(seq)
        functions = [weakref.ref(made.function(stage)) for stage in ("forward", "backward")]
        files = [f().__code__.co_filename for f in functions]
        assert all(linecache.getline(file, 1).startswith("def ") for file in files)
        del made, seq, y
        assert [f() for f in functions] == [None, None]
        assert not any(file in linecache.cache for file in files)


# Texts, files and emissions.


class Files(BasicOperation):
    """Notes the files of the programs that call it; raises if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(noted=[], raises="")

    def note(self, stage: str) -> None:
        frame: Any = sys._getframe(2)
        while not frame.f_code.co_filename.startswith("<opfuser program"):
            frame = frame.f_back
        self.noted.append(frame.f_code.co_filename.split(": ")[-1].rstrip(">"))
        if self.raises == stage:
            raise ZeroDivisionError

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        self.note("forward")
        return input_ * 1

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        self.note("backward")
        return grad_output, ()


def test_programs_do_besides_what_a_call_asks_for() -> None:
    files = Files()
    seq, x = Sequential(files, Power()), randn(2, 3, grad=True)

    def noted(**kwargs: Any) -> list[str]:
        files.noted.clear()
        seq(x, **kwargs).sum().backward()
        return list(files.noted)

    keywords = {"op_kwargs": {1: {"power": 2}}}
    assert noted() == ["forward verified", "backward verified"]
    assert noted() == ["forward", "backward"]
    assert noted(**keywords) == ["forward", "backward"]
    with profiler.profile():
        assert noted() == ["forward ranged", "backward ranged"]
        assert noted(**keywords) == ["forward ranged", "backward ranged"]
    assert noted() == ["forward", "backward"]


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_traceback_shows_the_line_of_the_step(stage: str) -> None:
    files = Files()
    seq, x = Sequential(Times(), files, RowSum()), randn(2, 3, grad=True)
    seq(x)[0].sum().backward()
    files.__dict__["raises"] = stage
    with pytest.raises(ZeroDivisionError) as caught:
        seq(x)[0].sum().backward()
    lines = [
        frame.line
        for frame in traceback.extract_tb(caught.value.__traceback__)
        if frame.filename.startswith("<opfuser program")
    ]
    assert [f"op1.op_{stage}(" in str(line) for line in lines] == [True]


NAMES = ['a"""\nraise ZeroDivisionError', "b\r\nraise ZeroDivisionError", "c\x0c\u2028raise", "d\0"]


def test_names_of_users_are_no_code() -> None:
    kind = type("K\nraise ZeroDivisionError\n'''", (Times,), {})
    x = randn(2, 3, grad=True)
    seq = Sequential({name: kind() for name in NAMES})
    expected = x
    for op in seq:
        expected = expected * op.w
    with profiler.profile():  # whose ranges have names, too
        seq(x)
    same(grads(seq(x), [x]), grads(expected, [x]))


class Refuses(Times):
    """Reads in backward what was not kept."""

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return ctx.parameters[0], ()


class RefusesTap(Refuses):
    """The same with an extra output, by a call of several lines."""

    num_extra_outputs = 1

    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        return input_ * 1, [(input_,)]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        return self.op_backward(ctxs[0], grad_output)


@pytest.mark.parametrize("kind", [Refuses, RefusesTap])
def test_errors_name_the_step_of_their_line(kind: type[Refuses]) -> None:
    seq, x = Sequential(Times(), kind(), Times(), RowSum()), randn(2, 3, grad=True)
    y = seq(x)[0]
    with pytest.raises(opfuser.errors.ContextError) as caught:
        y.sum().backward()
    assert f"in the backward of op 1 ({kind.__name__})" in str(caught.value)


class Watcher:
    """Stands for an operation, and counts its calls."""

    def __init__(self, op: Any, calls: list[str], stage: str) -> None:
        self._op, self._calls, self._stage = op, calls, stage

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("op_", "fuser_")):
            self._calls.append(self._stage)
        return getattr(self._op, name)


def test_programs_call_watchers_while_these_watch() -> None:
    seq, x = Sequential(Scaled(2.0), ScaledTap(3.0)), randn(2, 3, grad=True)
    calls: list[str] = []

    def call() -> None:
        y = seq(x)[0]
        same(y, 6 * x)
        same(grads(y, [x]), grads(6 * x, [x]))

    call()
    with program_of(seq).watched(lambda step, stage: Watcher(step.op, calls, stage)):
        call()
        call()
    assert calls == ["forward", "forward", "backward", "backward"] * 2
    call()
    assert len(calls) == 8


# Threads.


def test_threads_compile_a_program_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seq, x = Sequential(Times(), Square(), Times()), randn(2, 3)
    with torch.no_grad():
        expected = seq(x)
    found = program_of(seq)
    fresh_program = Program(found.plan)
    both, emit = Barrier(2, timeout=30), programs.emit_forward

    def together(*args: Any) -> Any:
        text = emit(*args)
        both.wait()
        return text

    monkeypatch.setattr(programs, "emit_forward", together)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(fresh_program.function, "forward") for _ in range(2)]
        functions = [future.result() for future in futures]
    for function in functions:
        with torch.no_grad():
            y, extras = function(x, (), [{}, {}, {}], None, None)
        assert torch.equal(y, expected)
        assert extras == []
    assert fresh_program.function("forward") in functions


# torch.compile.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_traced_programs_have_keywords_and_current_settings() -> None:
    torch._dynamo.reset()
    seq = Sequential(Power(), KeywordTap(), Scaled(2.0), Power())
    x = randn(2, 3, grad=True)

    def call(x: Tensor) -> Any:
        return seq(x, op_kwargs=KEYWORDS)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = compiled(x), with_keywords(x)
    same(found, expected)
    same(grads(found, [x]), grads(expected, [x]))
    seq[2].factor = 3.0
    same(compiled(x), call(x))
    torch._dynamo.reset()
