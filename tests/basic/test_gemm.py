"""Products with every epilogue, and that no product of a linear operation is made elsewhere."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import opfuser
from opfuser import gemm
from opfuser.gemm import products

# A GPU alone multiplies long odd rows in two pieces. Here, tests ask where, and cut others.
cut_of = products._cut
N, K = 6, 8
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LEADING = [(), (5,), (0,), (2, 3)]
SCALES = [None, 0.5]
# torch's products, as they would stand in the source.
PRODUCT = re.compile(r"(functional|F)\.linear\(|\.(add|b|badd?b|_?grouped_)?mm_?\b|\.matmul\(")


def close(got: Tensor, exact: Tensor) -> None:
    """Within the roundings of operands, product and sum."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=4 * eps, atol=16 * eps)


def rand(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.fixture(params=["whole", "cut"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products at once, and of two pieces, as of long odd rows on a GPU."""
    if request.param == "cut":
        monkeypatch.setattr(products, "_cut", lambda y: y.shape[-1] - 1 if y.shape[-1] == N else 0)


@pytest.mark.parametrize("added", ["nothing", "copied", "in place", "transposed"])
def test_forward(added: str) -> None:
    ways = itertools.product(DTYPES, LEADING, SCALES, [False, True])
    for dtype, leading, scale, biased in ways:
        x, w = rand(*leading, K, dtype=dtype), rand(N, K, dtype=dtype)
        b = rand(N, dtype=dtype) if biased else None
        z = None if added == "nothing" else rand(*leading, N, dtype=dtype)
        if added == "transposed" and z is not None and z.dim() == 2:
            z = z.t().contiguous().t()
        exact = (1 if scale is None else scale) * (x.double() @ w.double().t())
        exact = exact + (0 if b is None else b.double()) + (0 if z is None else z.double())
        before = None if z is None else z.clone()
        y = gemm.forward(x, w, b, scale=scale, add=z, in_place=added in ("in place", "transposed"))
        assert y.dtype == dtype
        close(y, exact)
        assert (y is z) == (z is not None and added != "copied" and z.is_contiguous())
        assert y is z or z is before or torch.equal(z, before)


@pytest.mark.parametrize("added", ["nothing", "copied", "in place", "another dtype"])
def test_dgrad(added: str) -> None:
    for dtype, leading, scale in itertools.product(DTYPES, LEADING, SCALES):
        dy, w = rand(*leading, N, dtype=torch.float32), rand(N, K, dtype=dtype)
        of_add = torch.float64 if added == "another dtype" else dtype
        g = None if added == "nothing" else rand(*leading, K, dtype=of_add)
        exact = (1 if scale is None else scale) * (dy.to(dtype).double() @ w.double())
        exact = exact if g is None else exact + g.double()
        dx = gemm.dgrad(dy, w, scale=scale, add=g, in_place=added == "in place")
        assert (dx is g) == (added == "in place")
        assert dx.dtype == of_add
        close(dx.to(dtype), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wgrad(dtype: torch.dtype) -> None:
    for leading, scale in itertools.product(LEADING, SCALES):
        dy, x = rand(*leading, N, dtype=torch.float32), rand(*leading, K, dtype=dtype)
        rows = dy.to(dtype).double().reshape(-1, N), x.double().reshape(-1, K)
        exact = (1 if scale is None else scale) * (rows[0].t() @ rows[1])
        dw = gemm.wgrad(dy, x, scale=scale)
        assert dw.dtype == dtype
        close(dw, exact)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("of_out", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wgrad_into(dtype: torch.dtype, of_out: torch.dtype) -> None:
    for scale, may_round, accumulate in itertools.product(SCALES, [False, True], [False, True]):
        dy, x = rand(2, 3, N, dtype=dtype), rand(2, 3, K, dtype=dtype)
        held = rand(N, K, dtype=of_out)
        out = held.clone() if accumulate else torch.full_like(held, torch.nan)
        rows = dy.double().view(6, N), x.double().view(6, K)
        exact = (1 if scale is None else scale) * (rows[0].t() @ rows[1])
        exact = exact + held.double() if accumulate else exact
        gemm.wgrad_into(out, dy, x, accumulate=accumulate, scale=scale, may_round=may_round)
        rounded = may_round and torch.finfo(dtype).eps > torch.finfo(of_out).eps
        close(out.to(dtype) if rounded else out, exact)


def test_the_sum_of_fp16_gradients_is_not_formed_in_fp16() -> None:
    dy, x = torch.full((4, N), 2.0**9).half(), torch.full((4, K), 2.0**9).half()
    assert gemm.wgrad(dy, x).isinf().all()
    assert (gemm.wgrad(dy, x, dtype=torch.float32) == 2.0**20).all()
    for may_round in (False, True):
        out = torch.zeros(N, K)
        gemm.wgrad_into(out, dy, x, accumulate=True, may_round=may_round)
        assert (out == 2.0**20).all()


@pytest.mark.usefixtures("cut")
def test_into_given_memory() -> None:
    x, dy, w = (rand(*shape, dtype=torch.float64) for shape in ((5, K), (5, N), (N, K)))
    y, dx = torch.full_like(dy, torch.nan), torch.full_like(x, torch.nan)
    assert gemm.forward_into(y, x, w) is y
    assert gemm.dgrad_into(dx, dy, w) is dx
    close(y, x @ w.t())
    close(dx, dy @ w)


@pytest.mark.parametrize(
    ("shape", "stride", "dtype", "at"),
    [
        ((2, 50257), (50304, 1), torch.bfloat16, 50256),
        ((2, 50257), (50304, 1), torch.float32, 50256),
        ((2, 50257), (50257, 1), torch.bfloat16, 0),  # no row but the first begins at 16 bytes
        ((2, 50264), (50304, 1), torch.bfloat16, 0),
        ((2, 257), (264, 1), torch.bfloat16, 0),
    ],
    ids=str,
)
def test_where_odd_rows_are_cut(
    shape: tuple[int, int], stride: tuple[int, int], dtype: torch.dtype, at: int
) -> None:
    with FakeTensorMode():
        y = torch.empty_strided(shape, stride, dtype=dtype, device="cuda")
        assert cut_of(y) == at
        assert cut_of(torch.empty_strided(shape, stride, dtype=dtype)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_odd_rows_are_as_exact_as_whole_ones(dtype: torch.dtype) -> None:
    classes = 4099
    x, w, buffer = (
        torch.randn(rows, columns, dtype=dtype, device="cuda")
        for rows, columns in ((300, 64), (classes, 64), (300, 4160))
    )
    y, dx, dw = buffer[:, :classes], torch.empty_like(x), torch.zeros_like(w)
    dy = torch.randn(300, classes, dtype=dtype, device="cuda")

    def error(got: Tensor, exact: Tensor) -> float:
        return (got - exact).norm().item()

    exact = x.double() @ w.double().t()
    assert error(gemm.forward_into(y, x, w), exact) <= 1.1 * error(x @ w.t(), exact)
    y.copy_(dy)
    exact = dy.double() @ w.double()
    assert error(gemm.dgrad_into(dx, y, w), exact) <= 1.1 * error(dy @ w, exact)
    gemm.wgrad_into(dw, y, x, accumulate=True)
    exact = dy.double().t() @ x.double()
    assert error(dw, exact) <= 1.1 * error(dy.t() @ x, exact)


def test_no_product_of_a_linear_operation_is_made_elsewhere() -> None:
    root = Path(opfuser.__file__).parent
    found = {path for path in root.rglob("*.py") if PRODUCT.search(path.read_text())}
    assert {path.name for path in found if path.parent.name == "kernels"} == {"groups_plain.py"}
    # opfuser.apply makes logits as the model would, where something reads them besides a loss.
    assert {path.parent.name for path in found} == {"gemm", "applying", "kernels"}
