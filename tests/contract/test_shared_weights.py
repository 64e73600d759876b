"""Weights used several times in one backward pass, whose gradients the GEMM adds up itself.

With ``accumulate_into_grad`` they are added to those of autograd and of earlier passes. With
``overwrite_main_grad`` the first of a pass is written over what is there, the others are added.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import opfuser as of
from opfuser.torch_internals import stash
from tests.contract.gradients import ADDS
from tests.contract.tensors import F64, close, fill, leaf, rand


class Op(NamedTuple):
    """The operation whose weight is shared, and how to make another one that has its weight."""

    op: of.BasicLinear
    other: Callable[[], of.BasicLinear]


Build = Callable[[Op], Callable[[Tensor], Tensor]]


def again(f: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool = True) -> Tensor:
    y: Tensor = checkpoint(f, x, use_reentrant=reentrant)
    return y


def _scaled_and_tapped(shared: Op) -> Callable[[Tensor], Tensor]:
    seq = of.Sequential(
        shared.op, of.ConstantScale(1.0), of.Tanh(), of.MakeExtraOutput(), shared.other(), of.Tanh()
    )
    return lambda x: seq(x)[0]


def _checkpoints(shared: Op) -> Callable[[Tensor], Tensor]:
    seq = of.Sequential(shared.op, of.Tanh())
    return lambda x: again(seq, again(seq, seq(x), False), False)


def _reentrant_alone(shared: Op) -> Callable[[Tensor], Tensor]:
    """Each starts a backward pass within that of the caller, which never uses the weight itself."""
    seq = of.Sequential(shared.op, of.Tanh())
    return lambda x: again(seq, again(seq, x))


def _reentrant_among_others(shared: Op) -> Callable[[Tensor], Tensor]:
    seq = of.Sequential(shared.op, of.Tanh())
    return lambda x: seq(again(seq, seq(again(seq, x))))


def _reentrant_in_reentrant(shared: Op) -> Callable[[Tensor], Tensor]:
    seq = of.Sequential(shared.op, of.Tanh())
    return lambda x: again(lambda t: again(seq, again(seq, t)), again(seq, x))


def _plain(shared: Op) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, shared.op.weight).tanh()


def _plain_torch_on_both_sides(shared: Op) -> Callable[[Tensor], Tensor]:
    seq, plain = of.Sequential(shared.op, of.Tanh()), _plain(shared)
    return lambda x: plain(seq(plain(x)))


def _one_that_does_not_add(shared: Op) -> Callable[[Tensor], Tensor]:
    other = of.BasicLinear(6, 6)
    other.weight = shared.op.weight
    return of.Sequential(other, of.Tanh(), shared.op, of.Tanh(), other, of.Tanh())


# How often each uses the weight: every use is followed by tanh.
CASES: dict[str, tuple[Build, int]] = {
    "one operation twice": (lambda s: of.Sequential(s.op, of.Tanh(), s.op, of.Tanh()), 2),
    "two operations": (lambda s: of.Sequential(s.op, of.Tanh(), s.other(), of.Tanh()), 2),
    "three sequences": (
        lambda s: nn.Sequential(*[of.Sequential(s.op, of.Tanh()) for _ in range(3)]), 3
    ),
    "scaled and tapped": (_scaled_and_tapped, 2),
    "checkpoints": (_checkpoints, 3),
    "reentrant checkpoints alone": (_reentrant_alone, 2),
    "reentrant checkpoints among others": (_reentrant_among_others, 4),
    "checkpoints in checkpoints": (_reentrant_in_reentrant, 3),
}  # fmt: skip
WITH_AUTOGRAD: dict[str, tuple[Build, int]] = {
    "plain torch on both sides": (_plain_torch_on_both_sides, 3),
    "one that does not add": (_one_that_does_not_add, 3),
}


def written_over(weight: nn.Parameter) -> nn.Parameter:
    weight.main_grad = torch.full_like(weight, float("nan"))
    weight.overwrite_main_grad = True
    return weight


def into_main_grad(classes: int = 6, device: Any = "cpu") -> of.BasicLinear:
    op = fill(of.BasicLinear(6, classes, accumulate_into_main_grad=True, **F64)).to(device)
    written_over(op.weight)
    return op


def into_grad(classes: int = 6, device: Any = "cpu") -> of.BasicLinear:
    return fill(of.BasicLinear(6, classes, **ADDS, **F64)).to(device)


def shared(make: Callable[..., of.BasicLinear], device: Any = "cpu") -> Op:
    op = make(device=device)

    def other() -> of.BasicLinear:
        twin = make(device=device)
        twin.weight = op.weight
        return twin

    return Op(op, other)


def formula(x: Tensor, w: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = F.linear(x, w).tanh()
    return x


# Of a checkpoint that an outer one calls, torch says so.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("kind", "make"),
    [(kind, into_main_grad) for kind in CASES]
    + [(kind, into_grad) for kind in CASES | WITH_AUTOGRAD],
)
def test_gradients_of_one_weight_add_up(kind: str, make: Any, device: torch.device) -> None:
    build, times = (CASES | WITH_AUTOGRAD)[kind]
    op = shared(make, device)
    model, weight = build(op), op.op.weight
    w = leaf(weight)
    for _ in range(3):
        x, dy = rand(5, 6).to(device).requires_grad_(), rand(5, 6).to(device)
        model(x).backward(dy)
        if make is into_main_grad:  # each backward pass writes over the last one's
            w.grad = None
        formula(x.detach(), w, times).backward(dy)
        close(weight.main_grad if make is into_main_grad else weight.grad, w.grad, 1e-10)
        assert make is into_grad or weight.grad_added_to_main_grad is True


@pytest.mark.parametrize(("one_sequence", "loss"), [(True, False), (True, True), (False, True)])
def test_grad_of_a_weight_tied_to_an_embedding(one_sequence: bool, loss: bool) -> None:
    embedding, head = fill(of.Embedding(9, 6, **F64)), into_grad(9)
    head.weight = embedding.weight
    tail: list[nn.Module] = [head, *([of.CrossEntropy()] if loss else [])]
    if one_sequence:
        model: Any = of.Sequential(embedding, of.RMSNorm(6, **F64), *tail)
    else:
        body, end = of.Sequential(embedding, of.RMSNorm(6, **F64)), of.Sequential(*tail)
        model = lambda tokens, *targets: end(body(tokens), *targets)  # noqa: E731
    w = leaf(embedding.weight)
    for _ in range(3):
        tokens, targets = torch.randint(0, 9, (5,)), torch.randint(0, 9, (5,))
        logits = F.linear(F.rms_norm(F.embedding(tokens, w), (6,), eps=1e-5), w)
        if loss:
            model(tokens, targets).backward()
            F.cross_entropy(logits, targets).backward()
        else:
            dy = rand(5, 9)
            model(tokens).backward(dy)
            logits.backward(dy)
        close(embedding.weight.grad, w.grad)


def test_main_grad_of_a_weight_tied_to_an_embedding() -> None:
    """What the embedding contributes is autograd's to accumulate: it has no main_grad."""
    embedding, head = fill(of.Embedding(9, 6, **F64)), into_main_grad(9)
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


