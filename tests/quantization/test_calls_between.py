"""Calls between a forward pass and its backward pass change none of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import BasicLinear, GroupedLinear, Linear, Sequential
from opfuser.quantization.state import QuantizationState
from opfuser.recipe import DelayedScaling, Float8CurrentScaling, Float8PredictedScaling, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

ROWS, DIM = 7, 128
X = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
SMALL = X / 100
RECENT = DelayedScaling(amax_compute_algo="most_recent", amax_history_len=16)
RECIPES: dict[str, Recipe] = {
    "most recent": RECENT,
    "most recent of 1": DelayedScaling(amax_compute_algo="most_recent", amax_history_len=1),
    "max of 1": DelayedScaling(amax_history_len=1),
    "max": DelayedScaling(amax_history_len=16),
    "predicted": Float8PredictedScaling(margin=0),
    "current": Float8CurrentScaling(),
}


def swiglu() -> Sequential:
    up = Linear(DIM, 4 * DIM, bias=False)
    return Sequential(opfuser.RMSNorm(DIM), up, opfuser.SwiGLU(), Linear(2 * DIM, DIM))


def merged() -> Sequential:
    up = opfuser.MergedLinear(DIM, {"gate": 2 * DIM, "up": 2 * DIM}, bias=False)
    return Sequential(opfuser.RMSNorm(DIM), up, opfuser.SwiGLU(), Linear(2 * DIM, DIM))


def gpt() -> Sequential:
    ops = opfuser.LayerNorm(DIM), Linear(DIM, 2 * DIM), opfuser.GELU(), Linear(2 * DIM, DIM)
    return Sequential(opfuser.Residual(*ops))


def recomputing() -> Sequential:
    block = swiglu()
    block[2].recompute_mlp = True
    return block


def rounded_first() -> Sequential:
    return Sequential(opfuser.Quantize(backward=True), Linear(DIM, DIM), opfuser.ReLU(), linear())


def linear() -> BasicLinear:
    return BasicLinear(DIM, DIM)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Sequential(GroupedLinear(3, DIM, DIM), GroupedLinear(3, DIM, DIM))

    def forward(self, x: Tensor) -> Any:
        sizes = torch.tensor([4, 0, 3])
        return self.layers(x, sizes, sizes)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Sequential(linear()),
    "swiglu": swiglu,
    "merged": merged,
    "gpt": gpt,
    "recomputing": recomputing,
    "rounded first": rounded_first,
    "experts": Experts,
}
each_model = pytest.mark.parametrize("name", MODELS)
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def warm(make: Callable[[], nn.Module], recipe: Recipe) -> nn.Module:
    """A model after two steps."""
    torch.manual_seed(0)
    model = make()
    for _ in range(2):
        backward(*forward(model, X, recipe))
    model.zero_grad()
    return model


def forward(model: nn.Module, x: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Input and output of a call in an outermost region, which updates scales."""
    x = x.clone().requires_grad_()
    with opfuser.autocast(recipe=recipe):
        return x, model(x)


def backward(x: Tensor, y: Tensor) -> None:
    y.backward(X)


def grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return [g for g in found if g is not None]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def states(model: nn.Module) -> list[QuantizationState]:
    children = [m for op in model.modules() for m in op.children()]
    return [m for m in children if isinstance(m, QuantizationState)]


@each_recipe
def test_gradients_are_those_of_float64(recipe: Recipe) -> None:
    """Up to what E4M3 and E5M2 round; values that are cut off were wrong by all their size."""
    model = warm(lambda: Sequential(linear(), opfuser.GELU(), linear()), recipe)
    x, y = forward(model, X, recipe)
    with torch.no_grad():  # a validation step
        for _ in range(2):
            forward(model, SMALL, recipe)
    backward(x, y)
    exact = [t.detach().double().requires_grad_() for t in (X, *model.parameters())]
    own, up, down = exact
    (torch.nn.functional.gelu(own @ up.t()) @ down.t()).backward(X.double())
    for ours, theirs in zip(grads(model, x), exact, strict=True):
        assert ((ours - theirs.grad).norm() / theirs.grad.norm()).item() < 0.1


