"""A module that computes one operation more is kept, or read with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .families import layer_of, own_blocks, stream
from .mutations import MUTATIONS, count_of, outcomes_of
from .recomputed import Example
from .tiny import WIDTH, model_of

BLOCKS = own_blocks()


@pytest.mark.parametrize("name", ["llama2.c", "timm", "cross", "encoder layer"])
def test_no_operation_is_overlooked(name: str) -> None:
    assert outcomes_of(BLOCKS[name])["recomputed"] > 0


@pytest.mark.parametrize(
    ("family", "attention", "others"),
    [
        ("qwen3", "sdpa", {}),
        ("gpt2", "eager", {"attn_pdrop": 1.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    ],
)
def test_no_operation_of_a_layer_in_training_is_overlooked(
    family: str, attention: str, others: dict[str, float]
) -> None:
    example = layer_of(model_of(family, attention, **others).train())
    assert outcomes_of(example)["recomputed"] > 0


def test_mutants_compute_something_else() -> None:
    """Else a test of mutants could not fail."""
    torch.manual_seed(0)
    x = stream(3, 5, WIDTH)
    assert all(not torch.equal(f(x), x) for name, f in MUTATIONS.items() if name not in SAME)
    assert count_of(Example(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU()).double(), (x,))) == 2


SAME = "copy", "no gradient"
