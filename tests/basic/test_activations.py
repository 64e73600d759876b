from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser import GELU, QGELU, ReLU, Sequential, Sigmoid, SiLU, Softplus, SReLU, Tanh
from opfuser.errors import ArgumentError, InputError, NotSupportedError, OpKwargsError
from opfuser.testing import check_op

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

CASES: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "gelu_tanh": (
        GELU(),
        lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "gelu_erf": (GELU("none"), lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2)))),
    "qgelu": (QGELU(), lambda x: x / (1 + torch.exp(-1.702 * x))),
    "relu": (ReLU(), lambda x: torch.where(x > 0, x, 0)),
    "srelu": (SReLU(), lambda x: torch.where(x > 0, x * x, 0)),
    "silu": (SiLU(), lambda x: x / (1 + torch.exp(-x))),
    "softplus": (Softplus(), F.softplus),
    "softplus_sharp": (Softplus(2.0, 3.0), lambda x: F.softplus(x, 2.0, 3.0)),
    "tanh": (Tanh(), lambda x: 1 - 2 / (1 + torch.exp(2 * x))),
    "sigmoid": (Sigmoid(), lambda x: 1 / (1 + torch.exp(-x))),
}
IN_TORCH: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "gelu_tanh": (GELU(), lambda x: F.gelu(x, approximate="tanh")),
    "gelu_erf": (GELU("none"), F.gelu),
    "qgelu": (QGELU(), lambda x: x * torch.sigmoid(1.702 * x)),
    "srelu": (SReLU(), lambda x: F.relu(x) ** 2),
    "silu": (SiLU(), F.silu),
    "softplus": (Softplus(), F.softplus),
}
OPS = [pytest.param(op, id=name) for name, (op, _) in CASES.items()]


@pytest.mark.parametrize("shape", [(7, 13), (1, 5), (2, 3, 4)])
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients(op: Any, shape: tuple[int, ...], device: torch.device) -> None:
    check_op(op, 2 * torch.randn(shape, device=device), dtypes=DTYPES, zero_rows=True)


@pytest.mark.parametrize(("op", "formula"), CASES.values(), ids=CASES)
def test_formula(op: Any, formula: Callable[[Tensor], Tensor], device: torch.device) -> None:
    x = torch.linspace(-9, 9, 143, dtype=torch.float64, device=device).requires_grad_()
    dy = torch.randn_like(x)
    y, expected = op(x), formula(x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("op", "function"), IN_TORCH.values(), ids=IN_TORCH)
def test_as_accurate_as_torch(
    op: Any, function: Any, dtype: torch.dtype, device: torch.device
) -> None:
    x, dy = (2 * torch.randn(2, 4096, device=device)).to(dtype)

    def run(f: Any, like: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = x.detach().to(like).requires_grad_()
        y = f(leaf)
        return y.detach(), torch.autograd.grad(y, leaf, dy.to(like))[0]

    for got, theirs, truth in zip(
        run(op, dtype), run(function, dtype), run(function, torch.float64)
    ):
        error, allowed = (got - truth).abs().max(), (theirs - truth).abs().max()
        assert error <= 2 * allowed, (error, allowed)


@pytest.mark.parametrize("op", OPS)
def test_autocast(op: Any, device: torch.device) -> None:
    x = torch.randn(6, 5, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, x)
        y = op(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_large_inputs_give_the_asymptotes(
    op: Any, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.tensor([-2e4, -100.0, 100.0], dtype=dtype, device=device, requires_grad=True)
    y = op(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    x64 = x.detach().double().requires_grad_()
    expected = op.reference(x64)
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(
        dx.double(), torch.autograd.grad(expected.sum(), x64)[0], rtol=1e-2, atol=1e-6
    )


EDGES = {
    **IN_TORCH,
    "relu": (ReLU(), F.relu),
    "tanh": (Tanh(), torch.tanh),
    "sigmoid": (Sigmoid(), torch.sigmoid),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "function"), EDGES.values(), ids=EDGES)
def test_finite_at_infinity_where_torch_is(
    op: Any, function: Any, dtype: torch.dtype, device: torch.device
) -> None:
    inf = math.inf
    x = torch.tensor([-inf, inf, -inf, inf, -1.0, 1.0], dtype=dtype, device=device)
    dy = torch.tensor([1.0, 1.0, 0.0, 0.0, inf, inf], dtype=dtype, device=device)
    results = []
    for f in (op, function):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    for got, want in zip(*results):
        finite = want.isfinite()
        torch.testing.assert_close(got[finite], want[finite])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("op", OPS)
def test_inputs_of_other_dtypes_are_refused(op: Any, dtype: torch.dtype) -> None:
    text = rf"fp32 or fp64 \({type(op).__name__}\)\. Received: a tensor of {dtype}\. Convert"
    with pytest.raises(InputError, match=text):
        op(torch.ones(3, 4).to(dtype))


@pytest.mark.parametrize("op", [ReLU(), SReLU()])
def test_derivative_at_zero_is_zero(op: Any, device: torch.device) -> None:
    x = torch.zeros(4, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(op(x), x, torch.ones(4, device=device))
    assert dx.count_nonzero() == 0


def test_softplus_is_the_identity_beyond_the_threshold(device: torch.device) -> None:
    x = torch.tensor([1.4, 1.6], device=device, requires_grad=True)
    y = Softplus(2.0, 3.0)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y[1] == x[1]
    assert dx[1] == 1
    assert y[0] != x[0]
    assert dx[0] < 1


@pytest.mark.parametrize("op", OPS)
def test_keeps_the_input_and_nothing_else(op: Any) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        op(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


@pytest.mark.parametrize("op", OPS)
def test_copies_compute_the_same(op: Any) -> None:
    x = torch.randn(5, 3)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        torch.testing.assert_close(twin(x), op(x), rtol=0, atol=0)


def test_arguments_show() -> None:
    assert repr(GELU("none")) == "GELU(approximate='none')"
    assert repr(Softplus(2.0)) == "Softplus(beta=2.0, threshold=20.0)"


def test_gelu_refuses_an_unknown_approximation() -> None:
    with pytest.raises(ArgumentError, match=r"'tanh' or 'none' \(GELU\)\. Received: 'erf'"):
        GELU("erf")


def test_softplus_refuses_beta_zero() -> None:
    with pytest.raises(ArgumentError, match=r"beta must not be zero \(Softplus\)"):
        Softplus(0.0)


@pytest.mark.parametrize("cls", [GELU, QGELU, ReLU, SReLU, SiLU, Softplus, Tanh, Sigmoid])
def test_quantised_caching_is_not_supported(cls: Any) -> None:
    cls(cache_quantized_input=False)
    text = rf"no quantised compute \({cls.__name__}\)\. Received: cache_quantized_input=True"
    with pytest.raises(NotSupportedError, match=text):
        cls(cache_quantized_input=True)


def test_keywords_are_refused() -> None:
    with pytest.raises(OpKwargsError, match="alpha"):
        Sequential(SiLU())(torch.ones(2), op_kwargs={0: {"alpha": 2}})
