"""FP8 operands of a MergedLinear: its weights are quantized as one matrix."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import BasicLinear, Bias, MergedLinear, RMSNorm, Sequential, SwiGLU
from opfuser.fused.parts import quantized_linear
from opfuser.recipe import Float8CurrentScaling, Recipe
from tests.quantization.test_values import RECIPES, SMALL_BLOCKS, every_recipe

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")

IN, SIZES = 128, {"q": 256, "k": 128, "v": 128}


def merged(*, apart: bool, **how: Any) -> MergedLinear:
    torch.manual_seed(0)
    op = MergedLinear(IN, SIZES, **how)
    with torch.no_grad():
        for n, p in enumerate(op.parameters()):
            p.normal_().mul_(n + 1)  # so that scales of their own would differ
            p.data = p.data.clone() if apart else p.data
    return op


def one(op: MergedLinear) -> Sequential:
    """A BasicLinear and a Bias with the same numbers."""
    modules: list[Any] = list(op.projections().values())
    seq = Sequential(BasicLinear(IN, 512), Bias(512))
    seq[0].weight = nn.Parameter(torch.cat([m.weight.detach() for m in modules]))
    seq[1].bias = nn.Parameter(torch.cat([m.bias.detach() for m in modules]))
    return seq


def run(seq: Sequential, recipe: Recipe, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Two steps, so that scales that are kept count; the results of the second."""
    x = x.clone().requires_grad_()
    for _ in range(2):
        seq.zero_grad()
        x.grad = None
        with opfuser.autocast(recipe=recipe):
            y = seq(x)
        y.backward(dy)
    grads = [p.grad for p in seq.parameters() if p.grad is not None]
    weights = [g for g in grads if g.dim() == 2]
    biases = [g for g in grads if g.dim() == 1]
    return [y.detach(), x.grad, torch.cat(weights), torch.cat(biases)]


X, DY = torch.randn(40, IN), torch.randn(40, 512)


@every_recipe
@pytest.mark.parametrize("apart", [False, True], ids=["one storage", "apart"])
def test_as_one_linear_operation(recipe: Recipe, apart: bool) -> None:
    op = merged(apart=apart)
    found = []
    for seq in (Sequential(op), one(op)):
        torch.manual_seed(1)  # of stochastic rounding
        found.append(run(seq, recipe, X, DY))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES + SMALL_BLOCKS[:1], ids=lambda r: type(r).__name__)
def test_frozen_projections(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that need a gradient get it with the scale of the whole; others take no GEMM."""
    op = merged(apart=False)
    whole = run(Sequential(copy.deepcopy(op)), recipe, X, DY)
    op.k.requires_grad_(False)
    shapes: list[Any] = []
    product = quantized_linear.ScaledProduct
    monkeypatch.setattr(
        quantized_linear,
        "ScaledProduct",
        lambda dy, x, how: shapes.append(dy.cols.shape[0]) or product(dy, x, how),
    )
    ours = run(Sequential(op), recipe, X, DY)
    assert shapes == [256, 128] * 2
    kept = torch.cat((whole[2][:256], whole[2][384:]))
    for a, b in zip((*ours[:2], ours[2]), (*whole[:2], kept)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_into_main_grad(frozen: bool) -> None:
    op = merged(apart=False, dtype=torch.bfloat16, bias=False, accumulate_into_main_grad=True)
    op.k.requires_grad_(not frozen)
    wide = merged(apart=False, bias=False)
    with torch.no_grad():
        for p, q in zip(op.parameters(), wide.parameters()):
            q.copy_(p)
            p.main_grad = torch.ones(p.shape)
    x, dy = X.bfloat16(), DY.bfloat16()
    recipe = Float8CurrentScaling()
    for seq, args in ((Sequential(op), (x, dy)), (Sequential(wide), (x.float(), dy.float()))):
        with opfuser.autocast(recipe=recipe):
            y = seq(args[0])
        y.backward(args[1])
    for name in SIZES:
        got, exact = getattr(op, name).weight, getattr(wide, name).weight.grad
        assert got.main_grad.dtype == torch.float32
        if frozen and name == "k":
            exact = torch.zeros_like(exact)
        torch.testing.assert_close(got.main_grad - 1, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_block_computes_what_it_does_with_one_linear_operation(recomputed: bool) -> None:
    """Where codes are handed on, and where backward recomputes the output of the projections."""
    op = MergedLinear(IN, {"gate": 256, "up": 256}, bias=False)
    single = BasicLinear(IN, 512)
    single.weight = nn.Parameter(torch.cat([p.detach() for p in op.parameters()]))
    last, found, plans = BasicLinear(256, IN), [], []
    for first in (op, single):
        activation = SwiGLU()
        activation.recompute_mlp = recomputed
        seq = Sequential(RMSNorm(IN), first, activation, copy.deepcopy(last))
        x = X.clone().requires_grad_()
        with opfuser.autocast(recipe=Float8CurrentScaling()):
            plans.append(seq.plan(x))
            y = seq(x)
        (step, *_) = seq.last_plan.forward
        assert (step.fusion == "recompute_mlp_where_asked") == recomputed
        y.sum().backward()
        weights = torch.cat([p.grad for p in first.parameters()])
        found.append([y, x.grad, weights, seq[0].weight.grad, seq[3].weight.grad])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert plans[0].edges == plans[1].edges != ()
    op.up.requires_grad_(False)  # wgrad then takes some columns of the gradient alone
    with opfuser.autocast(recipe=Float8CurrentScaling()):
        plan = Sequential(seq[0], op, activation, last).plan(x)
    assert not any(str(edge).startswith("backward 2 -> 1") for edge in plan.edges)


def test_quantizers_are_those_of_one_linear_operation() -> None:
    op = merged(apart=False)
    one_op = one(op)[0]
    assert op.get_input_quantizer() is None
    with opfuser.autocast(recipe=Float8CurrentScaling()):
        for at in (("forward", 0), ("forward", 1), ("backward", 0)):
            ours, theirs = op.basic_ops[0].get_quantizer(*at), one_op.get_quantizer(*at)
            assert torch.equal(ours(X).rows.float(), theirs(X).rows.float())
        assert Sequential(op).plan(X).quantized == (0,)
        op.recipe = None
        assert op.get_input_quantizer() is None
        assert Sequential(op).plan(X).quantized == ()


def test_sizes_that_no_block_divides() -> None:
    seq = Sequential(MergedLinear(IN, {"a": 120, "b": 136}))
    with opfuser.autocast(recipe=opfuser.recipe.Float8BlockScaling()):
        plan = seq.plan(X)
    (at, why), *_ = plan.high_precision
    assert (at, why.code) == (0, "SHAPE")
    assert "(120, 128)" in why.detail


def test_scales_are_in_the_state_dict() -> None:
    op = merged(apart=False)
    seq = Sequential(op)
    run(seq, opfuser.recipe.DelayedScaling(), X, DY)
    state = seq.state_dict()
    assert "0.quantization.scale" in state
    twin = Sequential(merged(apart=True))
    twin.load_state_dict(state)
    assert torch.equal(twin[0].quantization.scale, op.quantization.scale)
    assert [type(m) for m in twin[0].projections().values()] == [type(op.q)] * 3
