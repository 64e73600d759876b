"""``accumulate_into_main_grad``: Megatron-LM's convention for gradients of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, close, fill, rand


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
    ("behind", "dtype"), [([], torch.float64), ([of.ConstantScale(0.5)], torch.bfloat16)]
)
def test_zero_rows(behind: list[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """They add nothing; written over, the buffer is zero, whatever it held."""
    linear = of.BasicLinear(6, 4, accumulate_into_main_grad=True).to(device, dtype)
    model = of.Sequential(linear, *behind)
    for value, overwrite in ((3.0, False), (float("nan"), True)):
        linear.weight.main_grad = torch.full((4, 6), value, device=device)
        linear.weight.overwrite_main_grad = overwrite
        linear.weight.grad_added_to_main_grad = False
        model(torch.empty(0, 6, dtype=dtype, device=device)).sum().backward()
        assert (linear.weight.main_grad == (0.0 if overwrite else 3.0)).all()
        assert linear.weight.grad_added_to_main_grad is True


# Where autograd wants no gradient of the weight, or wants it for itself.


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
