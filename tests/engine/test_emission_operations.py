"""What programs hand to operations and take from them: parameters, settings, keywords, results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import ConstantScale, Sequential
from opfuser.op import BasicOperation, FusedOperation
from opfuser.recipe import Float8BlockScaling
from tests.engine.emission_toys import KEYWORDS, KeywordTap, Scaled, ScaledTap, with_keywords
from tests.engine.toys import F64, Power, Times, grads, randn, same

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
    assert [id(t) for t in kept] == [id(t) for t in (seq[2].a, seq[2].b)]


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
