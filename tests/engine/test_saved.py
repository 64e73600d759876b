"""What forward saves, for how long, and what checkpointing and autocast make of it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.op import BasicOperation
from tests.basic.values import saved_by
from tests.engine.toys import (
    Sigmoid,
    Square,
    Times,
    grads,
    plain_sigmoids,
    randn,
    same,
    sigmoids,
)


def test_nothing_is_saved_before_the_first_gradient() -> None:
    seq, x = opfuser.Sequential(Square(), Square(), Square(), Times(), Square()), randn(2, 3)
    saved = saved_by(lambda: seq(x))
    assert len(saved) == 3
    same(saved[0], x**8)
    x.requires_grad_()
    assert len(saved_by(lambda: seq(x))) == 6


class Watches(BasicOperation):
    """Saves a tensor of its own, and can tell which of those of its fellows are alive."""

    refs: list[Any]
    alive: list[Any]

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
    """Hazard 25: what an operation saved is gone when the one before it runs."""
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


def test_a_dropped_output_frees_everything() -> None:
    """Hazard 25: also where an operation saves its own output."""
    seq = opfuser.Sequential(Times(), Square(), Sigmoid(), Watches(), Sigmoid())
    x = randn(2, 3, grad=True)
    y = seq(x)
    saved = [t for t in y.grad_fn.saved_tensors if t is not x and not isinstance(t, nn.Parameter)]
    kept = [*map(weakref.ref, saved)]
    assert len(kept) == 4
    del y, saved
    assert [ref() for ref in kept] == [None] * 4


def test_saved_tensors_may_be_packed() -> None:
    """Offloading: what is unpacked is another tensor."""
    seq, x = sigmoids(), randn(2, 3, grad=True)
    wrt = [x, *seq.parameters()]
    with torch.autograd.graph.save_on_cpu():
        y = seq(x)
    same(grads(y, wrt), grads(plain_sigmoids(seq, x), wrt))


# Checkpointing and autocast.


def test_backward_under_autocast_runs_in_the_dtype_of_forward() -> None:
    seq, x = opfuser.Sequential(Times(), Square()), randn(2, 3, grad=True)
    expected = grads((x * seq[0].w) ** 2, [x, seq[0].w])
    y = seq(x)
    with torch.autocast("cpu", torch.bfloat16):
        same(grads(y, [x, seq[0].w]), expected)
