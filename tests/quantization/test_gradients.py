"""Where the gradients of weights go that are products of FP8 codes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from tests.contract.gradients import handed_over
from tests.quantization.test_gemm_providers import computed

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

CURRENT = Float8CurrentScaling()
RECIPES: tuple[Recipe, ...] = (CURRENT, DelayedScaling(), Float8BlockScaling())
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
IN, OUT = 256, 128


def linear(dtype: torch.dtype, weight: Tensor, **how: Any) -> Any:
    op = opfuser.BasicLinear(IN, OUT, dtype=dtype, **how)
    op.weight = nn.Parameter(weight.to(dtype, copy=True))
    return op


def backward(op: Any, x: Tensor, dy: Tensor, recipe: Recipe) -> None:
    with opfuser.autocast(recipe=recipe):
        y = op(x)
    y.backward(dy)


def batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(n, IN, dtype=dtype), torch.randn(n, OUT, dtype=dtype)) for n in (5, 130)]


def wide(weight: Tensor, x: Tensor, dy: Tensor, recipe: Recipe) -> Tensor:
    """The same gradient in fp32: operands of a wider dtype hold the same values and codes."""
    op = linear(torch.float32, weight)
    backward(op, x.float(), dy.float(), recipe)
    return op.weight.grad


def steps_apart(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> float:
    """The largest difference, in roundings of ``dtype``, relative to the largest value."""
    difference = (ours.double() - theirs.double()).abs().max() / theirs.abs().max()
    return difference.item() / torch.finfo(dtype).eps


WEIGHT = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(2)).bfloat16().float()


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_main_grad_in_fp32_is_never_rounded_below(dtype: torch.dtype, recipe: Recipe) -> None:
    """Also of weights that are quantized once."""
    kept = opfuser.keep_quantized_weights() if dtype == torch.bfloat16 else contextlib.nullcontext()
    op = linear(dtype, WEIGHT, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.ones(OUT, IN)
    exact = torch.ones(OUT, IN)
    apart = linear(torch.float32, WEIGHT.to(dtype).float())
    # One region, in which delayed scales stay what they are at first.
    with kept, opfuser.autocast(recipe=recipe):
        for x, dy in batches(dtype):
            op(x).backward(dy)
            apart(x.float()).backward(dy.float())
    exact += apart.weight.grad
    assert op.weight.grad_added_to_main_grad
    assert not op.weight.grad.any()
    assert steps_apart(op.weight.main_grad, exact, torch.float32) < 64


def test_main_grad_in_half_precision_is_rounded_once() -> None:
    ((x, dy), _) = batches(torch.bfloat16)
    exact = wide(WEIGHT, x, dy, CURRENT)
    start = torch.randn(OUT, IN, dtype=torch.bfloat16)
    op = linear(torch.bfloat16, WEIGHT, accumulate_into_main_grad=True)
    op.weight.main_grad = start.clone()
    backward(op, x, dy, CURRENT)
    # fp32 sums in another order may round the other way, but by no more than one step.
    once = (start.float() + exact).bfloat16()
    apart = (op.weight.main_grad != once).float().mean().item()
    assert apart < 1e-3


@each_recipe
def test_overwrite_main_grad(recipe: Recipe) -> None:
    """Written by the first use of a weight in a backward pass, added to by the others."""
    op = linear(torch.float32, WEIGHT, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.full((OUT, IN), float("nan"))
    op.weight.overwrite_main_grad = True
    alone = linear(torch.float32, WEIGHT)
    for x, dy in batches(torch.float32):
        alone.weight.grad = None
        for module in (op, alone):
            with opfuser.autocast(recipe=recipe):
                y = module(x) + module(2 * x)
            y.backward(dy)
        torch.testing.assert_close(op.weight.main_grad, alone.weight.grad)


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("asked", [False, True])
def test_grad_accumulates_over_micro_batches(
    asked: bool, dtype: torch.dtype, recipe: Recipe
) -> None:
    """By autograd, also where a GEMM of other operands would add to it: none of codes does."""
    op = linear(dtype, WEIGHT, accumulate_into_grad=asked)
    op.weight.grad = start = torch.ones(OUT, IN, dtype=dtype)
    exact = torch.ones(OUT, IN, dtype=dtype)
    with opfuser.autocast(recipe=recipe):
        for x, dy in batches(dtype):
            (own,) = torch.autograd.grad(op(x), op.weight, dy)
            exact += own
            y = op(x)
            told = handed_over(y, op.weight)
            y.backward(dy)
            assert told == [True]
    assert op.weight.grad is start
    torch.testing.assert_close(start, exact, rtol=0, atol=0)


@pytest.mark.parametrize("accumulate", ["main_grad", "grad"])
def test_a_wgrad_in_high_precision_is_added_by_its_gemm(accumulate: str) -> None:
    how: Any = {f"accumulate_into_{accumulate}": True}
    op = linear(torch.float32, WEIGHT, **how)
    target = torch.ones(OUT, IN)
    setattr(op.weight, accumulate, target)
    ((x, dy), _) = batches(torch.float32)
    with opfuser.autocast(recipe=Float8CurrentScaling(wgrad="bf16")):
        y = op(x)
    told = handed_over(y, op.weight)
    y.backward(dy)
    assert told == [accumulate == "main_grad"]
    torch.testing.assert_close(target, 1 + dy.t() @ x)


def test_gradients_that_go_nowhere_are_not_computed() -> None:
    recipe = Float8CurrentScaling(gemm="exact", fprop="bf16", dgrad="bf16")
    computed.clear()
    op = linear(torch.bfloat16, WEIGHT, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.ones(OUT, IN)
    ((x, dy), _) = batches(torch.bfloat16)
    x.requires_grad_()
    with opfuser.autocast(recipe=recipe):
        y = op(x)
    torch.autograd.grad(y, x, dy, retain_graph=True)
    assert not computed
    (dw,) = torch.autograd.grad(y, op.weight, dy, retain_graph=True)
    assert dw.dtype == torch.bfloat16
    assert steps_apart(dw, wide(WEIGHT, x.detach(), dy, CURRENT), torch.bfloat16) < 1
    assert torch.equal(op.weight.main_grad, torch.ones(OUT, IN))
    computed.clear()
    y.backward(dy)
    assert len(computed) == 1
    assert not torch.equal(op.weight.main_grad, torch.ones(OUT, IN))


def test_wide_weights_under_autocast_get_wide_gradients() -> None:
    """The GEMM writes the dtype of the weight, which its sums are not rounded below."""
    op = linear(torch.float32, WEIGHT)
    ((x, dy), _) = batches(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), opfuser.autocast(recipe=CURRENT):
        y = op(x)
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    assert op.weight.grad.dtype == torch.float32
    assert steps_apart(op.weight.grad, wide(WEIGHT, x, dy, CURRENT), torch.float32) < 64


EVERY = (
    *RECIPES,
    MXFP8BlockScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
)


@pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")
@pytest.mark.parametrize(
    ("recipe", "into", "kept"),
    [
        (recipe, into, bool((n + m) % 2))
        for n, recipe in enumerate(EVERY)
        for m, into in enumerate(("autograd", "grad", "main_grad"))
    ],
    ids=str,
)
def test_a_weight_that_is_stored_as_its_transpose(recipe: Recipe, into: str, kept: bool) -> None:
    """Values, gradients and scales are those of the weight itself, bit for bit."""
    multiple = recipe.multiple
    for features in ((IN, OUT), (3 * multiple, 5 * multiple), (multiple, multiple)):
        found = [three_steps(*features, recipe, into, kept, flag) for flag in (False, True)]
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)


def three_steps(
    columns: int, rows: int, recipe: Recipe, into: str, kept: bool, transposed: bool
) -> list[Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(rows, columns).bfloat16()
    op = opfuser.Linear(
        columns,
        rows,
        dtype=torch.bfloat16,
        weight_transposed=transposed,
        accumulate_into_grad=into == "grad",
        accumulate_into_main_grad=into == "main_grad",
    )
    op.weight = nn.Parameter(weight.t().contiguous() if transposed else weight)
    op.weight.main_grad = torch.zeros_like(op.weight, dtype=torch.float32)
    model, seen = opfuser.Sequential(opfuser.RMSNorm(columns, dtype=torch.bfloat16), op), []
    for _ in range(3):
        x = torch.randn(37, columns, dtype=torch.bfloat16, requires_grad=True)
        with opfuser.keep_quantized_weights() if kept else contextlib.nullcontext():
            with opfuser.autocast(recipe=recipe):
                y = model(x)
            y.square().sum().backward()
        grads = [op.weight.grad, op.weight.main_grad]
        seen += [y, x.grad, *[g.t() if transposed else g for g in grads]]
    assert model.last_plan.quantized == (1,)
    scales = [t for name, t in op.state_dict().items() if "quantization" in name]
    return [t.clone() for t in (*seen, *scales)]
