from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from opfuser import ConstantScale, Embedding, Sequential
from opfuser.errors import ArgumentError, InputError, OpKwargsError
from opfuser.testing import check_op

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def backward(y: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(y, weight, dy)
    return grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(4, 9), (1,), (), (0,), (2, 0, 3), (300,)])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_matches_torch(
    shape: tuple[int, ...],
    index: torch.dtype,
    dtype: torch.dtype,
    padding_idx: int | None,
    device: torch.device,
) -> None:
    op = Embedding(11, 5, padding_idx=padding_idx, device=device, dtype=dtype)
    x = torch.randint(0, 11, shape, dtype=index, device=device)
    y = op(x)
    torch.testing.assert_close(y, op.weight[x.long()], rtol=0, atol=0)
    torch.testing.assert_close(op.reference(x), y, rtol=0, atol=0)

    dy = torch.randn_like(y)
    exact_weight = op.weight.detach().double().requires_grad_()
    exact = backward(F.embedding(x, exact_weight, padding_idx), exact_weight, dy.double())
    plain = backward(F.embedding(x, op.weight, padding_idx), op.weight, dy)
    grad = backward(y, op.weight, dy)
    assert grad.dtype == dtype
    error = (grad.double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max() + torch.finfo(dtype).eps


def test_gradient_of_a_single_row_is_the_sum_over_its_uses() -> None:
    op = Embedding(4, 3)
    y = op(torch.tensor([[2, 0], [2, 2]]))
    grad = backward(y, op.weight, torch.ones(()).expand(2, 2, 3))
    expected = torch.tensor([1.0, 0.0, 3.0, 0.0])[:, None].expand(4, 3)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)


def test_non_contiguous_indices_and_gradient() -> None:
    op = Embedding(7, 4)
    x = torch.randint(0, 7, (5, 6)).t()
    y = op(x)
    torch.testing.assert_close(y, F.embedding(x, op.weight), rtol=0, atol=0)
    dy = torch.randn(4, 5, 6).permute(2, 1, 0)
    expected = backward(F.embedding(x, op.weight), op.weight, dy)
    torch.testing.assert_close(backward(y, op.weight, dy), expected)


def test_starts_as_torch_does() -> None:
    torch.manual_seed(3)
    expected = nn.Embedding(20, 6, padding_idx=-2)
    torch.manual_seed(3)
    op = Embedding(20, 6, padding_idx=-2)
    assert op.padding_idx == expected.padding_idx == 18
    torch.testing.assert_close(op.weight, expected.weight, rtol=0, atol=0)
    op.load_state_dict(expected.state_dict())


def test_a_frozen_weight_gets_no_gradient() -> None:
    op = Embedding(5, 2)
    op.weight.requires_grad_(False)
    assert not op(torch.tensor([1])).requires_grad
    scale = Sequential(op, opfuser.Linear(2, 2))
    scale(torch.tensor([1, 2])).sum().backward()
    assert op.weight.grad is None


def test_weight_shared_with_the_output_layer() -> None:
    embedding, head = Embedding(9, 4), opfuser.BasicLinear(4, 9)
    head.weight = embedding.weight
    model = Sequential(embedding, ConstantScale(0.5), head)
    assert len(list(model.parameters())) == 1
    x = torch.randint(0, 9, (3, 2))
    dy = torch.randn(3, 2, 9)
    weight = embedding.weight
    grad = backward(model(x), weight, dy)
    expected = backward(0.5 * F.embedding(x, weight) @ weight.t(), weight, dy)
    torch.testing.assert_close(grad, expected)


def test_output_keeps_the_weights_dtype_under_autocast(device: torch.device) -> None:
    op = Embedding(5, 3, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert op(torch.tensor([1, 2], device=device)).dtype == torch.float32


def test_meta_device_then_materialised() -> None:
    op = Embedding(6, 3, padding_idx=1, device="meta")
    op.to_empty(device="cpu")
    op.reset_parameters()
    assert op.weight[1].eq(0).all()
    x = torch.tensor([0, 1, 5])
    grad = backward(op(x), op.weight, torch.ones(3, 3))
    torch.testing.assert_close(grad.sum(1), torch.tensor([3.0, 0, 0, 0, 0, 3.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
def test_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"int32 or int64 \(Embedding\).*{dtype}.*\.long\(\)"):
        Embedding(5, 3)(torch.ones(2, dtype=dtype))


def test_refuses_keywords() -> None:
    with pytest.raises(OpKwargsError, match="positions"):
        Sequential(Embedding(5, 3))(torch.tensor([1]), op_kwargs={0: {"positions": 1}})


@pytest.mark.parametrize(
    ("sizes", "padding_idx", "text"),
    [
        ((-1, 3), None, "Sizes must not be negative .*num_embeddings=-1, embedding_dim=3"),
        ((5, -3), None, "Sizes must not be negative"),
        ((5, 3), 5, "padding_idx must be a row .*padding_idx=5 of 5 rows"),
        ((5, 3), -6, "padding_idx must be a row"),
        ((0, 3), 0, "padding_idx must be a row"),
    ],
)
def test_refuses_arguments(sizes: tuple[int, int], padding_idx: int | None, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        Embedding(*sizes, padding_idx=padding_idx)


def test_an_index_outside_of_the_table_fails() -> None:
    with pytest.raises(IndexError):
        Embedding(5, 3)(torch.tensor([5]))


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_whole() -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    op = Embedding(8, 3)
    compiled = torch.compile(Sequential(op), backend="aot_eager", fullgraph=True)
    x = torch.randint(0, 8, (2, 5))
    dy = torch.randn(2, 5, 3)
    expected = backward(op(x), op.weight, dy)
    torch.testing.assert_close(backward(compiled(x), op.weight, dy), expected)


def test_copies() -> None:
    op = Embedding(5, 3, padding_idx=0)
    x = torch.tensor([0, 4])
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert repr(twin) == repr(op) == "Embedding(5, 3, padding_idx=0)"
        torch.testing.assert_close(twin(x), op(x), rtol=0, atol=0)


def test_checked_like_a_users_operation(device: torch.device) -> None:
    op = Embedding(9, 5, padding_idx=2, device=device)
    x = torch.randint(0, 9, (4, 3), device=device)
    check_op(op, x, dtypes=DTYPES, zero_rows=True)
