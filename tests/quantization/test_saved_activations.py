"""Inputs of activations that are saved for backward as codes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser.quantization.operation_state import state_of
from opfuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from tests.basic.values import saved_by
from tests.quantization.test_values import each_recipe, error, results

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

CURRENT = Float8CurrentScaling()
SAVES = Float8CurrentScaling(save_activations="fp8")


def gated(dtype: torch.dtype = torch.float32, interleave: int | None = None) -> Any:
    return opfuser.Residual(
        opfuser.RMSNorm(128, dtype=dtype),
        opfuser.Linear(128, 1024, bias=False, dtype=dtype),
        opfuser.SwiGLU(glu_interleave_size=interleave),
        opfuser.Linear(512, 128, bias=False, dtype=dtype),
    )


def plain(dtype: torch.dtype = torch.float32) -> Any:
    return opfuser.Residual(
        opfuser.LayerNorm(128, dtype=dtype),
        opfuser.Linear(128, 512, dtype=dtype),
        opfuser.GELU(),
        opfuser.Linear(512, 128, dtype=dtype),
    )


def in_blocks(dtype: torch.dtype = torch.float32) -> Any:
    return gated(dtype, 128)


BLOCKS: dict[str, Callable[..., Any]] = {"gated": gated, "plain": plain, "in blocks": in_blocks}
each_block = pytest.mark.parametrize("name", BLOCKS)


def saving(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, save_activations="fp8")


def saved(model: Any, x: Tensor, recipe: Recipe) -> list[Tensor]:
    """What is held for backward besides parameters."""
    with opfuser.autocast(recipe=recipe):
        held = saved_by(lambda: model(x))
    parameters = {p.data_ptr() for p in model.parameters()}
    return [t for t in held if t.data_ptr() not in parameters]


def size(tensors: list[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def edges(model: Any) -> list[str]:
    return [str(e) for e in model.last_plan.edges if e.stage == "joint"]


@each_recipe
@each_block
def test_one_byte_for_each_element(recipe: Recipe, name: str) -> None:
    """And a scale of four for each 128 of a row, with rows of padding."""
    torch.manual_seed(0)
    model = BLOCKS[name](torch.bfloat16)
    x = torch.randn(256, 128, dtype=torch.bfloat16, requires_grad=True)
    before, after = saved(model, x, recipe), saved(model, x, saving(recipe))
    width = 512 if name == "plain" else 1024
    assert size(before) - size(after) == 256 * width * 2 - 256 * (width + 4 * width // 128)
    assert size(after) <= 0.66 * size(before)
    assert [t.shape for t in before].count((256, width)) == 1
    assert [(t.dtype, t.shape) for t in after].count((torch.float8_e4m3fn, (256, width))) == 1


@each_recipe
@each_block
def test_a_block_is_as_close_as_its_format(recipe: Recipe, name: str) -> None:
    torch.manual_seed(1)
    model = BLOCKS[name]()
    x, dy = torch.randn(3, 43, 128, requires_grad=True), torch.randn(3, 43, 128)
    double, own = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    exact = results(double, own, [*double.parameters()], dy.double())
    for _ in range(2):  # the second call has the scales of the first
        with opfuser.autocast(recipe=saving(recipe)):
            got = results(model, x, [*model.parameters()], dy)
    assert len(edges(model)) == 1
    for result, true in zip(got, exact, strict=True):
        assert error(result, true) < 0.125


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_recipe
@each_block
def test_forward_computes_from_what_is_not_rounded(
    recipe: Recipe, name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = BLOCKS[name](dtype)
    twin, dy = copy.deepcopy(model), torch.randn(4, 5, 128, dtype=dtype)
    for _ in range(2):
        x = torch.randn(4, 5, 128, dtype=dtype)
        found = []
        for one, how in ((model, recipe), (twin, saving(recipe))):
            with opfuser.autocast(recipe=how):
                found.append(results(one, x.clone().requires_grad_(), [*one.parameters()], dy))
        (y, *grads), (own_y, *own_grads) = found
        assert torch.equal(y, own_y)
        assert any(not torch.equal(own, grad) for own, grad in zip(own_grads, grads))


def values_of_codes(x: Tensor) -> Tensor:
    """E4M3, where the largest of 128 neighbors is the largest value, 448."""
    blocks = x.double().unflatten(-1, (-1, 128))
    scale = 448 / blocks.abs().amax(-1, keepdim=True).float()
    codes = (blocks.float() * scale).to(torch.float8_e4m3fn)
    return (codes.double() / scale.double()).flatten(-2)


def activation(name: str) -> Any:
    if name == "plain":
        return opfuser.Sequential(opfuser.Bias(512), opfuser.GELU(), opfuser.Linear(512, 128))
    size = 128 if name == "in blocks" else None
    return opfuser.Sequential(
        opfuser.SwiGLU(glu_interleave_size=size), opfuser.Linear(512, 128, bias=False)
    )


@pytest.mark.parametrize("parameters", [True, False])
@each_recipe
@each_block
def test_backward_computes_from_the_values_of_the_codes(
    recipe: Recipe, name: str, parameters: bool
) -> None:
    """Exactly, where its GEMMs are in high precision; without gradients of parameters, h is not
    recomputed."""
    torch.manual_seed(0)
    model, width = activation(name), 512 if name == "plain" else 1024
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0, 0.1).requires_grad_(parameters)
    x, dy = torch.randn(3, 43, width, requires_grad=True), torch.randn(3, 43, 128)
    double = copy.deepcopy(model).double()
    rounded = values_of_codes(x.detach()).requires_grad_()
    wanted = [*model.parameters()] if parameters else []
    exact = results(double, rounded, [*double.parameters()] if parameters else [], dy.double())
    how: Any = {"dgrad": "bf16", "wgrad": "bf16", "save_activations": "fp8"}
    with opfuser.autocast(recipe=dataclasses.replace(recipe, **how)):
        got = results(model, x, wanted, dy)
    assert len(edges(model)) == 1
    for result, true in zip(got[1:], exact[1:], strict=True):
        assert error(result, true) < 1e-5


@each_recipe
@each_block
def test_a_second_backward(recipe: Recipe, name: str) -> None:
    """From the same codes, which the first one leaves as they are."""
    torch.manual_seed(0)
    model = BLOCKS[name](torch.bfloat16)
    x = torch.randn(130, 128, dtype=torch.bfloat16, requires_grad=True)
    wanted, dy = [x, *model.parameters()], torch.randn(130, 128, dtype=torch.bfloat16)
    for how in ({}, {"dgrad": "bf16", "wgrad": "bf16"}):
        with opfuser.autocast(recipe=dataclasses.replace(saving(recipe), **how)):
            y = model(x)
        first = torch.autograd.grad(y, wanted, dy, retain_graph=True)
        for one, other in zip(first, torch.autograd.grad(y, wanted, dy), strict=True):
            assert torch.equal(one, other)


def test_under_autocast() -> None:
    """Gradients have the dtype of what forward was given."""
    torch.manual_seed(0)
    model = gated()
    x = torch.randn(5, 128, requires_grad=True)
    grads = []
    for recipe in (CURRENT, SAVES):
        with torch.autocast("cpu", torch.bfloat16), opfuser.autocast(recipe=recipe):
            y = model(x)
        grads.append(torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y)))
    for one, other in zip(*grads, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert error(other, one.double()) < 0.125


def test_no_rows() -> None:
    for recipe in (SAVES, Float8BlockScaling(save_activations="fp8")):
        model, x = gated(), torch.empty(0, 128, requires_grad=True)
        with opfuser.autocast(recipe=recipe):
            got = results(model, x, [*model.parameters()], torch.empty(0, 128))
        assert got[1].shape == (0, 128)
        assert all((grad == 0).all() for grad in got[2:])


def test_watching_changes_nothing() -> None:
    """Then the operation behind quantizes for itself."""
    torch.manual_seed(0)
    model, x = gated(), torch.randn(5, 128, requires_grad=True)
    dy = torch.randn(5, 128)
    found = []
    for watched in (False, True):
        watch: Any = opfuser.watch_quantization() if watched else contextlib.nullcontext()
        with watch, opfuser.autocast(recipe=SAVES):
            found.append(results(model, x, [*model.parameters()], dy))
    for one, other in zip(*found, strict=True):
        assert error(other, one.double()) < 1e-5


def test_an_activation_asks_for_itself() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 128, requires_grad=True)
    for make, kind in ((gated, opfuser.SwiGLU), (plain, opfuser.GELU)):
        model = make()
        asks = copy.deepcopy(model)
        (at,) = [n for n, op in enumerate(asks) if type(op) is kind]
        asks[at] = kind(cache_quantized_input=True)
        assert size(saved(asks, x, CURRENT)) == size(saved(model, x, SAVES))
        assert edges(asks) == edges(model) != []
        asks[at].cache_quantized_input = False
        assert size(saved(asks, x, CURRENT)) == size(saved(model, x, CURRENT))
        assert edges(asks) == edges(model) == []


def test_the_plan_says_what_is_saved_so() -> None:
    model, x = gated(), torch.randn(5, 128, requires_grad=True)
    with opfuser.autocast(recipe=SAVES):
        text = str(model.plan(x))
        assert "\n  saved input of 3: float8_e4m3fn by rows\n" in text
        with torch.no_grad():
            assert "saved input" not in str(model.plan(x))
    with opfuser.autocast(recipe=CURRENT):
        assert "saved input" not in str(model.plan(x))


def other_features(width: int, interleave: int | None = None) -> Any:
    return opfuser.Sequential(
        opfuser.Linear(64, 2 * width, bias=False),
        opfuser.SwiGLU(glu_interleave_size=interleave, cache_quantized_input=True),
        opfuser.Linear(width, 64, bias=False),
    )


def in_high_precision() -> Any:
    model = other_features(128)
    model[2].recipe = None
    return model


def at_the_end() -> Any:
    linear = opfuser.Linear(64, 256)
    return opfuser.Sequential(linear, opfuser.SwiGLU(cache_quantized_input=True))


def recomputed() -> Any:
    model = gated()
    (activation,) = (op for op in model if type(op) is opfuser.SwiGLU)
    activation.recompute_mlp = True
    return model


OTHERS: dict[str, tuple[Callable[[], Any], int]] = {
    "half a block": (lambda: other_features(64), 64),
    "a block and a half": (lambda: other_features(192), 64),
    "narrow blocks of gates": (lambda: other_features(128, 32), 64),
    "the operation behind is in high precision": (in_high_precision, 64),
    "no operation behind": (at_the_end, 64),
    "recomputed": (recomputed, 128),
}


@pytest.mark.parametrize("name", OTHERS)
def test_elsewhere_it_has_no_effect(name: str) -> None:
    torch.manual_seed(0)
    make, width = OTHERS[name]
    model, x = make(), torch.randn(256, width, requires_grad=True)
    assert [(t.dtype, t.shape) for t in saved(model, x, SAVES)] == [
        (t.dtype, t.shape) for t in saved(model, x, CURRENT)
    ]
    assert edges(model) == []


@pytest.mark.parametrize("fused", [True, False])
def test_without_a_region_or_a_fusion_it_has_no_effect(fused: bool) -> None:
    torch.manual_seed(0)
    model, x = other_features(128), torch.randn(256, 64, requires_grad=True)
    off = () if fused else ("activation_linear",)
    with opfuser.disable(*off), opfuser.autocast(enabled=not fused, recipe=SAVES):
        y = model(x)
        assert model.last_plan.fused("forward").get("activation_linear", 0) == fused
        assert edges(model) == []
    y.sum().backward()
    assert x.grad is not None


def test_checkpoints_save_the_same_again() -> None:
    torch.manual_seed(0)
    model, dy = gated(), torch.randn(5, 128)
    x = torch.randn(5, 128, requires_grad=True)
    with opfuser.autocast(recipe=SAVES):
        want = results(model, x, [*model.parameters()], dy)

        def again(x: Tensor) -> Tensor:
            return checkpoint(model, x, use_reentrant=False)

        got = results(again, x, [*model.parameters()], dy)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fprop", ["fp8", "bf16"])
@pytest.mark.parametrize("name", ["gated", "plain", "recomputed"])
def test_the_pass_that_first_quantizes_a_tensor_sees_its_largest_value(
    name: str, fprop: Any
) -> None:
    """The second one may make it from values of codes, and would change the next call's scale."""
    torch.manual_seed(0)
    model = recomputed() if name == "recomputed" else BLOCKS[name]()
    recipe = DelayedScaling(fprop=fprop, save_activations="fp8")
    x = torch.randn(130, 128, requires_grad=True)
    with opfuser.autocast(recipe=recipe):
        y = model(x)
    *_, last = (op for op in model if type(op) is opfuser.Linear)
    seen = state_of(last.basic_ops[0], recipe, None).amax_seen("input")
    before = seen.item()
    y.sum().backward()
    assert (before == 0) == (fprop == "bf16")
    assert seen.item() > 0
    if before:
        assert seen.item() == before
