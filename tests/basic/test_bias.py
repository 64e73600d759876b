from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from opfuser import Bias, Sequential
from opfuser.errors import ArgumentError, InputError
from tests.basic.values import DTYPES, check_values, fill, held_to

# Of the shapes and layouts that check_op does not make of a matrix.
INPUTS: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.randn(5, 7),
    "many rows": lambda: torch.randn(4099, 7),
    "vector": lambda: torch.randn(7),
    "batched": lambda: torch.randn(2, 3, 4, 7),
    "expanded": lambda: torch.randn(1, 7).expand(4, 7),
}


@pytest.mark.parametrize("shape", INPUTS)
def test_as_exact_as_torch(shape: str, device: torch.device) -> None:
    op = held_to(fill(Bias(7)).to(device), lambda op, x: x + op.bias)
    check_values(op, INPUTS[shape]().to(device))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(("many rows", dtype) for dtype in DTYPES),
        ("vector", torch.float16),
        ("batched", torch.bfloat16),
        ("expanded", torch.float32),
    ],
    ids=str,
)
def test_its_gradient_is_summed_in_fp32_and_rounded_once(
    shape: str, dtype: torch.dtype, device: torch.device
) -> None:
    op = fill(Bias(7, dtype=dtype)).to(device)
    x = INPUTS[shape]().to(device, dtype)
    dy = (0.5 + torch.rand(x.shape)).to(device, dtype)
    assert torch.equal(op(x), x + op.bias)
    (db,) = torch.autograd.grad(op(x), op.bias, dy)
    exact = dy.double().reshape(-1, 7).sum(0)
    # Half a unit in the last place, and the sum's own error.
    own = {torch.float64: 1e-14, torch.float32: 1.1e-6}.get(dtype, 1e-7)
    allowed = (0.501 * torch.finfo(dtype).eps + own) * exact.abs()
    assert bool(((db.double() - exact).abs() <= allowed).all())


def test_output_has_the_dtype_of_the_input() -> None:
    op, x = fill(Bias(3)), torch.randn(2, 3).bfloat16()
    y = op(x)
    assert op.bias is not None
    torch.testing.assert_close(y, x + op.bias.bfloat16(), rtol=0, atol=0)
    assert torch.autograd.grad(y.sum(), op.bias)[0].dtype == torch.float32


def test_without_a_bias_it_is_the_identity_and_has_no_parameter() -> None:
    op, dy = fill(Bias(3)), torch.full((2, 3), 2.0)
    x = torch.randn(2, 3, requires_grad=True)
    op(x)
    op.bias = None
    y = Sequential(op)(x)
    assert torch.equal(y, x)
    assert torch.equal(op.reference(x), x)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy)
    assert list(op.parameters()) == []
    op.reset_parameters()
    op.bias = nn.Parameter(torch.ones(3))
    torch.testing.assert_close(op(x), x + 1)


def test_starts_at_zero_and_resets_to_it() -> None:
    op = Bias(4)
    for _ in range(2):
        assert torch.equal(op.bias, torch.zeros(4))
        fill(op).reset_parameters()


@pytest.mark.parametrize("shape", [(2, 1), (2, 4), ()])
def test_wrong_last_dimension_is_an_error_even_if_it_broadcasts(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"must be the size of the bias \(Bias\(3\)\)"):
        Bias(3)(torch.randn(shape))


def test_a_negative_size_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"must be a multiple of the tensor-parallel.*size -1"):
        Bias(-1)
