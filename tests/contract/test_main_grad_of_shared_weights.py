"""``overwrite_main_grad`` where a weight is used several times in one backward pass.

The first of its gradients is written over what is there, the others are added; the next backward
pass writes over it again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import opfuser as of
from opfuser.basic._backward_pass import stash
from tests.contract.tensors import F64, close, fill, leaf, rand

CASES: dict[str, Callable[[], tuple[Callable[[Tensor], Tensor], nn.Parameter, int]]] = {}


def case(function: Any) -> Any:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def written_over(weight: nn.Parameter) -> nn.Parameter:
    weight.main_grad = torch.full_like(weight, float("nan"))
    weight.overwrite_main_grad = True
    return weight


def linear(weight: nn.Parameter | None = None) -> of.BasicLinear:
    op = fill(of.BasicLinear(6, 6, accumulate_into_main_grad=True, **F64))
    if weight is None:
        written_over(op.weight)
    else:
        op.weight = weight
    return op


def formula(x: Tensor, w: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = F.linear(x, w).tanh()
    return x


@case
def one_operation_twice() -> Any:
    op = linear()
    return of.Sequential(op, of.Tanh(), op, of.Tanh()), op.weight, 2


@case
def two_operations() -> Any:
    op = linear()
    other = linear(op.weight)
    return of.Sequential(op, of.Tanh(), other, of.Tanh()), op.weight, 2


@case
def three_sequences() -> Any:
    op = linear()
    return nn.Sequential(*[of.Sequential(op, of.Tanh()) for _ in range(3)]), op.weight, 3


@case
def in_main_grad_by_scaled_and_tapped_linears() -> Any:
    op = linear()
    scaled, tapped = linear(op.weight), linear(op.weight)
    seq = of.Sequential(
        scaled, of.ConstantScale(1.0), of.Tanh(), of.MakeExtraOutput(), tapped, of.Tanh()
    )
    return lambda x: seq(x)[0], op.weight, 2


@case
def non_reentrant_checkpoints() -> Any:
    op = linear()
    seq = of.Sequential(op, of.Tanh())
    return lambda x: checkpoint(
        seq, checkpoint(seq, seq(x), use_reentrant=False), use_reentrant=False
    ), op.weight, 3  # fmt: skip


def again(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y: Tensor = checkpoint(f, x, use_reentrant=True)
    return y


@case
def reentrant_checkpoints_alone() -> Any:
    """Each starts a backward pass within that of the caller, which never uses the weight itself."""
    op = linear()
    seq = of.Sequential(op, of.Tanh())
    return lambda x: again(seq, again(seq, x)), op.weight, 2


@case
def reentrant_checkpoints_among_others() -> Any:
    op = linear()
    seq = of.Sequential(op, of.Tanh())
    return lambda x: seq(again(seq, seq(again(seq, x)))), op.weight, 4


@case
def checkpoints_in_checkpoints() -> Any:
    op = linear()
    seq = of.Sequential(op, of.Tanh())
    return lambda x: again(lambda t: again(seq, again(seq, t)), again(seq, x)), op.weight, 3


# Of a checkpoint that an outer one calls, torch says so.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kind", CASES)
def test_gradients_of_one_backward_pass_add_up(kind: str) -> None:
    model, weight, times = CASES[kind]()
    for _ in range(3):  # each backward pass writes over the last one's
        x, dy = rand(5, 6, grad=True), rand(5, 6)
        model(x).backward(dy)
        w = leaf(weight)
        formula(x.detach(), w, times).backward(dy)
        close(weight.main_grad, w.grad, 1e-10)
        assert weight.grad_added_to_main_grad is True


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_backward_pass_that_a_node_starts(recomputes: bool) -> None:
    """It is a part of the one around it if its forward ran there too."""
    op = linear()

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.x = x.detach().requires_grad_()
            with torch.enable_grad():
                ctx.y = op(ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            with torch.enable_grad():
                y = op(ctx.x) if recomputes else ctx.y
            y.backward(dy)
            return ctx.x.grad

    x, dy = rand(5, 6, grad=True), rand(5, 6)
    op(Inner.apply(op(x))).backward(dy)
    if recomputes:
        w = leaf(op.weight)
        F.linear(F.linear(F.linear(x.detach(), w), w), w).backward(dy)
        close(op.weight.main_grad, w.grad)
    else:  # a pass of its own, and then the rest of the outer one, which writes over it
        first = (dy @ op.weight.detach() @ op.weight.detach()).t() @ x.detach()
        close(op.weight.main_grad, first)


def test_a_retained_graph() -> None:
    model, weight, times = CASES["one operation twice"]()
    x, dy = rand(5, 6), rand(5, 6)
    y = model(x)
    w = leaf(weight)
    formula(x, w, times).backward(dy)
    for factor in (1.0, 2.0):
        y.backward(factor * dy, retain_graph=True)
        close(weight.main_grad, factor * w.grad)


def test_two_losses_of_one_backward_pass() -> None:
    op = linear()
    seq = of.Sequential(op)
    xs = [rand(5, 6), rand(3, 6)]
    torch.autograd.backward([seq(x).sum() for x in xs])
    close(op.weight.main_grad, sum(x.sum(0) for x in xs).expand(6, 6))


def test_a_pass_that_failed_and_one_after_it() -> None:
    op = linear()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            raise ValueError("no")

    x = rand(5, 6, grad=True)
    with pytest.raises(ValueError, match="no"):
        op(Fails.apply(x)).sum().backward()
    op(x).sum().backward()
    close(op.weight.main_grad, x.detach().sum(0).expand(6, 6))


def test_another_buffer_is_written_over_too() -> None:
    """As where a buffer is handed out for each use, and reduced after it."""
    op = linear()
    buffers = []

    def swap(_: Any) -> None:
        buffers.append(op.weight.main_grad)
        written_over(op.weight)

    x = rand(5, 6)
    h = op(x)
    h.register_hook(swap)  # runs between the two
    y = op(h)
    y.sum().backward()
    h = h.detach()
    close(buffers[0], h.sum(0).expand(6, 6))
    close(op.weight.main_grad, op.weight.detach().sum(0)[:, None] * x.sum(0))


def test_two_threads_each_with_a_pass_of_its_own() -> None:
    ops = [linear(), linear()]
    xs = [rand(5, 6), rand(5, 6)]
    both = threading.Barrier(2)

    def train(n: int) -> None:
        seq = of.Sequential(ops[n], of.Tanh(), ops[n], of.Tanh())
        for _ in range(20):
            both.wait()
            seq(xs[n]).sum().backward()

    threads = [threading.Thread(target=train, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for op, x in zip(ops, xs):
        w = leaf(op.weight)
        formula(x, w, 2).sum().backward()
        close(op.weight.main_grad, w.grad)


def test_what_is_stashed_keeps_its_references() -> None:
    """torch 2.11 frees it once too often unless it gets one of its own."""
    value = object()
    before = sys.getrefcount(value)
    for _ in range(3):
        stash("test", value)
        assert sys.getrefcount(value) == before + 1
    stash("test", None)
    assert sys.getrefcount(value) == before


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_on_a_gpu_whose_backward_has_a_thread_of_its_own() -> None:
    for make in CASES.values():
        model, weight, times = make()
        weight.data = weight.data.cuda()
        written_over(weight)
        for _ in range(2):
            x, dy = rand(5, 6).cuda().requires_grad_(), rand(5, 6).cuda()
            model(x).backward(dy)
            w = leaf(weight)
            formula(x.detach(), w, times).backward(dy)
            close(weight.main_grad, w.grad, 1e-10)


def test_tied_to_an_embedding() -> None:
    """What the embedding contributes is autograd's to accumulate: it has no main_grad."""
    embedding, head = fill(of.Embedding(9, 6, **F64)), of.BasicLinear(6, 9, **F64)
    head.accumulate_into_main_grad = True
    head.weight = written_over(embedding.weight)
    seq = of.Sequential(embedding, of.Tanh(), head)
    for _ in range(2):
        tokens, dy = torch.randint(0, 9, (5,)), rand(5, 9)
        head.weight.grad = None
        seq(tokens).backward(dy)
        w, v = leaf(head.weight), leaf(head.weight)
        F.linear(F.embedding(tokens, w).tanh(), v).backward(dy)
        close(head.weight.main_grad, v.grad)
        close(head.weight.grad, w.grad)


