"""Hazards 23, 25 and 26: work, host time and memory that nobody asked for.

Host time itself is measured by benchmarks/host_overhead.py; here its causes are counted. How often
plans are made (hazards 24 and 27): tests/planning/test_cache.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import opfuser as of
from tests.contract.tensors import F64, Gemms, outputs_of, rand


def gemms_in_backward(model: nn.Module, x: Tensor, *extras: Tensor) -> int:
    with Gemms() as forward:
        out = model(x, *extras)
    linears = [op for op in model.modules() if isinstance(op, (of.Linear, of.BasicLinear))]
    assert len(forward.shapes) == len(linears), "forward runs one GEMM per linear"
    outs = [y for y in outputs_of(out) if y.requires_grad]
    with Gemms() as backward:
        torch.autograd.backward(outs, [torch.randn_like(y) for y in outs])
    return len(backward.shapes)


NEIGHBORS: dict[str, tuple[list[Any], bool, list[Any]]] = {
    "none": ([], False, []),
    "bias": ([], True, []),
    "scale": ([], False, [lambda: of.ConstantScale(0.5)]),
    "add": ([], True, [of.AddExtraInput]),
    "make": ([of.MakeExtraOutput], False, []),
    "all": ([of.MakeExtraOutput], True, [lambda: of.ConstantScale(0.5), of.AddExtraInput]),
}


@pytest.mark.parametrize("neighbors", NEIGHBORS)
def test_hazard_23_no_gemm_for_a_gradient_that_nobody_needs(neighbors: str) -> None:
    before, bias, after = NEIGHBORS[neighbors]
    for input_grad, weight_grad in ((False, True), (True, False), (True, True), (False, False)):
        if not (input_grad or weight_grad or bias):
            continue  # no backward; a bias alone has one, which costs no GEMM
        linear = of.Linear(8, 8, bias=bias, **F64)
        linear.weight.requires_grad_(weight_grad)
        model = of.Sequential(*(f() for f in before), linear, *(f() for f in after))
        extras = [rand(3, 8)] * (of.AddExtraInput in after)
        assert gemms_in_backward(model, rand(3, 8, grad=input_grad), *extras) == (
            input_grad + weight_grad
        )


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ((1, 1, 1), 5),  # dgrad of the first is not needed
        ((0, 1, 1), 3),  # nothing at all of the first
        ((0, 0, 1), 1),
        ((1, 0, 0), 3),  # two dgrads on the way, one wgrad
        ((1, 0, 1), 4),
    ],
)
def test_hazard_23_gradients_stop_at_the_first_trained_operation(
    trained: tuple[int, ...], expected: int
) -> None:
    linears = [of.Linear(8, 8, bias=False, **F64) for _ in trained]
    for linear, on in zip(linears, trained):
        linear.weight.requires_grad_(bool(on))
    model = of.Sequential(linears[0], of.GELU(), linears[1], of.RMSNorm(8, **F64), linears[2])
    model[3].weight.requires_grad_(False)
    assert gemms_in_backward(model, rand(3, 8)) == expected


def python_calls(run: Callable[[], None]) -> int:
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(4):  # plans, and is recorded
        run()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("train", [False, True])
def test_hazard_26_python_calls_per_operation(train: bool) -> None:
    """A chain of plain operations calls torch's functions, and none of Python's.

    torch.nn needs two Python calls per module, ``_wrapped_call_impl`` and ``forward``, at least.
    """

    def step(count: int) -> Callable[[], None]:
        model = of.Sequential(*(of.Bias(8, **F64) for _ in range(count)))
        x = rand(1, 8, grad=train)

        def run() -> None:
            with torch.set_grad_enabled(train):
                y = model(x)
            if train:
                y.backward(torch.ones_like(y))

        return run

    short, long = (python_calls(step(n)) for n in (10, 110))
    assert short == long <= 60


# Hazard 25: memory that is kept longer than it is needed.


class Storages(TorchDispatchMode):
    """Remembers, weakly, the storage of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self.made.append(StorageWeakRef(t.untyped_storage()))
        return out

    def alive(self, *but: Tensor) -> int:
        known = {StorageWeakRef(t.untyped_storage()) for t in but}
        return sum(not ref.expired() and ref not in known for ref in set(self.made))


def block() -> of.Sequential:
    return of.Sequential(
        of.Residual(of.RMSNorm(8, **F64), of.Linear(8, 16, **F64), of.SwiGLU()),
        of.LayerNorm(8, **F64),
        of.Dropout(0.5),
        of.Linear(8, 8, **F64),
        of.GELU(),
    )


@pytest.fixture
def _no_garbage_collection() -> Any:
    """Reference cycles would keep tensors until the collector happens to run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
def test_hazard_25_nothing_stays_after_backward() -> None:
    model, x, dy = block(), rand(5, 8, grad=True), rand(5, 8)
    params = list(model.parameters())
    for _ in range(6):  # recorded in the end
        with Storages() as storages:
            y = model(x)
        assert storages.alive(x, y, *params) > 0, "something must have been saved for backward"
        y.backward(dy)
        assert storages.alive(x, y, *params) == 0
    assert y.grad_fn is not None, "the output, and with it the graph, is still alive"
