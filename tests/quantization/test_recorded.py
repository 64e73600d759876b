"""Calls with a recipe whose passes were recorded: the same bits, the same scales."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser import gemm_providers
from opfuser.engine.recorded.recordable import unrecorded
from opfuser.gemm_providers import GemmOperand, GemmProvider
from opfuser.optim import MasterWeights
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PredictedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")

DELAYED = DelayedScaling(amax_history_len=2)
RECIPES: dict[str, Recipe] = {
    "delayed": DELAYED,
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
    "MXFP8": MXFP8BlockScaling(),
    "NVFP4": NVFP4BlockScaling(),
}
EVERY = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
STATEFUL = pytest.mark.parametrize(
    "recipe", [DELAYED, Float8PredictedScaling()], ids=["delayed", "predicted"]
)


def linear() -> opfuser.Sequential:
    return opfuser.Sequential(opfuser.Linear(128, 256))


def swiglu() -> opfuser.Sequential:
    return opfuser.Sequential(
        opfuser.RMSNorm(128),
        opfuser.Linear(128, 512, bias=False),
        opfuser.SwiGLU(),
        opfuser.Linear(256, 128),
    )


def merged() -> opfuser.Sequential:
    return opfuser.Sequential(
        opfuser.MergedLinear(128, {"gate": 256, "up": 256}),
        opfuser.SwiGLU(),
        opfuser.Linear(256, 128, bias=False),
    )


def rounding() -> opfuser.Sequential:
    return opfuser.Sequential(
        opfuser.Quantize(forward=True, backward=True), opfuser.Linear(128, 128), opfuser.GELU()
    )


class Pair:
    """A model, and another one like it whose calls are never recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.other = copy.deepcopy(model)

    def both(self, call: Callable[[nn.Module], Tensor], seed: int = 0) -> None:
        """Calls both, and compares what they return, gradients, and all that they keep."""
        results = []
        for model in self.model, self.other:
            with unrecorded() if model is self.other else nullcontext():
                torch.manual_seed(seed)
                result = call(model)
            # At once: whichever region is opened next updates the scales of both.
            results.append([result, grads(model), copy.deepcopy(model.state_dict())])
        for row in zip(*results):
            assert_equal(*row)


