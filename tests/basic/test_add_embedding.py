from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser import AddEmbedding
from opfuser.errors import ArgumentError, InputError, OpKwargsError
from tests.basic.values import check_values, held_to


def plain(op: AddEmbedding, x: Tensor, indices: Tensor) -> Tensor:
    return x + F.embedding(indices, op.weight).to(x.dtype)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 3, 2), (0, 4)], ids=str)
def test_as_exact_as_torch(
    shape: tuple[int, ...], index: torch.dtype, device: torch.device
) -> None:
    """Of rows that come several times, or not at all."""
    op = held_to(AddEmbedding(6, 5, device=device), plain)
    indices = torch.randint(0, 4, shape, dtype=index, device=device)
    check_values(op, torch.randn(*shape, 5, device=device), indices)


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
def test_refuses_inputs(x: Tensor, indices: Tensor, text: str) -> None:
    with pytest.raises(InputError, match=text):
        AddEmbedding(6, 5)(x, indices)


@pytest.mark.parametrize("sizes", [(-1, 3), (5, -3)])
def test_refuses_sizes(sizes: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=r"Sizes must not be negative .*num_embeddings=-?[15]"):
        AddEmbedding(*sizes)


def test_refuses_keywords() -> None:
    op = AddEmbedding(5, 2)
    with pytest.raises(OpKwargsError, match=r"takes no keywords\. Received: positions"):
        op(torch.ones(1, 2), torch.tensor([0]), positions=3)
