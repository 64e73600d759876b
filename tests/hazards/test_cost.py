"""Hazards 23, 24, 26 and 27: work and host time that nobody asked for.

Host time itself is measured by benchmarks/host_overhead.py; here its causes are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import opfuser as of
from tests.contract.tensors import F64, rand

GEMMS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "matmul", "_grouped_mm"}


class CountGemms(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ in GEMMS
        return func(*args, **(kwargs or {}))


def gemms_in_backward(model: nn.Module, x: Tensor, *extras: Tensor) -> int:
    with CountGemms() as forward:
        out = model(x, *extras)
    linears = [op for op in model.modules() if isinstance(op, (of.Linear, of.BasicLinear))]
    assert forward.count == len(linears), "forward runs one GEMM per linear"
    outs = out if isinstance(out, tuple) else (out,)
    with CountGemms() as backward:
        torch.autograd.backward(outs, [torch.randn_like(y) for y in outs])
    return backward.count


@pytest.mark.parametrize(
    ("input_grad", "weight_grad", "expected"), [(0, 1, 1), (1, 0, 1), (1, 1, 2)]
)
@pytest.mark.parametrize("neighbours", ["none", "bias", "scale", "add", "make", "all"])
def test_hazard_23_no_gemm_for_a_gradient_that_nobody_needs(
    input_grad: int, weight_grad: int, expected: int, neighbours: str
) -> None:
    linear = of.Linear(8, 8, bias=neighbours in ("bias", "add", "all"), **F64)
    linear.weight.requires_grad_(bool(weight_grad))
    before = [of.MakeExtraOutput()] if neighbours in ("make", "all") else []
    after: list[of.BasicOperation] = []
    if neighbours in ("scale", "all"):
        after.append(of.ConstantScale(0.5))
    extras = []
    if neighbours in ("add", "all"):
        after.append(of.AddExtraInput())
        extras.append(rand(3, 8))
    model = of.Sequential(*before, linear, *after)
    x = rand(3, 8, grad=bool(input_grad))
    if neighbours in ("make", "all") and not input_grad:
        y, _ = model(x, *extras)  # the extra output needs no gradient
        with CountGemms() as backward:
            y.backward(torch.ones_like(y))
        assert backward.count == expected
    else:
        assert gemms_in_backward(model, x, *extras) == expected


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


def test_hazard_23_a_trained_bias_costs_no_gemm() -> None:
    linear = of.Linear(8, 8, **F64)
    linear.weight.requires_grad_(False)
    model = of.Sequential(linear, of.GELU())
    assert gemms_in_backward(model, rand(3, 8)) == 0
    assert linear.bias.grad is not None


@pytest.mark.parametrize(
    ("input_grad", "weight_grad", "expected"), [(0, 1, 2), (1, 0, 2), (1, 1, 4)]
)
def test_hazard_23_grouped_linear(input_grad: int, weight_grad: int, expected: int) -> None:
    op = of.GroupedLinear(2, 8, 8, bias=False, **F64)
    op.requires_grad_(bool(weight_grad))
    y = of.Sequential(op)(rand(4, 8, grad=bool(input_grad)), torch.tensor([1, 3]))
    with CountGemms() as backward:
        y.backward(torch.ones_like(y))
    assert backward.count == expected


class Counting:
    """A fusion function that counts how often a plan is made."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ops: list[Any], *, recipe: Any) -> list[Any]:
        self.calls += 1
        return ops


def test_hazard_24_alternating_between_modes_never_fuses_twice() -> None:
    model = of.Sequential(of.Linear(8, 8, **F64), of.Dropout(0.1), of.GELU())
    x, trained = rand(3, 8), rand(3, 8, grad=True)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(x)

    def train() -> None:
        model.train()
        model(trained).sum().backward()

    def frozen() -> None:
        model.train()
        model.requires_grad_(False)
        model(trained)
        model.requires_grad_(True)

    def autocast() -> None:
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            model(x)

    modes = [evaluate, train, frozen, autocast]
    counting = Counting()
    with of.register_forward_fusion(counting):
        for mode in modes:
            mode()
        assert counting.calls == len(modes), "each of these needs a plan of its own"
        for _ in range(3):
            for mode in modes:
                mode()
        assert counting.calls == len(modes)


def test_hazard_24_shapes_do_not_matter() -> None:
    model, counting = of.Sequential(of.Linear(8, 8, **F64), of.GELU()), Counting()
    with of.register_forward_fusion(counting):
        for rows in (1, 2, 3, 0, 5):
            model(rand(rows, 8))
        model(rand(2, 3, 8))
    assert counting.calls == 1


def python_calls(run: Callable[[], None]) -> int:
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    run()  # plans
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(("train", "most"), [(False, 1), (True, 4)])
def test_hazard_26_python_calls_per_operation(train: bool, most: int) -> None:
    """A chain of plain operations costs its own forward and backward, and little besides.

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
    assert (long - short) / 100 <= most


def test_hazard_26_plain_steps_bypass_the_general_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("lists of one were built for an operation without extra tensors")

    model = of.Sequential(of.Bias(8, **F64), of.Identity(), of.Bias(8, **F64))
    monkeypatch.setattr(of.BasicOperation, "fuser_forward", forbidden)
    monkeypatch.setattr(of.BasicOperation, "fuser_backward", forbidden)
    x = rand(3, 8, grad=True)
    y = model(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize(
    "make",
    [lambda: of.Linear(8, 8, **F64), lambda: of.Bias(8, **F64), of.GELU],
    ids=["Linear", "Bias", "GELU"],
)
def test_hazard_27_an_operation_called_alone_plans_once(
    make: Callable[[], of.FusibleOperation],
) -> None:
    op, counting = make(), Counting()
    with of.register_forward_fusion(counting):
        for rows in (1, 2, 3):
            op(rand(rows, 8))
        assert counting.calls == 1
        for _ in range(3):
            op(rand(3, 8, grad=True)).sum().backward()
        assert counting.calls == 2
