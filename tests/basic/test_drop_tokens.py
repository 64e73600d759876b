"""Experts with a capacity: what is kept, what is dropped, and gradients of both."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opfuser import DropTokens, RestoreTokens, Sequential
from opfuser.errors import InputError, OpKwargsError
from opfuser.models import MoEConfig, experts
from opfuser.testing import check_op
from tests.basic.values import DTYPES

SIZES = [4, 0, 9, 2], [15, 0, 0, 0], [0, 0, 0, 15], [4, 4, 4, 3]
MOE = MoEConfig(8, 6, 4, 2, init_std=0.5, dtype=torch.float64)


@pytest.mark.parametrize("factor", [0.1, 0.9, 1.0, 4.0])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_as_exact_as_torch(
    sizes: list[int], weighted: bool, factor: float, device: torch.device
) -> None:
    inputs = [torch.randn(15, 6), torch.tensor(sizes), *[torch.rand(15)] * weighted]
    inputs = [t.to(device) for t in inputs]
    op = DropTokens(4, factor, weighted=weighted)
    check_op(op, *inputs, dtypes=DTYPES, zero_rows=False)
    rows, slots = op(*inputs)[:2]
    assert rows.shape[0] == 4 * math.ceil(factor * 15 / 4)
    check_op(RestoreTokens(), rows, slots, dtypes=DTYPES, zero_rows=False)


def test_there_and_back() -> None:
    x, sizes = torch.arange(1.0, 8).view(7, 1), torch.tensor([3, 0, 4])
    y, slots, own_sizes, weights = DropTokens(3, 0.8)(x, sizes, x.view(-1) / 10)
    assert y.view(-1).tolist() == [1, 2, 0, 0, 4, 5]
    assert own_sizes.tolist() == [2, 2, 2]
    torch.testing.assert_close(weights, y.view(-1) / 10)
    assert slots.tolist() == [0, 1, 6, 4, 5, 6, 6]
    assert RestoreTokens()(y, slots).view(-1).tolist() == [1, 2, 0, 4, 5, 0, 0]


def test_no_tokens() -> None:
    x = torch.randn(0, 3, requires_grad=True)
    y, slots, sizes, weights = DropTokens(2, 1.0)(x, torch.zeros(2).long(), torch.rand(0))
    assert (y.shape, sizes.tolist(), weights.shape) == ((0, 3), [0, 0], (0,))
    RestoreTokens()(y, slots).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 3)


def test_a_row_of_nan_that_is_dropped_is_gone() -> None:
    x = torch.tensor([[1.0], [math.nan]])
    y, slots = DropTokens(1, 0.5, weighted=False)(x, torch.tensor([2]))[:2]
    assert RestoreTokens()(y, slots).view(-1).tolist() == [1, 0]


def test_a_mixture_with_room_for_all_drops_nothing() -> None:
    plain, ample = experts(MOE), experts(replace(MOE, capacity_factor=4.0))
    ample.load_state_dict(plain.state_dict())
    grads = []
    for model in (plain, ample):
        x = torch.linspace(-1, 1, 72, dtype=torch.float64).view(9, 8).requires_grad_()
        y = model(x)
        grads.append([y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])
    for exact, ours in zip(*grads):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def test_a_mixture_that_drops() -> None:
    """A token is what its kept experts make of it, and no more is differentiated."""
    model = experts(replace(MOE, capacity_factor=0.5))
    x = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    weight = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    scores = (x @ weight["router.weight"].t()).softmax(-1)
    chosen = scores.topk(2, -1)
    shares = chosen.values / chosen.values.sum(-1, keepdim=True)
    rows: list[Tensor] = []
    kept, capacity = [0] * 4, math.ceil(0.5 * 18 / 4)
    for t in range(9):
        row = torch.zeros(8, dtype=torch.float64)
        for j, e in enumerate(chosen.indices[t].tolist()):
            kept[e] += 1
            if kept[e] <= capacity:
                gate, up = (weight["gate_up.weight"][e] @ x[t]).chunk(2)
                down = weight["down.weight"][e] @ (torch.nn.functional.silu(gate) * up)
                row = row + shares[t, j] * down
        rows.append(row)
    assert sum(min(n, capacity) for n in kept) < 18
    exact, y = torch.stack(rows), model(x)
    torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    wanted = torch.autograd.grad(exact.square().sum(), [x, *weight.values()])
    for got, want in zip(ours, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_a_map_of_other_rows() -> None:
    for row in (-1, 4):
        with pytest.raises((RuntimeError, IndexError), match="out of range"):
            RestoreTokens()(torch.ones(3, 2), torch.tensor([0, row]))


def test_what_they_cannot_take() -> None:
    x, sizes = torch.ones(3, 2), torch.tensor([1, 2])
    for wrong in ((x[0], sizes), (x, sizes[:1]), (x, sizes, torch.ones(2))):
        with pytest.raises(InputError, match=r"sizes \(2,\) of experts.*Received: input"):
            DropTokens(2, 1.0, weighted=len(wrong) > 2)(*wrong)
    for pair in ((x[0], sizes), (x, sizes.view(2, 1)), (x, sizes.int())):
        with pytest.raises(InputError, match=r"map \(R,\) of int64.*Received: input"):
            RestoreTokens()(*pair)
    for op in (DropTokens(2, 1.0, weighted=False), RestoreTokens()):
        with pytest.raises(OpKwargsError, match="takes no keywords"):
            Sequential(op)(x, sizes, op_kwargs={op: {"rows": 1}})
