"""Several threads, each with its own grad mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import opfuser as of
from tests.engine.toys import F64, randn, same


def together(*functions: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(len(functions)) as pool:
        for future in [pool.submit(function) for function in functions]:
            future.result()


class Meeting:
    """One thread stays inside of something until the other one is done."""

    def __init__(self) -> None:
        self.inside, self.done, self.on = Event(), Event(), False

    def stay(self) -> None:
        if self.on:
            self.inside.set()
            assert self.done.wait(10)

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        assert self.inside.wait(10)
        try:
            yield
        finally:
            self.done.set()


class Waits(of.Identity):
    """Its forward without gradients waits for the other thread."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self.__dict__["meeting"] = meeting

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        if not ctx.requires_grad:
            self.meeting.stay()
        return input_


def test_evaluating_beside_training_with_a_parametrized_weight() -> None:
    """Neither thread sees the value of the other."""
    meeting = Meeting()
    seq = of.Sequential(of.BasicLinear(3, 3, dtype=F64), Waits(meeting), of.GELU())
    x = randn(2, 3)
    parametrize.register_parametrization(seq[0], "weight", nn.Softplus())
    original = seq[0].parametrizations.weight.original
    seq(x).sum().backward()
    expected, original.grad, meeting.on = original.grad, None, True

    def train() -> None:
        with meeting.meanwhile():
            seq(x).sum().backward()

    together(train, lambda: torch.no_grad()(seq)(x))
    same(original.grad, expected)


def test_a_plain_module_in_another_thread_keeps_its_gradient() -> None:
    """``torch.nn.utils.parametrize.cached`` is for all threads, so that it is not used here."""
    ours, theirs = of.Linear(3, 3, dtype=F64), nn.Linear(3, 3, bias=False, dtype=F64)
    meeting = Meeting()

    class Stays(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            meeting.stay()
            return weight

    parametrize.register_parametrization(ours, "weight", Stays())
    parametrize.register_parametrization(theirs, "weight", nn.Softplus())
    seq, x = of.Sequential(ours), randn(2, 3)
    seq(x)
    meeting.on = True

    def train() -> None:
        with meeting.meanwhile():
            torch.no_grad()(theirs)(x)
            assert theirs(x).requires_grad

    together(lambda: torch.no_grad()(seq)(x), train)


def test_a_parametrized_weight_is_computed_once_per_call() -> None:
    calls: list[int] = []

    class Counted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            calls.append(1)
            return weight * 1

    linear = of.Linear(3, 3, dtype=F64)
    parametrize.register_parametrization(linear, "weight", Counted())
    seq, x = of.Sequential(linear, of.GELU()), randn(2, 3, grad=True)
    seq(x)
    calls.clear()
    seq(x).sum().backward()
    assert len(calls) == 1


def test_a_flag_that_another_thread_sets_during_a_forward_counts() -> None:
    meeting = Meeting()
    seq, x = of.Sequential(of.ConstantScale(2.0), Waits(meeting)), torch.ones(2, 3)
    meeting.on = True

    def change() -> None:
        with meeting.meanwhile():
            seq[0].scale = 3.0

    together(lambda: seq(x), change)
    assert torch.equal(seq(x), 3 * x)
