"""That what passes mypy --strict in user_code.py (``make check``) also works."""

from __future__ import annotations

import pytest

from opfuser.recipe import DelayedScaling
from tests.packaging import user_code

emulated = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")


def test_operations_and_fusions() -> None:
    user_code.checks()
    user_code.decorated()


def test_sequences_and_plans() -> None:
    user_code.channels().sum().backward()
    assert user_code.rotated().shape == (2, 5, 24)
    *steps, status = user_code.explained()
    assert steps[1] == "(1, 2) ForwardLinearBiasActivation"
    assert status == "unmatched"
    assert "norm_linear" in user_code.without_norm_linear()
    assert user_code.configured() == ["opfuser.fusion_config"] * 3


@emulated
@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["fp32", "fp8"])
def test_training(recipe: DelayedScaling | None) -> None:
    losses, quantized = user_code.train(recipe)
    assert sum(losses[-5:]) < sum(losses[:5]) / 3
    assert bool(quantized) == (recipe is not None)


def test_decoder() -> None:
    assert user_code.train_decoder().item() > 0
