from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser import PositionEmbedding
from opfuser.errors import ArgumentError, InputError
from tests.basic.values import check_values, fill, held_to


def plain(op: PositionEmbedding, x: Tensor, positions: Tensor | None = None) -> Tensor:
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    return x + F.embedding(positions, op.weight).to(x.dtype)


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5), (2, 3, 6, 5), (0, 4, 5), (2, 0, 5)], ids=str)
def test_as_exact_as_torch(shape: tuple[int, ...], device: torch.device) -> None:
    check_values(
        held_to(PositionEmbedding(6, 5, device=device), plain), torch.randn(shape).to(device)
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=str)
def test_given_positions(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Of which some come twice, and some not at all."""
    op = fill(PositionEmbedding(6, 5, device=device, dtype=torch.float64))
    x = torch.randn(3, 4, 5, dtype=torch.float64, device=device, requires_grad=True)
    positions = torch.randint(0, 4, shape, dtype=dtype, device=device)
    dy = torch.randn_like(x)
    got, wanted = op(x, positions=positions), plain(op, x, positions)
    torch.testing.assert_close(got, wanted)
    grads = partial(torch.autograd.grad, inputs=(x, op.weight), grad_outputs=dy)
    torch.testing.assert_close(grads(got), grads(wanted))


def test_the_gradient_is_no_view_of_that_of_the_output() -> None:
    """Autograd may accumulate into either in place."""
    op, x = PositionEmbedding(2, 3), torch.randn(2, 3, requires_grad=True)
    dy = torch.ones(2, 3)
    op(x).backward(dy)
    assert op.weight.grad is not None
    op.weight.grad.add_(1)
    assert dy.eq(1).all()
    assert x.grad is not None
    assert x.grad.eq(1).all()


@pytest.mark.parametrize(
    ("shape", "positions", "text"),
    [
        ((5,), None, r"\(\.\.\., sequence, 5\) \(PositionEmbedding\).*input \(5,\)"),
        ((2, 4), None, r"\(\.\.\., sequence, 5\).*input \(2, 4\)"),
        ((7, 5), None, r"not be longer than the table.*input \(7, 5\).*num_positions=6"),
        ((2, 4, 5), torch.zeros(4), r"int32 or int64.*positions \(4,\) of torch.float32"),
        ((2, 4, 5), torch.zeros(2, dtype=torch.int64), r"one for each row of x.*positions \(2,\)"),
    ],
    ids=str,
)
def test_refuses_inputs(shape: tuple[int, ...], positions: Tensor | None, text: str) -> None:
    with pytest.raises(InputError, match=text):
        PositionEmbedding(6, 5)(torch.randn(shape), positions=positions)


@pytest.mark.parametrize("sizes", [(-1, 3), (5, -3)])
def test_refuses_sizes(sizes: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=r"Sizes must not be negative .*num_positions=-?[15]"):
        PositionEmbedding(*sizes)
