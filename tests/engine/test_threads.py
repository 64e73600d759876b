"""Several threads, each with its own grad mode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import opfuser as of
from tests.engine.toys import F64, randn, same


def together(*functions: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class Pauses(of.Identity):
    """Its forward without gradients waits for the other thread."""

    def __init__(self, inside: threading.Event, done: threading.Event) -> None:
        super().__init__()
        self.events = inside, done

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        inside, done = self.events
        if not ctx.requires_grad:
            inside.set()
            assert done.wait(10)
        return input_


def test_evaluating_beside_training_with_a_parametrised_weight() -> None:
    """Neither thread sees the value of the other."""
    inside, done = threading.Event(), threading.Event()
    seq = of.Sequential(of.BasicLinear(3, 3, dtype=F64), Pauses(inside, done), of.GELU())
    x = randn(2, 3)
    parametrize.register_parametrization(seq[0], "weight", nn.Softplus())
    original = seq[0].parametrizations.weight.original
    seq(x).sum().backward()
    expected, original.grad = original.grad, None

    def train() -> None:
        assert inside.wait(10)
        try:
            seq(x).sum().backward()
        finally:
            done.set()

    def evaluate() -> None:
        with torch.no_grad():
            same(seq(x), seq(x))

    together(train, evaluate)
    same(original.grad, expected)


def test_a_plain_module_in_another_thread_keeps_its_gradient() -> None:
    """``torch.nn.utils.parametrize.cached`` is for all threads, so that it is not used here."""
    ours, theirs = of.Linear(3, 3, dtype=F64), nn.Linear(3, 3, bias=False, dtype=F64)
    inside, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            inside.set()
            assert done.wait(10)
            return weight

    done.set()
    parametrize.register_parametrization(ours, "weight", Waits())
    parametrize.register_parametrization(theirs, "weight", nn.Softplus())
    seq, x = of.Sequential(ours), randn(2, 3)
    seq(x)
    inside.clear()
    done.clear()

    def evaluate() -> None:
        with torch.no_grad():
            seq(x)

    def train() -> None:
        assert inside.wait(10)
        try:
            with torch.no_grad():
                theirs(x)
            assert theirs(x).requires_grad
        finally:
            done.set()

    together(evaluate, train)


def test_a_parametrised_weight_is_computed_once_per_call() -> None:
    calls = 0

    class Counted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return weight * 1

    linear = of.Linear(3, 3, dtype=F64)
    parametrize.register_parametrization(linear, "weight", Counted())
    seq, x = of.Sequential(linear, of.GELU()), randn(2, 3, grad=True)
    seq(x)
    calls = 0
    seq(x).sum().backward()
    assert calls == 1
