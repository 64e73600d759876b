"""What forward saves, for how long, and what checkpointing and autocast make of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.op import BasicOperation
from tests.basic.values import saved_by
from tests.engine.toys import (
    F64,
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
    saved = [t for t in y.grad_fn.saved_tensors if t is not x]
    kept = [*map(weakref.ref, saved)]
    assert len(kept) == 5
    del y, saved
    assert [ref() for ref in kept] == [None] * 5


def test_saved_tensors_may_be_packed() -> None:
    """Offloading: what is unpacked is another tensor."""
    seq, x = sigmoids(), randn(2, 3, grad=True)
    wrt = [x, *seq.parameters()]
    with torch.autograd.graph.save_on_cpu():
        y = seq(x)
    same(grads(y, wrt), grads(plain_sigmoids(seq, x), wrt))


LINEARS: dict[str, Callable[[], list[Any]]] = {
    "alone": lambda: [opfuser.Linear(3, 3)],
    "recomputed": lambda: [opfuser.Linear(3, 5), opfuser.GELU(), opfuser.Linear(5, 3)],
    "merged": lambda: [opfuser.MergedLinear(3, {"a": 2, "b": 4}), opfuser.SwiGLU()],
    "transposed": lambda: [opfuser.Linear(3, 3, weight_transposed=True)],
    "adapted": lambda: [opfuser.LoRALinear(3, 3, adapters=[opfuser.LoRAAdapter(rank=2)])],
    "sums": lambda: [opfuser.Linear(3, 3, bias=False), opfuser.Dropout(0.0), Sigmoid()],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("name", LINEARS)
def test_data_of_weights_are_exchanged_between_the_passes(name: str, dtype: torch.dtype) -> None:
    """Backward reads what forward has read, as that of torch's linear functions does."""
    torch.manual_seed(0)
    seq = opfuser.Sequential(*LINEARS[name]()).to(dtype)
    with torch.no_grad():
        for p in seq.parameters():
            p.normal_()
    x = torch.randn(2, 3).to(dtype).requires_grad_()
    for _ in range(4):  # recorded in the end
        got = []
        for exchanges in (False, True):
            before = [p.data for p in seq.parameters()]
            y = seq(x)
            if exchanges:
                for p in seq.parameters():
                    p.data = p.data * 3 + 1
            got.append(grads(y, [x, *(p for p in seq.parameters() if p.requires_grad)]))
            for p, data in zip(seq.parameters(), before):
                p.data = data
        assert all(map(torch.equal, *got))


def test_data_of_a_norm_are_exchanged_between_the_passes() -> None:
    """Backward reads what is there then, as torch's does."""
    seq, plain = opfuser.Sequential(opfuser.LayerNorm(3)).double(), nn.LayerNorm(3).double()
    for _ in range(4):
        got, x = [], randn(2, 3, grad=True)
        for module, weight in (seq, seq[0].weight), (plain, plain.weight):
            y, before = module(x), weight.data
            weight.data = before * 3 + 1
            got.append(grads(y, [x, weight]))
            weight.data = before
        same(*got)


def test_writes_to_a_weight_between_the_passes_are_seen() -> None:
    seq, x = opfuser.Sequential(opfuser.Linear(3, 3), opfuser.GELU()), torch.randn(2, 3)
    for _ in range(4):
        y = seq(x.requires_grad_()).sum()
        with torch.no_grad():
            seq[0].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


# Checkpointing and autocast.


def test_backward_under_autocast_runs_in_the_dtype_of_forward() -> None:
    seq, x = opfuser.Sequential(Times(), Square()), randn(2, 3, grad=True)
    expected = grads((x * seq[0].w) ** 2, [x, seq[0].w])
    y = seq(x)
    with torch.autocast("cpu", torch.bfloat16):
        same(grads(y, [x, seq[0].w]), expected)
