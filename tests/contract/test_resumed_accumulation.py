"""A run that goes on between two micro-batches of a step: what has to be saved, and that it is."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.optim import MasterWeights
from opfuser.recipe import DelayedScaling, Float8CurrentScaling, Float8PredictedScaling, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

MICROBATCHES, STEPS, BROKEN_AFTER = 4, 4, 2 * 4 + 2
CONFIG = DecoderConfig(32, 32, 1, 2, ffn_dim=32, dtype=torch.bfloat16)
RECIPES = DelayedScaling(amax_history_len=3), Float8PredictedScaling(), Float8CurrentScaling()


class Training:
    """A model in low precision, with masters."""

    def __init__(self, recipe: Recipe, main_grad: bool, in_fp8: bool, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.recipe, self.main_grad, self.done = recipe, main_grad, 0
        with opfuser.autocast(recipe=recipe), opfuser.quantized_model_init(in_fp8, recipe):
            self.model = decoder_lm(CONFIG)
        if main_grad:
            for op in self.model.modules():
                if isinstance(op, opfuser.BasicLinear):
                    op.accumulate_into_main_grad = True
            for p in self.model.parameters():
                p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
        self.optimizer = MasterWeights(self.model, torch.optim.AdamW, lr=1e-2)

    def micro_batch(self) -> float:
        """Forward and backward of the next one, and a step of the optimizer after the fourth."""
        generator = torch.Generator().manual_seed(self.done)
        tokens, targets = torch.randint(32, (2, 2, 8), generator=generator)
        with opfuser.autocast(recipe=self.recipe):
            loss = self.model(tokens, targets)
        (loss / MICROBATCHES).backward()
        self.done += 1
        if self.done % MICROBATCHES == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            for p in self.model.parameters() if self.main_grad else ():
                p.main_grad.zero_()  # type: ignore[attr-defined]
        return loss.item()

    def state_dict(self) -> dict[str, Any]:
        named = dict(self.model.named_parameters())
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": self.done,
            "grad": {name: p.grad for name, p in named.items()},
        }
        if self.main_grad:
            state["main_grad"] = {name: p.main_grad for name, p in named.items()}  # type: ignore[attr-defined]
            flags = {
                name: getattr(p, "grad_added_to_main_grad", False) for name, p in named.items()
            }
            state["grad_added_to_main_grad"] = flags
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]
        for name, p in self.model.named_parameters():
            for key in ("grad", "main_grad", "grad_added_to_main_grad"):
                if key in state:
                    setattr(p, key, state[key][name])


def written(state: dict[str, Any]) -> dict[str, Any]:
    """What a file of it holds."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def flat(value: Any, name: str = "") -> dict[str, Tensor]:
    """All tensors in a state dict, by where they are."""
    if isinstance(value, Tensor):
        return {name: value}
    inside = value.items() if isinstance(value, dict) else ()
    return {k: t for key, part in inside for k, t in flat(part, f"{name}/{key}").items()}


@pytest.mark.parametrize(
    ("recipe", "main_grad", "in_fp8"),
    [(recipe, bool(m), bool((n + m) % 2)) for n, recipe in enumerate(RECIPES) for m in range(2)],
    ids=lambda value: value if isinstance(value, bool) else type(value).__name__,
)
def test_goes_on_bit_for_bit(recipe: Recipe, main_grad: bool, in_fp8: bool) -> None:
    unbroken = Training(recipe, main_grad, in_fp8)
    losses = [unbroken.micro_batch() for _ in range(STEPS * MICROBATCHES)]
    first = Training(recipe, main_grad, in_fp8)
    told = [first.micro_batch() for _ in range(BROKEN_AFTER)]
    assert first.done % MICROBATCHES
    second = Training(recipe, main_grad, in_fp8, seed=1)
    second.load_state_dict(written(first.state_dict()))
    told += [second.micro_batch() for _ in range(BROKEN_AFTER, STEPS * MICROBATCHES)]
    assert told == losses
    with opfuser.autocast(recipe=recipe):
        pass  # scales follow what was seen last
    ours, exact = flat(second.state_dict()), flat(unbroken.state_dict())
    assert ours.keys() == exact.keys()
    for name, value in exact.items():
        assert torch.equal(ours[name].float(), value.float()), name


def test_gradients_are_part_of_it() -> None:
    """Without them, the step is one of the last two micro-batches."""
    unbroken, first = (Training(RECIPES[0], False, False) for _ in range(2))
    losses = [unbroken.micro_batch() for _ in range(3 * MICROBATCHES + 1)]
    for _ in range(BROKEN_AFTER):
        first.micro_batch()
    second = Training(RECIPES[0], False, False, seed=1)
    state = written(first.state_dict())
    del state["grad"]
    second.load_state_dict(state)
    told = [second.micro_batch() for _ in range(BROKEN_AFTER, 3 * MICROBATCHES + 1)]
    assert told[:2] == losses[BROKEN_AFTER:-1]
    assert told[-1] != losses[-1]
