"""Weight gradients of ``GroupedLinear`` that its GEMMs add to ``grad`` or ``main_grad``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.gradients import ADDS, handed_over
from tests.contract.tensors import F64, as_exact, close, fill, leaf, rand


def grouped(num_groups: int = 3, classes: int = 4, **kwargs: Any) -> of.GroupedLinear:
    return fill(of.GroupedLinear(num_groups, 6, classes, **kwargs))


def weights_of(op: of.GroupedLinear) -> list[Any]:
    return [p for name, p in op.named_parameters() if name.startswith("weight")]


def by_hand(x: Tensor, weights: list[Tensor], sizes: list[int]) -> Tensor:
    matrices = weights[0].unbind(0) if len(weights) == 1 else weights
    return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(sizes), matrices)])


def filled(weights: list[Any], value: float, overwrite: bool = False) -> list[Tensor]:
    for w in weights:
        w.main_grad = torch.full_like(w, value)
        w.grad_added_to_main_grad = False
        w.overwrite_main_grad = overwrite
    return [w.main_grad for w in weights]


# ---------------------------------------------------------------------- accumulate_into_grad


@pytest.mark.parametrize(
    ("single", "delay", "dtype"),
    [
        (False, False, torch.float64), (True, False, torch.bfloat16),
        (False, True, torch.float16), (True, True, torch.float32),
    ],
)  # fmt: skip
def test_three_micro_batches(single: bool, delay: bool, dtype: torch.dtype) -> None:
    op = grouped(single_grouped_weight=single, delay_wgrad_compute=delay, dtype=dtype, **ADDS)
    weights = weights_of(op)
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
            by_hand(x.to(ws[0].dtype), ws, sizes).backward(dy.to(ws[0].dtype))
    for w, same, want in zip(weights, plain, exact):
        as_exact("weight", w.grad, same.grad, want.grad)


def test_adds_for_all_groups_or_none() -> None:
    op = grouped(bias=False, **ADDS, **F64)
    weights = weights_of(op)
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


@pytest.mark.parametrize("change", ["weights", "weights, delayed", "flag"])
def test_changes_between_forward_and_backward(change: str) -> None:
    """Weights that are replaced; a flag that is set after a forward that left no weights."""
    delay = change.endswith("delayed")
    op = grouped(bias=False, delay_wgrad_compute=delay, **ADDS, **F64)
    used = weights_of(op)
    for w in used:
        w.grad = torch.full_like(w, 7.0)
    op.accumulate_into_grad = change != "flag"
    y = op(torch.ones(9, 6, dtype=torch.float64), torch.tensor([2, 3, 4]))
    op.accumulate_into_grad = True
    if change != "flag":
        for n in range(3):
            setattr(op, f"weight{n}", nn.Parameter(torch.zeros(4, 6, dtype=torch.float64)))
    y.sum().backward()
    if delay:
        op.backward_dw()
    for w, rows in zip(used, (2.0, 3.0, 4.0)):
        close(w.grad, torch.full_like(w, 7.0 + rows))
    if change != "flag":
        assert all(w.grad is None for w in op.parameters())


# ----------------------------------------------------------------- accumulate_into_main_grad


@pytest.mark.parametrize(("single", "overwrite"), [(False, False), (True, True)])
def test_main_grad_is_added_to_or_written_over(single: bool, overwrite: bool) -> None:
    op = grouped(2, accumulate_into_main_grad=True, single_grouped_weight=single, **F64)
    weights = weights_of(op)
    buffers = filled(weights, 3.0, overwrite)
    x, dy = rand(5, 6), rand(5, 4)
    of.Sequential(op)(x, torch.tensor([2, 3])).backward(dy)
    parts = [d.t() @ a for a, d in zip(x.split([2, 3]), dy.split([2, 3]))]
    for w, buffer, dw in zip(weights, buffers, [torch.stack(parts)] if single else parts):
        close(buffer, dw if overwrite else dw + 3.0)
        assert w.grad_added_to_main_grad is True
    close(op.bias0.grad, dy[:2].sum(0))


@pytest.mark.parametrize(("delay", "single"), [(False, False), (True, True)])
def test_main_grad_of_weights_that_are_used_twice(delay: bool, single: bool) -> None:
    op = grouped(
        2, 6, bias=False, accumulate_into_main_grad=True, delay_wgrad_compute=delay,
        single_grouped_weight=single, **F64
    )  # fmt: skip
    weights = weights_of(op)
    filled(weights, float("nan"), overwrite=True)
    seq = of.Sequential(op, of.Tanh(), op)
    sizes = torch.tensor([2, 3])
    for _ in range(2):
        passes = []
        for _ in range(2):
            x, dy = rand(5, 6), rand(5, 6)
            seq(x, sizes, sizes).backward(dy)
            ws = [leaf(w) for w in weights]
            by_hand(by_hand(x, ws, [2, 3]).tanh(), ws, [2, 3]).backward(dy)
            passes.append(ws)
            if not delay:
                for w, want in zip(weights, ws):
                    close(w.main_grad, want.grad)
        for ws in passes if delay else []:  # outside of any backward pass, in order
            assert op.need_backward_dw()
            op.backward_dw()
            op.backward_dw()
            for w, want in zip(weights, ws):
                close(w.main_grad, want.grad)


def test_one_weight_for_two_groups() -> None:
    op = grouped(2, bias=False, accumulate_into_main_grad=True, **F64)
    op.weight1 = op.weight0
    filled([op.weight0], float("nan"), overwrite=True)
    x = rand(5, 6)
    op(x, torch.tensor([2, 3])).sum().backward()
    close(op.weight0.main_grad, x.sum(0).expand(4, 6))


@pytest.mark.parametrize(
    ("delay", "single", "main_grad"),
    [(False, False, True), (False, True, False), (True, False, False), (True, True, True)],
)
def test_gradients_that_autograd_does_not_want(delay: bool, single: bool, main_grad: bool) -> None:
    op = grouped(
        2, bias=False, accumulate_into_main_grad=main_grad, delay_wgrad_compute=delay,
        single_grouped_weight=single, **F64
    )  # fmt: skip
    plain = copy.deepcopy(op)
    plain.accumulate_into_main_grad = plain.delay_wgrad_compute = False
    weights = weights_of(op)
    buffers = filled(weights, 3.0)
    x, sizes = rand(5, 6, grad=True), torch.tensor([2, 3])
    y = of.Sequential(op)(x, sizes).sum()
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    dws = torch.autograd.grad(y, weights, retain_graph=True)
    wants = torch.autograd.grad(plain(x, sizes).sum(), [x, *plain.parameters()])
    for got, want in zip([dx, *dws], wants):
        close(got, want)
    op.backward_dw()  # nothing waits
    assert all(torch.equal(b, torch.full_like(b, 3.0)) for b in buffers)
    assert all(w.grad is None for w in weights)
    y.backward(inputs=weights[-1:])
    if delay:
        op.backward_dw()
    if main_grad:
        close(buffers[-1], 3 + wants[-1])
    else:
        close(weights[-1].grad, wants[-1])
    if not single:
        assert torch.equal(buffers[0], torch.full_like(buffers[0], 3.0))
        assert weights[0].grad is None
