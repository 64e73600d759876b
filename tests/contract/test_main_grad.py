"""``accumulate_into_main_grad``: Megatron-LM's convention for gradients of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, Gemms, close, fill, outputs_of, rand

# What surrounds the linear decides which backward kernel makes its weight gradient.
AROUND: dict[str, tuple[list[Callable[[], nn.Module]], list[Callable[[], nn.Module]], float]] = {
    "alone": ([], [], 1.0),
    "scaled": ([], [lambda: of.ConstantScale(0.5)], 0.5),
    "tapped": ([of.MakeExtraOutput], [], 1.0),
    "biased": ([], [lambda: of.Bias(4, **F64), of.Identity], 1.0),
}


def build(around: str, linear: nn.Module) -> tuple[Callable[[Tensor], Tensor], float]:
    """The first output of the sequence, and the factor of its gradients."""
    before, after, factor = AROUND[around]
    model = of.Sequential(*(f() for f in before), linear, *(f() for f in after))
    return lambda x: outputs_of(model(x))[0], factor


def into_main_grad(cls: str = "BasicLinear", start: float = 3.0) -> tuple[Any, Tensor]:
    """A linear of 6 × 4, and its buffer."""
    linear = fill(getattr(of, cls)(6, 4, accumulate_into_main_grad=True, **F64))
    weight = linear.weight
    weight.main_grad = torch.full(weight.shape, start, dtype=torch.float64)
    weight.grad_added_to_main_grad = False
    return linear, weight.main_grad


def untouched(linear: of.BasicLinear, buffer: Tensor) -> None:
    assert torch.equal(buffer, torch.full_like(buffer, 3.0))
    assert linear.weight.grad_added_to_main_grad is False


@pytest.mark.parametrize("around", ["alone", "scaled", "tapped"])
def test_buffer_is_wider_than_the_weight(around: str) -> None:
    """Many small contributions that bf16 would lose."""
    kw = {"dtype": torch.bfloat16, "device": "cpu"}
    linear = of.BasicLinear(8, 8, accumulate_into_main_grad=True, **kw)
    linear.weight.main_grad = buffer = torch.full((8, 8), 256.0)
    model, factor = build(around, linear)
    x, dy = torch.full((1, 8), 0.5, dtype=torch.bfloat16), torch.ones(1, 8, dtype=torch.bfloat16)
    for _ in range(10):
        model(x).backward(dy)
    close(buffer, torch.full((8, 8), 256.0 + 10 * 0.5 * factor), 1e-7)
    assert linear.weight.grad is None or linear.weight.grad.dtype == torch.bfloat16


def test_hook_on_the_node_that_accumulates() -> None:
    """Megatron-LM's data parallelism waits for it; it is not one of the weight's own hooks."""
    linear, buffer = into_main_grad()
    node = linear.weight.expand_as(linear.weight).grad_fn.next_functions[0][0]
    seen: list[bool] = []
    node.register_hook(lambda *_: seen.append(linear.weight.grad_added_to_main_grad))
    x = rand(5, 6, grad=True)
    y = of.Sequential(linear)(x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert seen == []
    y.sum().backward()
    assert seen == [True]
    close(buffer, (3 + x.detach().sum(0)).expand(4, 6))


@pytest.mark.parametrize("late", [False, True])
def test_a_frozen_weight_touches_nothing(late: bool) -> None:
    """Frozen before forward, or between the passes."""
    linear, buffer = into_main_grad()
    linear.weight.requires_grad_(late)
    x = rand(5, 6, grad=True)
    y = of.Sequential(linear)(x)
    linear.weight.requires_grad_(False)
    y.sum().backward()
    untouched(linear, buffer)
    assert x.grad is not None


@pytest.mark.parametrize("wrong", ["missing", "shape"])
def test_buffer_that_is_missing_or_wrong_is_an_error(wrong: str) -> None:
    linear = of.BasicLinear(6, 4, accumulate_into_main_grad=True, **F64)
    if wrong == "shape":
        linear.weight.main_grad = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"(?s)main_grad.*BasicLinear|BasicLinear.*main_grad"):
        of.Sequential(linear)(rand(5, 6)).sum().backward()


@pytest.mark.parametrize(
    ("around", "dtype"),
    [("alone", torch.float64), ("scaled", torch.bfloat16), ("alone", torch.float16)],
)
def test_zero_rows(around: str, dtype: torch.dtype, device: torch.device) -> None:
    """They add nothing; written over, the buffer is zero, whatever it held."""
    linear = of.BasicLinear(6, 4, accumulate_into_main_grad=True).to(device, dtype)
    model, _ = build(around, linear)
    for value, overwrite in ((3.0, False), (float("nan"), True)):
        linear.weight.main_grad = torch.full((4, 6), value, device=device)
        linear.weight.overwrite_main_grad = overwrite
        linear.weight.grad_added_to_main_grad = False
        model(torch.empty(0, 6, dtype=dtype, device=device)).sum().backward()
        assert (linear.weight.main_grad == (0.0 if overwrite else 3.0)).all()
        assert linear.weight.grad_added_to_main_grad is True


# Where autograd wants no gradient of the weight, or wants it for itself.


@pytest.mark.parametrize("around", AROUND)
def test_gradient_that_autograd_does_not_want(around: str) -> None:
    linear, buffer = into_main_grad()
    x = rand(5, 6, grad=True)
    model, factor = build(around, linear)
    y = model(x)
    with Gemms() as seen:
        (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        y.sum().backward(inputs=[x])
    want = factor * linear.weight.sum(0).expand(5, 6)
    close(dx, want)
    close(x.grad, want)
    untouched(linear, buffer)
    assert linear.weight.grad is None
    assert seen.shapes == [(5, 6), (5, 6)]


def test_backward_into_some_weights_only() -> None:
    (last, buffer), (first, other) = into_main_grad(), into_main_grad()
    first.weight = nn.Parameter(rand(6, 6))
    first.weight.main_grad = other = torch.full((6, 6), 3.0, dtype=torch.float64)
    x = rand(5, 6, grad=True)
    y = of.Sequential(first, last)(x)
    y.sum().backward(inputs=[last.weight], retain_graph=True)
    assert torch.equal(other, torch.full_like(other, 3.0))
    dw = F.linear(x.detach(), first.weight.detach()).sum(0).expand(4, 6)
    close(buffer, 3 + dw)
    assert x.grad is None
    y.sum().backward()
    close(buffer, 3 + 2 * dw)
    assert (other - 3).abs().max() > 0.1
