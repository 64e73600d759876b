"""Training in FP8 follows training without: whole models on real text, emulated on a CPU."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import opfuser
from examples.lm_data import load_corpus, training_batch
from examples.lm_recipes import RECIPES
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.quantization import scale_updates, state
from opfuser.recipe import DelayedScaling, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

STEPS, WARM_UP, BATCH, SEQUENCE = 300, 30, 4, 64
# With 1e-3 the same run in bf16 and in fp32 differs by 0.25 %, half of what is asked of FP8; with
# 5e-4 by 0.001 %.
RATE = 5e-4
CLOSE = 0.005
by_recipe = pytest.mark.parametrize("name", RECIPES)


class Run(NamedTuple):
    """A decoder with its optimizer; parameters in fp32, products in bf16."""

    model: opfuser.Sequential
    optimizer: torch.optim.Optimizer

    def train(self, first: int, last: int) -> list[float]:
        """The losses of steps ``first`` to ``last - 1``; the batch is a function of the step."""
        losses = []
        for step in range(first, last):
            rate = RATE * min(1.0, (step + 1) / WARM_UP) * (1 - 0.9 * step / STEPS)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            data = training_batch(text(), BATCH, SEQUENCE, seed=0, step=step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = self.model(*data)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@functools.cache
def text() -> Tensor:
    return load_corpus().train


def start(recipe: Recipe | None) -> Run:
    torch.manual_seed(0)
    model = decoder_lm(DecoderConfig(256, 128, 2, 2, recipe=recipe))
    return Run(model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True))


def mean(losses: list[float]) -> float:
    """Of the last 50 losses.

    All runs see the same batches, so that their difference is that of the models. The mean over 50
    states of the weights varies less than the loss of the last one: between bf16 and fp32 by 0.001
    %, as on held-out text, between bf16 and delayed scaling by 0.01 %, on held-out text by 0.03 %.
    """
    return sum(losses[-50:]) / 50


@pytest.fixture(scope="module")
def bf16() -> list[float]:
    return start(None).train(0, STEPS)


@pytest.mark.slow
@by_recipe
def test_300_steps_end_at_the_loss_of_bf16(name: str, bf16: list[float]) -> None:
    assert bf16[0] > 5
    assert mean(bf16) < 2.5
    losses = start(RECIPES[name]).train(0, STEPS)
    assert mean(losses) == pytest.approx(mean(bf16), rel=CLOSE)


@pytest.mark.slow
def test_scales_that_stay_1_miss_the_loss_of_bf16(
    bf16: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison finds faults: here gradients are lost below the smallest number.

    The loss falls behind slowly: by 0.8 % after 150 steps, by 2.2 % after all.
    """
    monkeypatch.setattr(scale_updates, "update_scales", lambda: None)
    monkeypatch.setattr(state.QuantizationState, "knows", lambda self, role: True)
    losses = start(DelayedScaling()).train(0, STEPS)
    assert mean(losses) > (1 + 2 * CLOSE) * mean(bf16)
