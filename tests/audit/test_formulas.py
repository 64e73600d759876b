"""Formulas are found however they are written, and only where they are what they look like."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from opfuser.report.audit.finding import Found, find
from opfuser.report.audit.tracing import trace

D = 6


class Written(nn.Module):
    """Calls a function with itself and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.w, self.b = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.m = nn.Parameter(torch.randn(D, D))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def found_in(model: nn.Module, *inputs: Tensor) -> list[Found]:
    return [f for f in find(trace(model, inputs)) if len(f.launches) > 1]


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + eps


def var(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + 1e-5


def rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def attended(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


ROOT = math.sqrt(D)
# What is written, what it is, and what it computes.
WRITTEN: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, Callable[[Any, Tensor], Tensor]]] = {
    "x / sqrt": (
        lambda m, x: x / torch.sqrt(rms(x)),
        "rms_norm",
        lambda m, x: F.rms_norm(x, (D,), None, 1e-6),
    ),
    "in fp32 and back": (
        lambda m, x: (x.float() * torch.rsqrt(rms(x.float()))).to(x.dtype) * m.w,
        "rms_norm",
        lambda m, x: F.rms_norm(x.float(), (D,), None, 1e-6).double() * m.w,
    ),
    "geglu, erf": (
        lambda m, x: F.gelu(x) * x.cos(), "geglu_exact", lambda m, x: F.gelu(x) * x.cos(),
    ),
    "linear": (lambda m, x: m.b + x @ m.m.T, "linear", lambda m, x: F.linear(x, m.m, m.b)),
    "attention, scaled before": (
        lambda m, x: F.softmax(torch.matmul(x / ROOT, x.transpose(-1, -2)), -1) @ x,
        "attention",
        lambda m, x: attended(x),
    ),
    "attention by einsum": (
        lambda m, x: torch.einsum(
            "bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", x / ROOT, x).softmax(2), x
        ),
        "attention",
        lambda m, x: attended(x),
    ),
    "attention, bmm and baddbmm": (
        lambda m, x: (
            torch.baddbmm(
                torch.zeros(1, 1, 1, dtype=x.dtype), x, x.mT, alpha=1 / ROOT
            ).softmax(-1).bmm(x)
        ),
        "attention",
        lambda m, x: attended(x),
    ),
    "rotary embedding": (
        lambda m, x: x * m.w + rotated(x) * m.b,
        "rotary_embedding",
        lambda m, x: x * m.w + rotated(x) * m.b,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_finds_it(name: str) -> None:
    function, kind, right = WRITTEN[name]
    model, x = Written(function), torch.randn(2, 3, D, dtype=torch.float64)
    torch.testing.assert_close(model(x), right(model, x), rtol=1e-6, atol=1e-6)
    (found,) = found_in(model, x)
    assert found.kind == kind
    assert found.output.meta["facts"].shape == x.shape


NOT_THESE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "others read what is inside": lambda m, x: torch.stack(
        [x * (inverse := torch.rsqrt(rms(x))), inverse.expand(x.shape)]
    ),
    "others read what is inside of a weighted one": lambda m, x: torch.stack(
        [m.w * (x * (inverse := torch.rsqrt(rms(x)))), inverse.expand(x.shape)]
    ),
    "an activation of what is doubled": lambda m, x: (2 * x) * torch.sigmoid(x),
    "another constant": lambda m, x: 0.5 * x * (1 + torch.tanh(0.7 * (x + 0.044715 * x**3))),
    "weights are normalized, not scores": lambda m, x: (x @ x.mT).sigmoid() @ x,
    "another tensor turns": lambda m, x: x * m.w + rotated(x.cos()) * m.b,
    "a sum of different tensors": lambda m, x: x @ m.m + x,
    "the mean is over the batch": lambda m, x: (
        x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * m.w
    ),
    "the softmax is over queries": lambda m, x: (x @ x.mT).softmax(-2) @ x,
    "positions turn, not features": lambda m, x: (
        (y := x[:, :2]) * m.w + torch.cat((-(halves := y.chunk(2, 1))[1], halves[0]), 1) * m.b
    ),
    "a quotient by 0": lambda m, x: 0.5 * x * (1.0 + torch.erf(x / 0)),
}


@pytest.mark.parametrize("why", NOT_THESE)
def test_does_not_find_what_only_looks_like_it(why: str) -> None:
    assert found_in(Written(NOT_THESE[why]), torch.randn(2, 3, D, dtype=torch.float64)) == []


def test_rotary_positions_by_complex_numbers() -> None:
    def turned(m: Any, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turns = torch.polar(m.w[:3], m.b[:3])
        return torch.view_as_real(pairs * turns).flatten(2).type_as(x)

    (found,) = found_in(Written(turned), torch.randn(2, 3, D, dtype=torch.float64))
    assert found.kind == "rotary_embedding"
    assert [n.meta["facts"].shape for n in found.inputs] == [(2, 3, D), (3,)]
    assert len(found.launches) == 2  # a cast and a product


def test_multi_head_attention_that_returns_its_weights() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)

    class Itself(nn.Module):
        def __init__(self, need_weights: bool) -> None:
            super().__init__()
            self.attention, self.need_weights = attention, need_weights

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=self.need_weights)[0]

    assert found_in(Itself(need_weights=False), x) == []
    # The weights are read by others, as an average: no kernel of attention returns them.
    assert found_in(Itself(need_weights=True), x) == []


def test_plain_modules_inside_of_a_sequence_are_looked_into() -> None:
    inner = Written(WRITTEN["in fp32 and back"][0])
    block = opfuser.Sequential(opfuser.Tanh(), inner, opfuser.Tanh())
    (found,) = found_in(block, torch.randn(2, 3, D, dtype=torch.float64))
    assert found.kind == "rms_norm"
    assert found.output.meta["place"].path == "1"


def test_operations_of_opfuser_are_one_node() -> None:
    block = opfuser.Residual(opfuser.RMSNorm(8), opfuser.Linear(8, 8))
    traced = trace(nn.Sequential(nn.Linear(8, 8), block), [torch.randn(2, 8)])
    names = [node.op for node in traced.graph.nodes if node.op.startswith("call")]
    assert names == ["call_function", "call_module"]
    assert [call.sequence for call in traced.calls] == [block]
