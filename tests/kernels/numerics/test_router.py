"""Routers: experts, weights, losses and gradients, beside the formula in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser import TopKRouter
from opfuser.kernels.router import LossGrads, RouterLosses, Routing, route, route_backward
from tests.kernels.accuracy import assert_accurate

# A GPU is silent about infinities; the interpreter's numpy is not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EVERY = {"aux_loss": True, "z_loss": True, "balance_terms": True}
ROUTERS: dict[str, TopKRouter] = {
    "softmax": TopKRouter(8, 3, **EVERY),
    "Mixtral": TopKRouter(8, 2, norm_topk_prob=True, aux_loss=True),
    "Qwen3": TopKRouter(128, 8, norm_topk_prob=True, **EVERY),
    "Qwen2": TopKRouter(60, 4, z_loss=True),
    "sigmoid": TopKRouter(5, 5, score_function="sigmoid", scaling_factor=2.5, **EVERY),
    "DeepSeek-V3": TopKRouter(
        64, 8, score_function="sigmoid", norm_topk_prob=True, scaling_factor=2.5,
        score_correction_bias=True, num_groups=8, top_k_groups=4, balance_terms=True,
    ),
    "groups of 5": TopKRouter(15, 4, num_groups=3, top_k_groups=2, norm_topk_prob=True),
    "one": TopKRouter(1, 1, norm_topk_prob=True, **EVERY),
}  # fmt: skip


def wanted(op: TopKRouter) -> RouterLosses:
    return RouterLosses(op.aux_loss, op.z_loss, op.balance_terms)


def logits(tokens: int, experts: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of which no two of a token are equal: they would be chosen among as one likes."""
    order = torch.rand(tokens, experts).argsort(1) - experts // 2
    return (order / 16).to(device, dtype)


def results(op: TopKRouter, x: Tensor, mask: Tensor | None, grads: list[Tensor]) -> list[Tensor]:
    """Of the formula: outputs, and the gradient of the logits."""
    leaf = x.detach().clone().requires_grad_()
    bias = op.score_correction_bias
    outputs = op.reference(leaf, mask=mask)
    assert bias is op.score_correction_bias
    differentiable = [y for y in outputs if y.requires_grad]
    given = [g.to(y.dtype) for g, y in zip(grads, differentiable)]
    dx = torch.autograd.grad(differentiable, leaf, given)[0]
    return [*(y.detach() for y in outputs), dx]


def ours(op: TopKRouter, x: Tensor, mask: Tensor | None, grads: list[Tensor]) -> list[Tensor]:
    settings, losses = op.make_settings(), wanted(op)
    made: Routing = route(x, op.score_correction_bias, mask, settings, losses)
    rest = iter(grads[1:])
    of_losses = LossGrads(*(next(rest) if on else None for on in losses))
    routing = made.indices, made.fractions, made.number
    dx = route_backward(x, grads[0], routing, mask, of_losses, settings)
    return [t for t in (*made[:6], dx) if t is not None]


@pytest.mark.parametrize(
    ("name", "tokens"), [*((name, 37) for name in ROUTERS), ("DeepSeek-V3", 1), ("sigmoid", 300)]
)
def test_values_and_gradients(name: str, tokens: int, device: torch.device) -> None:
    op = ROUTERS[name].to(device)
    experts, k = op.num_experts, op.top_k
    if op.score_correction_bias is not None:
        torch.nn.init.uniform_(op.score_correction_bias, -0.05, 0.05)
    for dtype, masked in ((FP32, False), (BF16, True), (FP16, False), (FP32, True)):
        x = logits(tokens, experts, dtype, device)
        mask = torch.rand(tokens, device=device) < 0.6 if masked else None
        shapes = [(), (), (2, experts)]
        grads = [torch.randn(s, device=device) for s, on in zip(shapes, wanted(op)) if on]
        grads = [torch.randn(tokens, k, device=device), *grads]
        exact = results(op, x.double(), mask, grads)
        plain = results(op, x, mask, grads)
        got = ours(op, x, mask, grads)
        assert len(got) == len(exact)
        assert got[0].dtype == FP32
        assert got[-1].dtype == dtype
        for n, (a, b, c) in enumerate(zip(got, plain, exact)):
            if n in (1, 2):
                assert torch.equal(a, c), f"{dtype}: indices and tokens"
                continue
            units = 4 if c is exact[-1] else 8
            assert_accurate(f"{n}, {dtype}, masked {masked}", a, b, c, units=units)


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "DeepSeek-V3"])
def test_gradients_of_some_losses_alone(name: str, device: torch.device) -> None:
    op = ROUTERS[name].to(device)
    settings, x = op.make_settings(), torch.randn(20, op.num_experts, device=device)
    made = route(x, op.score_correction_bias, None, settings, RouterLosses(True, True, True))
    routing = made.indices, made.fractions, made.number
    every = [torch.randn(s, device=device) for s in ((), (), (2, op.num_experts))]
    none = torch.zeros_like(made.weights)

    def dx(*on: bool) -> Tensor:
        grads = LossGrads(*(g if o else None for g, o in zip(every, on)))
        return route_backward(x, none, routing, None, grads, settings)

    parts = dx(True, False, False) + dx(False, True, False) + dx(False, False, True)
    torch.testing.assert_close(dx(True, True, True), parts, rtol=1e-5, atol=1e-6)
    assert not dx(False, False, False).any()


