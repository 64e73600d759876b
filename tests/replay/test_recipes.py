"""Calls with a recipe of quantised compute, whose scales follow replayed calls too."""

from __future__ import annotations

import pytest
import torch

import opfuser
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

RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(),
    Float8PredictedScaling(),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
)


@pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")
@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_quantised_calls(recipe: Recipe, device: torch.device) -> None:
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