@each_model
def test_whatever_becomes_of_the_scales(name: str) -> None:
    """Also those of weights, which calls alone hardly move; those of gradients are followed."""
    found = []
    for between in (False, True):
        model = warm(MODELS[name], RECENT)
        x, y = forward(model, X, RECENT)
        if between:
            for state in states(model):
                state.scale[:2] *= 100
        backward(x, y)
        found.append(grads(model, x))
    assert_same(*found)
    model = warm(MODELS[name], RECENT)
    x, y = forward(model, X, RECENT)
    for state in states(model):
        state.scale[2] *= 1e5
    backward(x, y)
    assert not torch.equal(grads(model, x)[1], found[0][1])


HOWS: list[dict[str, Any]] = [{"save_activations": "fp8"}, {"wgrad": "bf16"}, {"dgrad": "bf16"}]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_two_backward_passes_of_a_forward(how: dict[str, Any]) -> None:
    recipe = DelayedScaling(**how)
    model = warm(swiglu, recipe)
    x, y = forward(model, X, recipe)
    y.backward(X, retain_graph=True)
    first, x.grad = [t.clone() for t in grads(model, x)], None
    for state in states(model):
        state.scale[:2] *= 100
    backward(x, y)
    assert_same(grads(model, x), first)


def in_order(model: nn.Module, recipe: Recipe, passes: str) -> dict[str, list[Tensor]]:
    """The gradients of each call, from passes like ``"F1 F2 B1 B2"``; the second input is small."""
    inputs = {"1": X, "2": SMALL, "3": -X}
    called: dict[str, tuple[Tensor, Tensor]] = {}
    found = {}
    for what, number in passes.split():
        if what == "F":
            called[number] = forward(model, inputs[number], recipe)
        else:
            backward(*called[number])
            found[number] = grads(model, called[number][0])
    return found


@pytest.mark.parametrize("name", ["swiglu", "gpt", "experts"])
@pytest.mark.parametrize("key", ["most recent", "max of 1", "max", "predicted"])
def test_the_order_of_a_pipeline(name: str, key: str) -> None:
    """Gradients are rounded with scales that no forward pass changes, nor a backward pass at once.

    So each call is as if the others' backward passes, and later forward passes, were not there.
    """
    recipe = RECIPES[key]
    found = in_order(warm(MODELS[name], recipe), recipe, "F1 F2 F3 B1 B2 B3")
    for number, passes in ("1", "F1 B1"), ("2", "F1 F2 B2"), ("3", "F1 F2 F3 B3"):
        alone = in_order(warm(MODELS[name], recipe), recipe, passes)
        assert_same(found[number], alone[number])


@pytest.mark.parametrize("fprop", ["fp8", "bf16"])
def test_values_are_counted_once(fprop: Any) -> None:
    """By forward, or by backward if that alone rounds them: not as those of calls between."""
    recipe = DelayedScaling(amax_history_len=1, fprop=fprop)
    model = warm(swiglu, recipe)
    x, y = forward(model, X, recipe)
    with torch.no_grad():
        forward(model, SMALL, recipe)
    before = [state.amax.clone() for state in states(model)]
    backward(x, y)
    for then, state in zip(before, states(model)):
        raised = state.amax > then
        assert raised.tolist() == ([False, False, True] if fprop == "fp8" else [True] * 3)


def test_a_first_call_that_overflows_has_no_finite_gradient() -> None:
    """Its scale is NaN, that of the calls to come is not."""
    model = Sequential(opfuser.ReLU(), BasicLinear(DIM, DIM))
    bad = X.clone()
    bad[1, 2] = float("inf")
    for x, finite in ((bad, False), (X, True)):
        backward(*forward(model, x, RECENT))
        assert model[1].weight.grad.isfinite().all() == finite
        model.zero_grad()


@each_model
def test_records_of_both_passes_have_one_scale(name: str) -> None:
    """While codes are watched, other code makes them."""
    recipe = Float8PredictedScaling(margin=3)  # the first call has no margin, others have
    torch.manual_seed(0)
    model = MODELS[name]()
    with opfuser.watch_quantization(model) as records:
        x, y = forward(model, X, recipe)
        before = len(records)
        with opfuser.autocast(recipe=recipe):
            backward(x, y)
    scales = {(r.operation, r.role, r.amax, r.scale) for r in records if r.role != "grad_output"}
    assert len({key[:3] for key in scales}) == len(scales)
    again = [r for r in records[before:] if r.role != "grad_output"]
    assert again