@pytest.mark.parametrize("chunks", [False, True], ids=["loss apart", "loss fused"])
def test_a_fused_loss_and_another_use(chunks: bool) -> None:
    head = fill(of.BasicLinear(6, 6, accumulate_into_main_grad=True, **F64))
    weight = written_over(head.weight)
    seq = of.Sequential(head, of.Tanh(), head, of.CrossEntropy())
    with of.enable("*") if chunks else of.disable("linear_cross_entropy"):
        for _ in range(2):
            x, targets = rand(5, 6), torch.randint(0, 6, (5,))
            seq(x, targets).backward()
            w = leaf(weight)
            F.cross_entropy(F.linear(F.linear(x, w).tanh(), w), targets).backward()
            close(weight.main_grad, w.grad)


@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
@pytest.mark.parametrize("delay", [False, True])
def test_groups(delay: bool, single: bool) -> None:
    op = of.GroupedLinear(
        2, 6, 6, bias=False, accumulate_into_main_grad=True, delay_wgrad_compute=delay,
        single_grouped_weight=single, **F64
    )  # fmt: skip
    weights = [written_over(w) for w in fill(op).parameters()]
    seq = of.Sequential(op, of.Tanh(), op)
    sizes = torch.tensor([2, 3])
    for _ in range(2):
        passes = []
        for _ in range(2):
            x, dy = rand(5, 6), rand(5, 6)
            seq(x, sizes, sizes).backward(dy)
            ws = [leaf(w) for w in weights]
            matrices = list(ws[0].unbind(0)) if single else ws
            h = x
            for _ in range(2):
                parts = zip(h.split([2, 3]), matrices)
                h = torch.cat([F.linear(rows, w) for rows, w in parts]).tanh()
            h.atanh().backward(dy)
            passes.append(ws)
            if not delay:
                for w, want in zip(weights, ws):
                    close(w.main_grad, want.grad)
        for ws in passes if delay else []:  # outside of any backward pass, in order
            assert op.need_backward_dw()
            op.backward_dw()
            op.backward_dw()
            for w, want in zip(weights, ws):
                close(w.main_grad, want.grad)


def test_one_weight_for_two_groups() -> None:
    op = of.GroupedLinear(2, 6, 4, bias=False, accumulate_into_main_grad=True, **F64)
    op.weight1 = written_over(op.weight0)
    x = rand(5, 6)
    op(x, torch.tensor([2, 3])).sum().backward()
    close(op.weight0.main_grad, x.sum(0).expand(4, 6))


def test_by_hand_every_gradient_is_written_over() -> None:
    op = linear()
    dy, x = rand(5, 6), rand(5, 6)
    for _ in range(2):
        op.weight_grad(dy, x)
        close(op.weight.main_grad, dy.t() @ x)


# What torch 2.11 imports for it is deprecated by torch itself.
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_compiled_autograd_works_for_a_weight_that_is_used_once() -> None:
    op = linear()
    x, dy = rand(5, 6), rand(5, 6)
    for _ in range(2):
        y = op(x)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward(dy)
        close(op.weight.main_grad, dy.t() @ x)
