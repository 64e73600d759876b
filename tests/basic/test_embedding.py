from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser import Embedding
from opfuser.errors import ArgumentError, InputError
from tests.basic.values import check_values, held_to


def plain(op: Embedding, x: Tensor) -> Tensor:
    return F.embedding(x, op.weight, op.padding_idx)


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
    check_values(held_to(op, plain), x)
    assert torch.equal(op(x), op.weight[x.long()])


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
    ("sizes", "padding_idx", "text"),
    [
        ((-1, 3), None, "Sizes must not be negative .*num_embeddings=-1, embedding_dim=3"),
        ((5, -3), None, "Sizes must not be negative"),
        ((0, 3), 0, "padding_idx must be a row"),
    ],
)
def test_refuses_arguments(sizes: tuple[int, int], padding_idx: int | None, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        Embedding(*sizes, padding_idx=padding_idx)


def test_an_index_outside_of_the_table_fails() -> None:
    with pytest.raises(IndexError):
        Embedding(5, 3)(torch.tensor([5]))