# What is one backward pass, and what another one: the first gradient of each is written over.


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_backward_pass_that_a_node_starts(recomputes: bool) -> None:
    """It is a part of the one around it if its forward ran there too."""
    op = into_main_grad()

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
    op = shared(into_main_grad)
    model, weight = CASES["one operation twice"][0](op), op.op.weight
    x, dy = rand(5, 6), rand(5, 6)
    y, w = model(x), leaf(weight)
    formula(x, w, 2).backward(dy)
    for factor in (1.0, 2.0):
        y.backward(factor * dy, retain_graph=True)
        close(weight.main_grad, factor * w.grad)


def test_two_losses_of_one_backward_pass() -> None:
    op = into_main_grad()
    xs = [rand(5, 6), rand(3, 6)]
    torch.autograd.backward([of.Sequential(op)(x).sum() for x in xs])
    close(op.weight.main_grad, sum(x.sum(0) for x in xs).expand(6, 6))


def test_a_pass_that_failed_and_one_after_it() -> None:
    op = into_main_grad()

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
    op = into_main_grad()
    buffers = []

    def swap(_: Any) -> None:
        buffers.append(op.weight.main_grad)
        written_over(op.weight)

    x = rand(5, 6)
    h = op(x)
    h.register_hook(swap)  # runs between the two
    op(h).sum().backward()
    close(buffers[0], h.detach().sum(0).expand(6, 6))
    close(op.weight.main_grad, op.weight.detach().sum(0)[:, None] * x.sum(0))


def test_two_threads_each_with_a_pass_of_its_own() -> None:
    ops = [into_main_grad(), into_main_grad()]
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


@pytest.mark.parametrize("fused", [False, True], ids=["loss apart", "loss fused"])
def test_a_fused_loss_and_another_use(fused: bool) -> None:
    head = into_main_grad()
    seq = of.Sequential(head, of.Tanh(), head, of.CrossEntropy())
    with of.enable("*") if fused else of.disable("linear_cross_entropy"):
        for _ in range(2):
            x, targets = rand(5, 6), torch.randint(0, 6, (5,))
            seq(x, targets).backward()
            w = leaf(head.weight)
            F.cross_entropy(F.linear(F.linear(x, w).tanh(), w), targets).backward()
            close(head.weight.main_grad, w.grad)


def test_by_hand_every_gradient_is_written_over() -> None:
    op = into_main_grad()
    dy, x = rand(5, 6), rand(5, 6)
    for _ in range(2):
        op.weight_grad(dy, x)
        close(op.weight.main_grad, dy.t() @ x)