def test_strided_and_expanded_tensors(device: torch.device) -> None:
    op = ROUTERS["Mixtral"].to(device)
    x, dw = torch.randn(4, 9, 8, device=device), torch.randn(4, 9, 1, device=device)
    wide = torch.cat([x, x], -1)[..., :8]
    mask = torch.rand(4, 9, 2, device=device)[..., 0] < 0.5
    grads = [dw.expand(4, 9, 2), torch.tensor(0.3, device=device)]
    want = ours(op, x, mask.contiguous(), [g.contiguous() for g in grads])
    # A GPU adds up in another order where elements are not side by side.
    for got, expected in zip(ours(op, wide, mask, grads), want, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["softmax", "DeepSeek-V3"])
def test_no_tokens(name: str, device: torch.device) -> None:
    op, losses = ROUTERS[name].to(device), RouterLosses(True, True, True)
    x, settings = torch.empty(2, 0, op.num_experts, device=device), op.make_settings()
    for mask in (None, torch.empty(2, 0, dtype=torch.bool, device=device)):
        made = route(x, op.score_correction_bias, mask, settings, losses)
        assert made.weights.shape == made.indices.shape == (2, 0, op.top_k)
        assert not any(t.any() for t in (made.tokens, made.aux, made.z, made.terms))
        routing = made.indices, made.fractions, made.number
        grads = LossGrads(made.aux, made.z, made.terms)
        assert route_backward(x, made.weights, routing, mask, grads, settings).shape == x.shape


NAN, INF = float("nan"), float("inf")


def chosen(op: TopKRouter, x: Tensor) -> tuple[Tensor, Tensor]:
    made = route(x, op.score_correction_bias, None, op.make_settings(), RouterLosses(*[False] * 3))
    return made.weights, made.indices


def test_nan_is_the_largest_score(device: torch.device) -> None:
    """As in torch: of a sigmoid it is one expert's, of a softmax all experts'."""
    x = torch.tensor([[0.0, 3.0, NAN, 1.0], [0.0, 1.0, -INF, 2.0]], device=device)
    op = TopKRouter(4, 2, score_function="sigmoid")
    weights, indices = chosen(op, x)
    assert indices.tolist() == [[2, 1], [3, 1]]
    torch.testing.assert_close(weights, x.sigmoid().gather(1, indices), equal_nan=True)
    groups = TopKRouter(4, 2, score_function="sigmoid", num_groups=2)
    assert sorted(chosen(groups, x)[1][0].tolist()) == [2, 3]
    weights, indices = chosen(TopKRouter(4, 3), x)
    assert weights[0].isnan().all()
    assert not weights[1].isnan().any()
    assert len({*indices[0].tolist()}) == 3
    assert indices.min() >= 0
    assert indices.max() < 4


@pytest.mark.parametrize(
    ("function", "value"), [*itertools.product(["softmax", "sigmoid"], [INF, -INF])]
)
def test_infinite_logits(function: Any, value: float, device: torch.device) -> None:
    x = torch.tensor([[value, 0.0, 1.0], [value] * 3], device=device)
    op = TopKRouter(3, 3, score_function=function)
    weights, indices = chosen(op, x)
    assert indices.sort(1).values.tolist() == [[0, 1, 2]] * 2
    scores = x.softmax(-1) if function == "softmax" else x.sigmoid()
    torch.testing.assert_close(weights, scores.gather(1, indices), equal_nan=True)
    z = route(x, None, None, op.make_settings(), RouterLosses(False, True, False)).z
    torch.testing.assert_close(z, x.logsumexp(-1).square().mean(), equal_nan=True)


@pytest.mark.kernels
def test_of_equal_scores_kernels_take_the_first(device: torch.device) -> None:
    for op in (TopKRouter(8, 3), TopKRouter(8, 3, num_groups=4, top_k_groups=2)):
        assert chosen(op, torch.zeros(5, 8, device=device))[1].tolist() == [[0, 1, 2]] * 5
    x = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]], device=device)
    assert chosen(TopKRouter(5, 4), x)[1].tolist() == [[1, 2, 4, 0]]
