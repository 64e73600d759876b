"""``accumulate_into_grad`` of ``GroupedLinear``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.gradients import ADDS, handed_over
from tests.contract.tensors import F64, close, fill, rand


def grouped(**kwargs: Any) -> of.GroupedLinear:
    return fill(of.GroupedLinear(3, 6, 4, **ADDS, **kwargs))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
def test_grouped_linear(single: bool, delay: bool, dtype: torch.dtype) -> None:
    op = grouped(single_grouped_weight=single, delay_wgrad_compute=delay, dtype=dtype)
    weights = [p for name, p in op.named_parameters() if name.startswith("weight")]
    plain, exact = (
        [w.detach().to(as_dtype).requires_grad_() for w in weights]
        for as_dtype in (dtype, torch.float64)
    )
    sizes, grads = [2, 0, 5], []
    for step in range(3):
        x, dy = rand(7, 6, dtype=dtype), rand(7, 4, dtype=dtype)
        y = of.Sequential(op)(x, torch.tensor(sizes))
        told = [handed_over(y, w) for w in weights]
        y.backward(dy)
        if delay:
            op.backward_dw()
        assert told == [[step == 0 and not delay]] * len(weights)
        grads = grads or [w.grad for w in weights]
        assert all(w.grad is grad for w, grad in zip(weights, grads)), "the same memory"
        for ws in (plain, exact):
            of_dtype = ws[0].dtype
            matrices = ws[0].unbind(0) if single else ws
            rows = zip(x.to(of_dtype).split(sizes), matrices)
            torch.cat([F.linear(r, w) for r, w in rows]).backward(dy.to(of_dtype))
    for w, same, want in zip(weights, plain, exact):
        error = (w.grad.double() - want.grad).abs().max()
        allowed = 2 * (same.grad.double() - want.grad).abs().max()
        assert error <= allowed + torch.finfo(dtype).eps * max(1.0, want.grad.abs().max().item())


def test_grouped_linear_adds_for_all_groups_or_none() -> None:
    op = grouped(bias=False, **F64)
    weights = [op.weight0, op.weight1, op.weight2]
    weights[0].grad = torch.full((4, 6), 3.0, dtype=torch.float64)
    op.weight1.requires_grad_(False)
    x, dy, sizes = rand(7, 6), rand(7, 4), torch.tensor([2, 1, 4])
    parts = [d.t() @ a for a, d in zip(x.split([2, 1, 4]), dy.split([2, 1, 4]))]
    for step in range(2):  # at first the last group has no gradient; the frozen one never has
        y = of.Sequential(op)(x, sizes)
        told = [handed_over(y, weights[n]) for n in (0, 2)]
        y.backward(dy)
        assert told == [[step == 0]] * 2
    close(weights[0].grad, 3 + 2 * parts[0])
    assert weights[1].grad is None
    close(weights[2].grad, 2 * parts[2])


@pytest.mark.parametrize("delay", [False, True])
def test_grouped_linear_whose_weights_were_replaced(delay: bool) -> None:
    op = grouped(bias=False, delay_wgrad_compute=delay, **F64)
    used = list(op.parameters())
    x, sizes = torch.ones(9, 6, dtype=torch.float64), torch.tensor([2, 3, 4])
    for w in used:
        w.grad = torch.full_like(w, 7.0)
    y = op(x, sizes)
    for n in range(3):
        setattr(op, f"weight{n}", nn.Parameter(torch.zeros(4, 6, dtype=torch.float64)))
    y.sum().backward()
    if delay:
        op.backward_dw()
    for w, rows in zip(used, (2.0, 3.0, 4.0)):
        close(w.grad, torch.full_like(w, 7.0 + rows))
    assert all(w.grad is None for w in op.parameters())


def test_grouped_linear_after_a_forward_that_left_no_weights() -> None:
    op = grouped(bias=False, **F64)
    for w in op.parameters():
        w.grad = torch.full_like(w, 7.0)
    op.accumulate_into_grad = False
    y = op(torch.ones(9, 6, dtype=torch.float64), torch.tensor([2, 3, 4]))
    op.accumulate_into_grad = True
    y.sum().backward()
    for w, rows in zip(op.parameters(), (2.0, 3.0, 4.0)):
        close(w.grad, torch.full_like(w, 7.0 + rows))
