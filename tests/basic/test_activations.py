from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import opfuser
from opfuser import GELU, QGELU, ReLU, Sigmoid, SiLU, Softplus, SReLU, Tanh
from opfuser.basic import activation, gated_activation
from tests.basic.values import DTYPES, EXACT, check_values, held_to

CASES: dict[str, tuple[Any, Any]] = {
    "gelu_tanh": (GELU(), lambda x: F.gelu(x, approximate="tanh")),
    "gelu_erf": (GELU("none"), F.gelu),
    "qgelu": (QGELU(), lambda x: x * torch.sigmoid(1.702 * x)),
    "relu": (ReLU(), F.relu),
    "srelu": (SReLU(), lambda x: F.relu(x) ** 2),
    "silu": (SiLU(), F.silu),
    "softplus": (Softplus(), F.softplus),
    "softplus_sharp": (Softplus(2.0, 3.0), lambda x: F.softplus(x, 2.0, 3.0)),
    "tanh": (Tanh(), torch.tanh),
    "sigmoid": (Sigmoid(), torch.sigmoid),
}
EACH = pytest.mark.parametrize(("op", "function"), CASES.values(), ids=CASES)


def results(f: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    y = f(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, dy)[0]


@EACH
def test_as_exact_as_torch(op: Any, function: Any, device: torch.device) -> None:
    held = held_to(copy.deepcopy(op), lambda _, x: function(x))
    check_values(held, 2 * torch.randn(4, 1024, device=device), floors=EXACT)
    check_values(held, torch.linspace(-9, 9, 143, device=device))


@EACH
def test_finite_at_infinity_where_torch_is(op: Any, function: Any, device: torch.device) -> None:
    inf = math.inf
    for dtype in DTYPES:
        x = torch.tensor([-inf, inf, -inf, inf, -1.0, 1.0], dtype=dtype, device=device)
        dy = torch.tensor([1.0, 1.0, 0.0, 0.0, inf, inf], dtype=dtype, device=device)
        for got, want in zip(results(op, x, dy), results(function, x, dy)):
            finite = want.isfinite()
            torch.testing.assert_close(got[finite], want[finite])


@pytest.mark.parametrize("op", [ReLU(), SReLU()])
def test_derivative_at_zero_is_zero(op: Any, device: torch.device) -> None:
    x = torch.zeros(4, device=device)
    assert results(op, x, torch.ones_like(x))[1].count_nonzero() == 0


def test_softplus_is_the_identity_beyond_the_threshold(device: torch.device) -> None:
    x = torch.tensor([1.4, 1.6], device=device)
    y, dx = results(Softplus(2.0, 3.0), x, torch.ones_like(x))
    assert (y[1], dx[1]) == (x[1], 1)
    assert y[0] != x[0]
    assert dx[0] < 1


@pytest.mark.parametrize(
    ("module", "classes"),
    [
        (activation, activation.ACTIVATIONS),
        (gated_activation, gated_activation.GATED_ACTIVATIONS),
    ],
)
def test_every_activation_is_public_and_known_to_fusions(module: Any, classes: Any) -> None:
    own = [v for v in vars(module).values() if isinstance(v, type) and v.__name__[0] != "_"]
    own = [
        v for v in own if issubclass(v, opfuser.BasicOperation) and v.__module__ == module.__name__
    ]
    assert sorted(op.__name__ for op in own) == sorted(op.__name__ for op in classes)
    assert all(getattr(opfuser, op.__name__) is op for op in classes)
