from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opfuser import (
    BasicLinear,
    ConstantScale,
    Linear,
    MakeExtraOutput,
    Residual,
    Sequential,
    SiLU,
    gemm,
)
from tests.contract.tensors import against
from tests.fused.examples import (
    BF16,
    DTYPES,
    F32,
    F64,
    Case,
    check,
    leaf,
    only,
    refused,
)

NAME = "backward_linear_add"


def branch(**kwargs: Any) -> list[nn.Module]:
    return [MakeExtraOutput(**kwargs), BasicLinear(6, 4)]


def several() -> list[nn.Module]:
    """The last linear could also fuse with its factor; the residual comes first."""
    taps = [MakeExtraOutput(), MakeExtraOutput()]
    tapped = [BasicLinear(6, 5), MakeExtraOutput(), Linear(5, 4)]
    return [*tapped, *taps, BasicLinear(4, 3), ConstantScale(0.5)]


CASES = {
    "in place": Case(lambda: branch(in_place=True), dtypes=(F32, BF16)),
    "several": Case(several, (33, 6), dtypes=(F64, BF16), times=2),
}


@pytest.mark.parametrize("case", CASES)
def test_values(case: str) -> None:
    check(NAME, CASES[case])


def test_an_input_without_gradient_needs_no_sum() -> None:
    assert refused(Sequential(*branch()), NAME, torch.randn(3, 6)) == [
        (0, "NO_GRAD: no gradient is needed at or before its first operation")
    ]


@pytest.fixture
def additions(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What GEMMs of input gradients are asked to add, and whether in place."""
    seen: list[dict[str, Any]] = []
    dgrad = gemm.dgrad

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "add" in kwargs:
            seen.append(kwargs)
        return dgrad(*args, **kwargs)

    monkeypatch.setattr("opfuser.gemm.dgrad", spy)
    return seen


@pytest.mark.parametrize("keep", [False, True])
def test_the_gemm_adds_in_place_to_what_the_engine_made(
    keep: bool, additions: list[dict[str, Any]]
) -> None:
    """And not to the gradient of a public output, which is the caller's."""
    inner = Residual(BasicLinear(6, 6), SiLU())
    seq = Sequential(MakeExtraOutput(), BasicLinear(6, 6), inner, SiLU()).double()
    x = leaf(3, 6, dtype=F64)
    g, dy = torch.randn_like(x), torch.randn_like(x)
    given = g.clone(), dy.clone()
    y, public = seq(x)
    torch.autograd.backward([y, public], [dy, g], retain_graph=keep)
    assert [kwargs["in_place"] for kwargs in additions] == [True, False]
    assert torch.equal(g, given[0])
    assert torch.equal(dy, given[1])
    with only():
        want = torch.autograd.grad(seq(x), x, [dy, g])
    torch.testing.assert_close(x.grad, *want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sibling_projections(dtype: torch.dtype, additions: list[dict[str, Any]]) -> None:
    """The GEMM of one adds to the gradient that the other one sends to their common input."""
    gate = Sequential(MakeExtraOutput(), BasicLinear(6, 5, dtype=dtype))
    up = Sequential(BasicLinear(6, 5, dtype=dtype))

    def model(x: torch.Tensor) -> torch.Tensor:
        y, tapped = gate(x)
        return y * up(tapped)

    x = leaf(4, 6, dtype=dtype)
    against(
        model,
        lambda p, x: (x @ p["gate"].t()) * (x @ p["up"].t()),
        x,
        parameters=[("gate", gate[-1].weight), ("up", up[-1].weight)],
    )
    assert [kwargs["add"] is not None for kwargs in additions] == [True]
