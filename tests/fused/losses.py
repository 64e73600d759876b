"""A linear operation with a loss: the sequence, its gradients, and what they are held to."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser import BasicLinear, CrossEntropy, Sequential
from opfuser.fused import _loss_chunks
from opfuser.fused.linear_cross_entropy import FUSION
from tests.fused.pairings import error, magnitude

NAME = FUSION.name
D, V = 6, 9


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many chunks 33 rows make."""
    if request.param == "one chunk":
        return 1
    chunked(monkeypatch, 12)
    return 3


def chunked(monkeypatch: pytest.MonkeyPatch, rows: int, large: int = 1 << 40) -> None:
    """Chunks of at least that many rows, four of them if there are enough."""
    monkeypatch.setattr(_loss_chunks, "_MULTIPLE", rows)
    monkeypatch.setattr(_loss_chunks, "_CPU", _loss_chunks._Limits(rows, 1, large))
    monkeypatch.setattr(_loss_chunks, "_GPU", _loss_chunks._Limits(rows, 1, large))


def head(dtype: torch.dtype = torch.float32, **kwargs: Any) -> Sequential:
    """A linear operation from D to V with random weights, and a loss with these arguments."""
    linear = BasicLinear(D, V)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(V, D))
    return Sequential(linear, CrossEntropy(**kwargs)).to(dtype)


def in_float64(seq: Sequential) -> Sequential:
    linear, loss = seq
    classes, width = linear.weight.shape
    twin = BasicLinear(width, classes, dtype=torch.float64)
    with torch.no_grad():
        twin.weight.copy_(linear.weight)
    twin.weight.requires_grad_(linear.weight.requires_grad)
    return Sequential(twin, loss)


def some_targets(*rows: int, classes: int = V) -> Tensor:
    targets = torch.randint(0, classes, rows)
    if targets.dim():
        targets.view(-1)[::3] = -100
    return targets


def gradients(
    seq: Sequential, x: Tensor, targets: Tensor, factor: float = 1.0, *, fused: bool = True
) -> list[Tensor | None]:
    """The loss, and the gradients of input and weight for ``factor``, None if not needed."""
    with nullcontext() if fused else opfuser.disable(NAME):
        loss = seq(x, targets)
        assert seq.plan(x, targets).fused("forward") == ({NAME: 1} if fused else {})
    wanted = [x.requires_grad, seq[0].weight.requires_grad]
    wrt = [t for t, wants in zip((x, seq[0].weight), wanted) if wants]
    grads = iter(torch.autograd.grad(loss, wrt, loss.new_tensor(factor)))
    return [loss.detach(), *(next(grads) if wants else None for wants in wanted)]


def check(seq: Sequential, x: Tensor, targets: Tensor, factor: float = 1.0) -> list[Tensor | None]:
    """Errors are at most twice those without the fusion, and a little for luck."""
    ours = gradients(seq, x, targets, factor)
    theirs = gradients(seq, x, targets, factor, fused=False)
    check_against(ours, theirs, truth_of(seq, x, targets, factor))
    return ours


def truth_of(seq: Sequential, x: Tensor, targets: Tensor, factor: float) -> list[Tensor | None]:
    x64 = x.detach().double().requires_grad_(x.requires_grad)
    return gradients(in_float64(seq), x64, targets, factor, fused=False)


def check_against(
    ours: list[Tensor | None], theirs: list[Tensor | None], truth: list[Tensor | None]
) -> None:
    for got, other, exact in zip(ours, theirs, truth):
        assert (got is None) == (other is None)
        if got is None or other is None or exact is None:
            continue
        assert (got.dtype, got.shape) == (other.dtype, other.shape)
        floor = 4 * torch.finfo(got.dtype).eps * magnitude(exact)
        assert error(got, exact) <= 2 * error(other, exact) + floor