def grads(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def assert_equal(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def recorded(model: Any, name: str = "backward") -> int:
    """How many passes of that name were recorded of calls like the last one."""
    return model.last_plan.recorded.count(f"def {name}(")


def x_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 128, generator=generator) * 3.0 ** (step % 4)


def train(recipe: Recipe | None, step: int) -> Callable[[nn.Module], Tensor]:
    """A step on values of their own; returns output and the gradient of the input."""

    def call(model: nn.Module) -> Tensor:
        x = x_of(step).requires_grad_()
        with opfuser.autocast(recipe is not None, recipe=recipe):
            y: Tensor = model(x)
        y.square().sum().backward()
        return torch.cat([y.detach().flatten(), x.grad.flatten()])

    return call


@pytest.mark.parametrize(
    ("name", "make"),
    [*((name, swiglu) for name in RECIPES), *zip(RECIPES, [merged, rounding, linear] * 2)],
)
def test_steps_whose_values_change(name: str, make: Callable[[], opfuser.Sequential]) -> None:
    """Each has a recipe of its own, equal to the others'."""
    pair = Pair(make())
    for step in range(8):
        pair.both(train(copy.copy(RECIPES[name]), step))
        if step == 4:
            scales = copy.deepcopy(pair.model.state_dict())
    assert recorded(pair.model, "forward") == recorded(pair.model) == 1
    assert not recorded(pair.other, "forward")
    moved = [
        not torch.equal(t, scales[name])
        for name, t in pair.model.state_dict().items()
        if name.endswith("quantization.scale")
    ]
    assert all(moved)


VARIANTS: list[dict[str, Any]] = [{"save_activations": "fp8"}, {"wgrad": "bf16"}]


@pytest.mark.parametrize(
    "recipe",
    [
        *(type(recipe)(**how) for recipe in RECIPES.values() for how in VARIANTS),
        DelayedScaling(fprop="bf16", amax_history_len=1),  # only backward quantizes
    ],
    ids=str,
)
def test_variants_of_recipes(recipe: Recipe) -> None:
    """Of a region, and of the sequence itself."""
    own = recipe.wgrad == "bf16"
    pair = Pair(opfuser.Sequential(*swiglu(), recipe=recipe if own else None))
    for step in range(6):
        pair.both(train(None if own else recipe, step))
    assert recorded(pair.model)


@STATEFUL
def test_alternating_recipes(recipe: Recipe) -> None:
    """Each change adapts the scales, which no recorded call does."""
    pair = Pair(swiglu())
    others = [recipe, DelayedScaling(margin=2, amax_history_len=2), Float8CurrentScaling()]
    for step in range(24):
        pair.both(train(others[step // 4 % 3], step))
    assert recorded(pair.model)
    for step in range(9):
        pair.both(train(others[step % 3], step))


@STATEFUL
def test_another_recipe_between_a_forward_and_its_backward(recipe: Recipe) -> None:
    pair = Pair(swiglu())
    for step in range(6):
        pair.both(train(recipe, step))

    def call(model: nn.Module) -> Tensor:
        model.zero_grad()
        with opfuser.autocast(recipe=recipe):
            y = model(x_of(1))
        with opfuser.autocast(recipe=DelayedScaling(margin=3)):
            z = model(x_of(2))
        y.square().sum().backward()
        z.square().sum().backward()
        return torch.cat([y, z]).detach()

    for step in range(3):
        pair.both(call)
        pair.both(train(recipe, step))


@EVERY
def test_passes_in_another_order_and_again(recipe: Recipe) -> None:
    pair = Pair(swiglu())

    def call(model: nn.Module) -> Tensor:
        model.zero_grad()
        ys = []
        for step in range(3):
            with opfuser.autocast(recipe=recipe):
                ys.append(model(x_of(step)))
            with torch.no_grad(), opfuser.autocast(recipe=recipe):
                model(x_of(step) / 100)
        for y, again in itertools.product(ys, (True, False)):
            y.square().sum().backward(retain_graph=again)
        return torch.cat(ys).detach()

    for _ in range(5):
        pair.both(call)
    with opfuser.autocast(recipe=recipe):
        pair.model(x_of(0))
    assert recorded(pair.model)


@EVERY
def test_training_and_evaluation(recipe: Recipe) -> None:
    pair = Pair(swiglu())

    def evaluate(model: nn.Module) -> Tensor:
        model.eval()
        with torch.inference_mode(), opfuser.autocast(recipe=recipe):
            y = model(x_of(7)).clone()
        with torch.no_grad(), opfuser.autocast(recipe=recipe):
            y = y + model(x_of(8))
        model.train()
        return y

    pair.both(evaluate)
    for step in range(6):
        pair.both(train(recipe, step))
        pair.both(evaluate)


@STATEFUL
def test_evaluation_before_any_backward(recipe: Recipe) -> None:
    """The scale of gradients is learned after passes were recorded."""
    pair = Pair(swiglu())

    def forward(model: nn.Module) -> Tensor:
        with opfuser.autocast(recipe=recipe):
            return model(x_of(7).requires_grad_()).detach()

    for _ in range(4):
        pair.both(forward)
    for step in range(6):
        pair.both(train(recipe, step))
        pair.both(forward)
    assert recorded(pair.model)


@EVERY
def test_weights_that_are_quantized_once(recipe: Recipe) -> None:
    pair = Pair(swiglu())

    def call(model: nn.Module) -> Tensor:
        model.zero_grad()
        ys = []
        with opfuser.keep_quantized_weights():
            for step in range(3):
                with opfuser.autocast(recipe=recipe):
                    ys.append(model(x_of(step)))
                ys[-1].square().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(1e-4 * p.grad)
        return torch.cat(ys).detach()

    for step in range(6):
        pair.both(call)
        pair.both(train(recipe, step))
    with opfuser.keep_quantized_weights():
        for _ in range(3):
            train(recipe, 1)(pair.model)
        with torch.no_grad():
            pair.model[1].weight.mul_(2)
        with pytest.raises(opfuser.errors.QuantizedWeightError):
            train(recipe, 1)(pair.model)
    train(recipe, 1)(pair.model)


@EVERY
def test_a_region_without_quantized_compute(recipe: Recipe) -> None:
    pair = Pair(swiglu())

    def call(model: nn.Module) -> Tensor:
        x = x_of(1)
        with opfuser.autocast(recipe=recipe):
            y = model(x)
            with opfuser.autocast(enabled=False):
                z = model(x)
        (y.square().sum() + z.square().sum()).backward()
        return torch.cat([y, z]).detach()

    for _ in range(6):
        pair.both(call)
    assert recorded(pair.model)
    with opfuser.autocast(recipe=recipe):
        pair.model(x_of(1))
    assert recorded(pair.model)


@EVERY
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(recipe: Recipe, reentrant: bool) -> None:
    """Among calls outside of any, while forward passes of checkpoints wait for theirs."""
    pair = Pair(nn.Sequential(swiglu(), swiglu()))

    def call(model: nn.Module) -> Tensor:
        first, second = model.children()
        model.zero_grad()
        x = x_of(1).requires_grad_()
        with opfuser.autocast(recipe=recipe):
            y = checkpoint(first, x, use_reentrant=reentrant)
            y = second(y)
            z = first(x / 8)
            z = checkpoint(second, z, use_reentrant=reentrant)
        with opfuser.autocast(recipe=recipe):
            pass  # scales change before anything is computed again
        (y.square().sum() + z.square().sum()).backward()
        return torch.cat([y.detach(), x.grad])

    for _ in range(6):
        pair.both(call)
    if isinstance(recipe, (DelayedScaling, Float8PredictedScaling)):
        return
    assert recorded(pair.model[0])


def replace_scales(linear: opfuser.Linear, how: str) -> None:
    own = linear.quantization
    values = {name: t.clone() * 2**5 for name, t in own.state_dict().items()}
    if how == "partly loaded":  # the scale of gradients is learned again
        values["scale"][2] = 1
        values["amax"][2] = values["amax_history"][:, 2] = 0
    if how in ("assigned", "loaded", "partly loaded"):
        own.load_state_dict(values, assign=how == "assigned")
    elif how == "moved":
        for t in own.buffers():
            t.data = t.data * 2**5
    elif how == "emptied":
        own.to_empty(device="meta")
        own.to_empty(device="cpu")
    for op in (linear, *linear.basic_ops):
        if how == "reset" and op is not linear:
            op.reset_recipe_state()
        elif how == "deleted":
            op._modules.pop("quantization", None)


@STATEFUL
@pytest.mark.parametrize(
    "how", ["assigned", "loaded", "partly loaded", "moved", "emptied", "reset", "deleted"]
)
def test_scales_that_are_replaced(recipe: Recipe, how: str) -> None:
    pair = Pair(swiglu())
    for step in range(19):
        pair.both(train(recipe, step))
        if step in (4, 8, 12, 16):
            replace_scales(pair.model[1], how)
            replace_scales(pair.other[1], how)
    assert recorded(pair.model)


@EVERY
def test_quantized_tensors_are_told(recipe: Recipe) -> None:
    pair = Pair(swiglu())
    told: dict[nn.Module, list[Any]] = {}

    def call(model: nn.Module) -> Tensor:
        model.zero_grad()
        own = told[model] = []
        with opfuser.autocast(recipe=recipe):
            y = model(x_of(1).requires_grad_())  # as in the steps before, which were recorded
        with opfuser.watch_quantization(model, own.append):
            y.square().sum().backward()
        with opfuser.watch_quantization(model, own.append), opfuser.autocast(recipe=recipe):
            z = model(x_of(2).requires_grad_())
        z.square().sum().backward()
        return torch.cat([y, z]).detach()

    for step in range(4):
        pair.both(train(recipe, step))
    for _ in range(4):
        pair.both(call)
        assert told[pair.model]
        assert told[pair.model] == told[pair.other]


@pytest.mark.parametrize("recipe", list(RECIPES.values())[:3], ids=list(RECIPES)[:3])
def test_weights_stored_in_fp8(recipe: Recipe) -> None:
    with opfuser.quantized_model_init(recipe=recipe):
        pair = Pair(swiglu())
    optimizers: dict[nn.Module, MasterWeights] = {}

    def call(model: nn.Module) -> Tensor:
        if model not in optimizers:
            optimizers[model] = MasterWeights(model, torch.optim.SGD, lr=1e-3)
        with opfuser.autocast(recipe=recipe):
            y = model(x_of(1))
        optimizers[model].zero_grad()
        y.square().sum().backward()
        optimizers[model].step()
        return y.detach()

    for _ in range(8):
        pair.both(call)
    assert recorded(pair.model)


def test_gradients_of_stored_weights_that_would_be_rounded() -> None:
    with opfuser.quantized_model_init(recipe=DELAYED):
        model = swiglu()
    for step in range(5):
        train(DELAYED, step)(model)
    assert recorded(model)
    model.zero_grad()
    model[1].weight.grad_dtype = torch.float8_e4m3fn
    with pytest.raises(opfuser.errors.ArgumentError, match="is not rounded to FP8"):
        train(DELAYED, 1)(model)


def test_products_of_others_are_not_recorded() -> None:
    def multiply(a: GemmOperand, b: GemmOperand, dtype: torch.dtype, split: bool) -> Tensor:
        count.append(1)
        return torch.zeros(len(a.codes), len(b.codes), dtype=dtype)

    count: list[int] = []
    gemm_providers.register(GemmProvider("another", lambda gemm: None, multiply))
    model = swiglu()
    for step in range(5):
        train(Float8CurrentScaling(gemm="another"), step)(model)
    assert len(count) == 5 * 6
    assert not recorded(model, "forward")


def own_calls(step: Callable[[], object]) -> int:
    """Calls of functions of the library, but for those that were recorded."""
    count, folder = 0, str(Path(opfuser.__file__).parent)

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(folder)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return count


@EVERY
def test_calls_of_python_functions(recipe: Recipe) -> None:
    """A region and its scales cost a few more, whatever is computed in it."""

    def calls(recipe: Recipe | None) -> int:
        model, x = swiglu(), x_of(1)

        def step() -> None:
            with opfuser.autocast(recipe=recipe) if recipe is not None else nullcontext():
                y = model(x)
            y.sum().backward()

        for _ in range(5):
            step()
        return own_calls(step)

    gc.collect()  # other states would be updated, too
    assert calls(recipe) <= calls(None) + 50


@STATEFUL
def test_groups_of_ranks(recipe: Recipe) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = [dist.group.WORLD, dist.new_group([0]), None]
        pair = Pair(swiglu())

        def call(model: nn.Module, step: int) -> Tensor:
            group = groups[step // 5 % 3]
            with opfuser.autocast(recipe=recipe, amax_reduction_group=group):
                y = model(x_of(step))
            y.square().sum().backward()
            return y.detach()

        for step in range(20):
            pair.both(lambda model, step=step: call(model, step))
        assert recorded(pair.model)
    finally:
        dist.destroy_process_group()
