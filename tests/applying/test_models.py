"""Models to which apply was applied compute the losses and gradients that they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import opfuser
from opfuser.applying import report

from ..reading.tiny import LENGTH, WIDTH, model_of
from .models import IDS, MODELS, WHOLE, assert_equal_steps, inputs_of, paths, step


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_as_without_apply(name: str) -> None:
    model = MODELS[name]()
    want = step(model)
    opfuser.apply(model)
    assert_equal_steps(step(model), want)
    assert_equal_steps(step(model), want)
    assert paths(report(model)) == WHOLE[name]


def test_inputs_that_a_layer_returns_are_those_that_it_was_given() -> None:
    """A bias of attention that was computed by the first layer goes from layer to layer."""
    model: Any = model_of("t5").eval()
    ids = inputs_of(model) | {"decoder_input_ids": IDS.flip(1)}
    ids["attention_mask"] = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    want = step(model, **ids)
    with torch.no_grad():
        hidden = model(**ids)[0]
        opfuser.apply(model)
        torch.testing.assert_close(model(**ids)[0], hidden, rtol=1e-5, atol=1e-5)
        bias = torch.randn(1, 4, LENGTH, LENGTH, dtype=torch.float64)
        x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
        assert model.encoder.block[1](x, None, bias)[1] is bias
    assert "encoder.block.1" in paths(report(model))
    assert_equal_steps(step(model, **ids), want, 1e-5)


@pytest.mark.parametrize("family", ["cohere", "glm", "gpt_neox", "llama"])
def test_with_the_cache_that_a_model_makes_for_itself(family: str) -> None:
    """As many keys as queries, whether or not the reader knows which size that is."""
    model, plain = (model_of(family).eval() for _ in range(2))
    opfuser.apply(model)
    for each in (model, plain):
        each.config.use_cache = True
    for _ in range(3):
        assert_equal_steps(step(model), step(plain))
    assert paths(report(model))
