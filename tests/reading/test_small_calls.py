"""A trace of a small call holds for a large one, and tells the same."""

from __future__ import annotations

import pytest
import torch

from opfuser.reading.call_key import call_key, small_call
from opfuser.reading.grammar import read
from opfuser.reading.tracer import trace

from .families import layer_of
from .tiny import model_of


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gemma2", "eager")])
def test_a_small_call_is_read_as_a_large_one(family: str, attention: str) -> None:
    model = model_of(family, attention, max_position_embeddings=128).eval()
    module, args, kwargs = layer_of(model, input_ids=torch.randint(3, 60, (6, 90)))
    small = trace(module, *small_call(module, args, kwargs))
    assert small.dataflow.inputs[0].shape == (5, 7, 32)
    key = call_key(module, args, kwargs)
    assert small.key.facts == key.facts
    assert small.takes(key, module)
    want = read(trace(module, args, kwargs).dataflow)
    assert str(read(small.dataflow)).replace("(5, 1, 7, 7)", "(6, 1, 90, 90)") == str(want)
