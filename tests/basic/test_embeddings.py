"""Rows of a table: alone, added at given indices, and added at positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser import AddEmbedding, Embedding, PositionEmbedding
from opfuser.errors import ArgumentError, InputError
from tests.basic.values import check_values, fill, held_to


def looked_up(op: Embedding, x: Tensor) -> Tensor:
    return F.embedding(x, op.weight, op.padding_idx)


def added(op: AddEmbedding, x: Tensor, indices: Tensor) -> Tensor:
    return x + F.embedding(indices, op.weight).to(x.dtype)


def at_positions(op: PositionEmbedding, x: Tensor, positions: Tensor | None = None) -> Tensor:
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    return x + F.embedding(positions, op.weight).to(x.dtype)


@pytest.mark.parametrize(
    ("shape", "index", "padding_idx"),
    [
        ((4, 9), torch.int64, None),
        ((4, 9), torch.int32, 3),
        ((1,), torch.int32, None),
        ((), torch.int64, -1),
        ((0,), torch.int32, -1),
        ((2, 0, 3), torch.int64, 3),
        ((300,), torch.int64, -1),
        ((300,), torch.int32, None),
    ],
    ids=str,
)
def test_as_exact_as_torch(
    shape: tuple[int, ...], index: torch.dtype, padding_idx: int | None, device: torch.device
) -> None:
    op = Embedding(11, 5, padding_idx=padding_idx, device=device)
    x = torch.randint(0, 11, shape, dtype=index, device=device)
    check_values(held_to(op, looked_up), x)
    assert torch.equal(op(x), op.weight[x.long()])


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 3, 2), (0, 4)], ids=str)
def test_added_as_exact_as_torch(
    shape: tuple[int, ...], index: torch.dtype, device: torch.device
) -> None:
    """Of rows that come several times, or not at all."""
    op = held_to(AddEmbedding(6, 5, device=device), added)
    indices = torch.randint(0, 4, shape, dtype=index, device=device)
    check_values(op, torch.randn(*shape, 5, device=device), indices)


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5), (2, 3, 6, 5), (0, 4, 5), (2, 0, 5)], ids=str)
def test_positions_as_exact_as_torch(shape: tuple[int, ...], device: torch.device) -> None:
    op = held_to(PositionEmbedding(6, 5, device=device), at_positions)
    check_values(op, torch.randn(shape, device=device))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=str)
def test_given_positions(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Of which some come twice, and some not at all."""
    op = fill(PositionEmbedding(6, 5, device=device, dtype=torch.float64))
    x = torch.randn(3, 4, 5, dtype=torch.float64, device=device, requires_grad=True)
    positions = torch.randint(0, 4, shape, dtype=dtype, device=device)
    dy = torch.randn_like(x)
    got, wanted = op(x, positions=positions), at_positions(op, x, positions)
    torch.testing.assert_close(got, wanted)
    grads = partial(torch.autograd.grad, inputs=(x, op.weight), grad_outputs=dy)
    torch.testing.assert_close(grads(got), grads(wanted))


def test_the_gradient_of_positions_is_no_view_of_that_of_the_output() -> None:
    """Autograd may accumulate into either in place."""
    op, x = PositionEmbedding(2, 3), torch.randn(2, 3, requires_grad=True)
    dy = torch.ones(2, 3)
    op(x).backward(dy)
    assert op.weight.grad is not None
    op.weight.grad.add_(1)
    assert dy.eq(1).all()
    assert x.grad is not None
    assert x.grad.eq(1).all()


def test_starts_as_torch_does() -> None:
    torch.manual_seed(3)
    expected = nn.Embedding(20, 6, padding_idx=-2)
    torch.manual_seed(3)
    op = Embedding(20, 6, padding_idx=-2)
    assert op.padding_idx == expected.padding_idx == 18
    assert torch.equal(op.weight, expected.weight)
    op.load_state_dict(expected.state_dict())


def test_output_keeps_the_weights_dtype_under_autocast(device: torch.device) -> None:
    op = Embedding(5, 3, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert op(torch.tensor([1, 2], device=device)).dtype == torch.float32


def test_the_padding_row_starts_at_zero() -> None:
    op = Embedding(6, 3, padding_idx=1)
    op.reset_parameters()
    assert op.weight.any(1).tolist() == [True, False, *[True] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8], ids=str)
def test_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"int32 or int64 \(Embedding\).*{dtype}.*\.long\(\)"):
        Embedding(5, 3)(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize(
    ("x", "indices", "text"),
    [
        (
            torch.ones(2, 4),
            torch.zeros(2).long(),
            r"\(\.\.\., 5\) \(AddEmbedding\).*input \(2, 4\)",
        ),
        (torch.ones(2, 5).int(), torch.zeros(2).long(), r"floating point.*of torch.int32"),
        (torch.ones(2, 5), torch.zeros(2), r"int32 or int64.*indices \(2,\) of torch.float32"),
        (torch.ones(2, 5), torch.zeros(3).long(), r"one for each row.*indices \(3,\)"),
    ],
    ids=["features", "dtype", "dtype of indices", "shape of indices"],
)
def test_refuses_inputs_and_indices(x: Tensor, indices: Tensor, text: str) -> None:
    with pytest.raises(InputError, match=text):
        AddEmbedding(6, 5)(x, indices)


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
def test_refuses_inputs_and_positions(
    shape: tuple[int, ...], positions: Tensor | None, text: str
) -> None:
    with pytest.raises(InputError, match=text):
        PositionEmbedding(6, 5)(torch.randn(shape), positions=positions)


@pytest.mark.parametrize("kind", [Embedding, AddEmbedding, PositionEmbedding])
def test_refuses_sizes(kind: Any) -> None:
    for sizes in ((-1, 3), (5, -3)):
        with pytest.raises(
            ArgumentError, match=r"Sizes must not be negative .*num_\w+=-?[15], emb"
        ):
            kind(*sizes)


def test_refuses_a_row_to_pad_with_that_an_empty_table_lacks() -> None:
    with pytest.raises(ArgumentError, match="padding_idx must be a row"):
        Embedding(0, 3, padding_idx=0)


def test_an_index_outside_of_the_table_fails() -> None:
    with pytest.raises(IndexError):
        Embedding(5, 3)(torch.tensor([5]))
