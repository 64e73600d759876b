"""``accumulate_into_grad`` where a weight is used several times, not always by its operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import opfuser as of
from tests.contract.gradients import ADDS, norm
from tests.contract.tensors import F64, close, fill, leaf, rand

TIED: dict[str, Callable[[], tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]]] = {}


def tied(function: Any) -> Any:
    TIED[function.__name__.replace("_", " ")] = function
    return function


def linear(width: int = 6, classes: int = 6) -> of.BasicLinear:
    return fill(of.BasicLinear(width, classes, **ADDS, **F64))


@tied
def twice_in_a_sequence() -> Any:
    op = linear()
    model = of.Sequential(op, of.SiLU(), op)
    return model, lambda x, w: F.linear(F.silu(F.linear(x, w)), w)


@tied
def two_operations_in_a_sequence() -> Any:
    op, other = linear(), linear()
    other.weight = op.weight
    model = of.Sequential(op, of.SiLU(), other)
    return model, lambda x, w: F.linear(F.silu(F.linear(x, w)), w)


@tied
def two_sequences() -> Any:
    op = linear()
    model = nn.Sequential(of.Sequential(op, of.SiLU()), nn.Tanh(), of.Sequential(of.GELU(), op))
    return model, lambda x, w: F.linear(
        F.gelu(F.silu(F.linear(x, w)).tanh(), approximate="tanh"), w
    )


@tied
def with_an_operation_that_does_not_add() -> Any:
    op, other = linear(), of.BasicLinear(6, 6, **F64)
    other.weight = op.weight
    model = of.Sequential(other, of.SiLU(), op, of.SiLU(), other)
    return model, lambda x, w: F.linear(F.silu(F.linear(F.silu(F.linear(x, w)), w)), w)


@tied
def with_plain_torch_on_both_sides() -> Any:
    op = linear()

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, op.weight) * op.weight.sum()

    model = nn.Sequential(Plain(), of.Sequential(op), Plain())
    return model, lambda x, w: F.linear(
        F.linear(F.linear(x, w) * w.sum(), w), w
    ) * w.sum()  # fmt: skip


@tied
def recomputed_by_a_checkpoint() -> Any:
    op = linear()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.op = op

        def forward(self, x: Tensor) -> Tensor:
            y = of.Sequential(op, of.SiLU())(x)
            y = checkpoint(of.Sequential(op, of.SiLU()), y, use_reentrant=True)
            return op(y)

    return Model(), lambda x, w: F.linear(F.silu(F.linear(F.silu(F.linear(x, w)), w)), w)


@pytest.mark.parametrize("kind", TIED)
def test_a_weight_used_several_times(kind: str) -> None:
    model, formula = TIED[kind]()
    (weight,) = model.parameters()
    w = leaf(weight)
    for _ in range(3):
        x, dy = rand(5, 6), rand(5, 6)
        model(x).backward(dy)
        formula(x, w).backward(dy)
        close(weight.grad, w.grad, 1e-10)


@pytest.mark.parametrize("one_sequence", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_tied_to_an_embedding(one_sequence: bool, loss: bool) -> None:
    embedding, head = fill(of.Embedding(9, 6, **F64)), linear(6, 9)
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
        logits = F.linear(norm(F.embedding(tokens, w)), w)
        if loss:
            model(tokens, targets).backward()
            F.cross_entropy(logits, targets).backward()
        else:
            dy = rand(5, 9)
            model(tokens).backward(dy)
            logits.backward(dy)
        close(embedding.weight.grad, w.grad)


def test_two_losses_over_one_trunk() -> None:
    trunk, heads = linear(), [linear(6, 3), linear(6, 2)]
    run = of.Sequential(trunk, of.SiLU())
    ends = [of.Sequential(head) for head in heads]
    ws = [leaf(op.weight) for op in (trunk, *heads)]
    for _ in range(2):
        x = rand(5, 6)
        h, g = run(x), F.silu(F.linear(x, ws[0]))
        for n in range(2):
            ends[n](h).sum().backward(retain_graph=n == 0)
            F.linear(g, ws[1 + n]).sum().backward(retain_graph=n == 0)
    for op, w in zip((trunk, *heads), ws):
        close(op.weight.grad, w.grad)
