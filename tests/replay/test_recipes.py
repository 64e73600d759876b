"""Calls with a recipe of quantized compute, whose scales follow replayed calls too."""

from __future__ import annotations

import copy

import pytest
import torch

import opfuser
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
from tests.replay.models import assert_same_grads, code, count, twin

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
    "delayed that saves codes": DelayedScaling(save_activations="fp8"),
    "MXFP8": MXFP8BlockScaling(),
    "NVFP4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "blocks that save codes": Float8BlockScaling(save_activations="fp8"),
}


@pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")
@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("name", RECIPES)
def test_quantized_calls(name: str, device: torch.device) -> None:
    recipe = RECIPES[name]
    model = opfuser.Sequential(
        opfuser.Linear(128, 256), opfuser.SwiGLU(), opfuser.Linear(128, 128)
    ).to(device)
    other = twin(model)
    for step in range(8):
        x = torch.randn(5, 128, device=device) * 2**step
        for m in (model, other):
            with opfuser.autocast(recipe=recipe):
                y = m(x)
            y.square().sum().backward()
        assert_same_grads(model, other)
    assert code(model) == ""
    assert count(model) >= 5


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=1), Float8PredictedScaling()])
def test_calls_between_a_forward_and_its_backward(recipe: Recipe, device: torch.device) -> None:
    """A recorded forward leaves its scales to its backward, also where others are replayed next."""
    model = opfuser.Sequential(
        opfuser.RMSNorm(128), opfuser.Linear(128, 256), opfuser.SwiGLU(), opfuser.Linear(128, 128)
    ).to(device)
    other = twin(model)
    x = torch.randn(5, 128, device=device)

    def forward(m: opfuser.Sequential, x: torch.Tensor) -> torch.Tensor:
        with opfuser.autocast(recipe=recipe):
            y: torch.Tensor = m(x)
        return y

    for step in range(6):
        for m in (model, other):
            m.zero_grad()
            y, last = forward(m, x), step == 5
            if not last or m is model:
                z = forward(m, x / 100)
                with torch.no_grad():
                    forward(m, x / 100)
            y.square().sum().backward()
            if not last:
                z.square().sum().backward()
    assert_same_grads(model, other)
    assert code(model) == ""
    assert count(model) >= 4


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize(
    "recipe", list(RECIPES.values())[:4], ids=lambda recipe: type(recipe).__name__
)
def test_weights_stored_in_fp8(recipe: Recipe, device: torch.device) -> None:
    """Steps write codes and scales in place, where recorded launches read them."""
    with opfuser.quantized_model_init(recipe=recipe):
        model = opfuser.Sequential(
            opfuser.Linear(128, 256, device=device),
            opfuser.SwiGLU(),
            opfuser.Linear(128, 128, device=device),
        )
    other = copy.deepcopy(model)
    other.replay = "off"
    losses = []
    for m in (model, other):
        torch.manual_seed(0)
        optimizer = MasterWeights(m, torch.optim.SGD, lr=2e-3)
        losses.append([])
        x = torch.randn(5, 128, device=device)
        for _ in range(8):
            with opfuser.autocast(recipe=recipe):
                loss = m(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert code(model) == ""
    assert count(model) >= 4


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("how", ["assigned", "moved"])
def test_scales_that_are_replaced_are_noticed(how: str, device: torch.device) -> None:
    recipe = DelayedScaling(amax_history_len=2)
    model = opfuser.Sequential(opfuser.Linear(128, 128), opfuser.GELU()).to(device)
    other = twin(model)
    for step in range(10):
        x = torch.randn(5, 128, device=device)
        for m in (model, other):
            with opfuser.autocast(recipe=recipe):
                y = m(x)
            y.square().sum().backward()
            own = m[0].quantization
            if step == 5 and how == "assigned":
                values = {name: t * 2**5 for name, t in own.state_dict().items()}
                own.load_state_dict(values, assign=True)
            elif step == 5:
                for t in own.buffers():
                    t.data = t.data * 2**5
        assert_same_grads(model, other)
        with opfuser.autocast(recipe=recipe):
            pass  # what was seen enters both
        torch.testing.assert_close(
            model[0].quantization.state_dict(), other[0].quantization.state_dict(), rtol=0, atol=0
        )
    assert count(model) >= 5
