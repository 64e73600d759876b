"""What forward saves, for how long, and what checkpointing and autocast make of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser.op import BasicOperation
from tests.engine.toys import F64, Mixed, Sigmoid, Square, Times, grads, randn, same


def model() -> opfuser.Sequential:
    return opfuser.Sequential(Times(), Square(), Times(), Sigmoid())


def plain(seq: opfuser.Sequential, x: Tensor) -> Tensor:
    return torch.sigmoid((x * seq[0].w) ** 2 * seq[2].w)


def saved_by(seq: Any, *tensors: Tensor) -> list[Tensor]:
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        seq(*tensors)
    return saved


def test_nothing_is_saved_before_the_first_gradient() -> None:
    seq, x = opfuser.Sequential(Square(), Square(), Square(), Times(), Square()), randn(2, 3)
    saved = saved_by(seq, x)
    assert len(saved) == 3
    same(saved[0], x**8)
    x.requires_grad_()
    assert len(saved_by(seq, x)) == 6
    with torch.no_grad():
        assert saved_by(seq, x) == []


def test_nothing_is_saved_for_gradients_that_nobody_needs() -> None:
    seq, x = opfuser.Sequential(opfuser.Linear(3, 3), opfuser.Linear(3, 3)), torch.randn(2, 3)
    with opfuser.disable("*"):
        first, second = seq[0].requires_grad_(False), seq[1]
        assert {t.data_ptr() for t in saved_by(seq, x)} & {first.weight.data_ptr()} == set()
        second.weight.requires_grad_(False)
        assert saved_by(seq, x) == []


class Watches(BasicOperation):
    """Saves a tensor of its own, and can tell which of those of its fellows are alive."""

    refs: list[Any]

    def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
        y = input_ + 1
        ctx.save_for_backward(y.clone())
        return y

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        self.alive.append([ref() is not None for ref in self.refs])
        self.refs.append(weakref.ref(ctx.saved_tensors[0]))
        return grad_output, ()


@pytest.mark.parametrize("keep", [False, True])
def test_memory_is_freed_while_backward_runs(keep: bool) -> None:
    """What an operation saved is gone when the one before it runs."""
    ops = [Watches() for _ in range(4)]
    refs: list[Any] = []
    alive: list[Any] = []
    for op in ops:
        op.__dict__.update(refs=refs, alive=alive)
    seq, x = opfuser.Sequential(*ops), randn(2, 3, grad=True)
    y = seq(x)
    y.sum().backward(retain_graph=keep)
    assert alive == [[keep] * n for n in range(4)]
    if not keep:
        assert not any(ref() is not None for ref in refs)


@pytest.mark.parametrize("wrapped", [False, True])
def test_nothing_is_left_after_backward(wrapped: bool) -> None:
    """Though the output, and with it the node of the graph, is kept."""
    seq = (
        opfuser.Sequential(Square(), nn.Identity(), Square())
        if wrapped
        else opfuser.Sequential(Square(), Square())
    )
    x = randn(2, 3, grad=True)
    kept: list[Any] = []
    with saved_tensors_hooks(lambda t: kept.append(weakref.ref(t)) or t, lambda t: t):
        y = seq(x)
    middle = [ref for ref in kept if ref() is not None and ref() is not x]
    y.sum().backward()
    gc.collect()
    assert all(ref() is None or ref() is x for ref in middle)


def test_a_dropped_output_frees_everything() -> None:
    """Also where an operation saves its own output."""
    seq, x = (
        opfuser.Sequential(Times(), Square(), Sigmoid(), Watches(), Sigmoid()),
        randn(2, 3, grad=True),
    )
    y = seq(x)
    kept = [
        weakref.ref(t)
        for t in y.grad_fn.saved_tensors
        if t is not x and not isinstance(t, nn.Parameter)
    ]
    assert len(kept) == 4
    del y
    assert [ref() for ref in kept] == [None] * 4


def test_saved_tensors_may_be_packed() -> None:
    """Offloading: what is unpacked is another tensor."""
    seq, x = model(), randn(2, 3, grad=True)
    wrt = [x, *seq.parameters()]
    with torch.autograd.graph.save_on_cpu():
        y = seq(x)
    same(grads(y, wrt), grads(plain(seq, x), wrt))


# ---------------------------------------------------------------------- checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_checkpointing(reentrant: bool, dropout: bool, split: bool) -> None:
    torch.manual_seed(1)
    inner: list[nn.Module] = [Times(), Square(), *([nn.Tanh()] if split else []), Times()]
    if dropout:
        inner.insert(2, opfuser.Dropout(0.5))
    seq, x, e = opfuser.Sequential(*inner, Mixed()), randn(8, 3, grad=True), randn(8, 3, grad=True)
    wrt = [x, e, *seq.parameters()]

    def run(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        y, extra = call(x, e)
        for t in wrt:
            t.grad = None
        (y.sum() + 2 * extra.sum()).backward()
        return [y.detach(), extra.detach(), *(t.grad for t in wrt)]

    same(run(lambda *ts: checkpoint(seq, *ts, use_reentrant=reentrant)), run(seq))


def test_checkpointing_saves_only_the_input() -> None:
    seq, x = model(), randn(2, 3, grad=True)
    with_it = saved_by(lambda t: checkpoint(seq, t, use_reentrant=False), x)
    assert sum(t.numel() for t in with_it) < sum(t.numel() for t in saved_by(seq, x))


# ---------------------------------------------------------------------- autocast


@pytest.mark.parametrize("split", [False, True])
def test_autocast(split: bool) -> None:
    between: list[nn.Module] = [nn.Identity()] if split else []
    seq = opfuser.Sequential(opfuser.Linear(8, 8), *between, opfuser.Linear(8, 4))
    twin = nn.Sequential(nn.Linear(8, 8), *between, nn.Linear(8, 4))
    twin.load_state_dict(seq.state_dict())
    x = torch.randn(5, 8, requires_grad=True)
    results = []
    for m in (seq, twin):
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *m.parameters()])])
    for ours, theirs in zip(*results):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_backward_under_autocast_runs_in_the_dtype_of_forward() -> None:
    seq, x = opfuser.Sequential(Times(), Square()), randn(2, 3, grad=True)
    expected = grads((x * seq[0].w) ** 2, [x, seq[0].w])
    y = seq(x)
    with torch.autocast("cpu", torch.bfloat16):
        same(grads(y, [x, seq[0].w]), expected)


def test_gradients_have_the_dtypes_of_their_owners() -> None:
    linear = opfuser.Linear(4, 4, dtype=torch.bfloat16)
    x = torch.randn(3, 4, requires_grad=True)
    e = torch.randn(3, 4, dtype=F64, requires_grad=True)
    y = opfuser.Sequential(linear, opfuser.AddExtraInput())(x, e)
    y.sum().backward()
    assert x.grad.dtype is torch.float32
    assert e.grad.dtype is F64
    assert {p.grad.dtype for p in linear.parameters()} == {torch.bfloat16}
