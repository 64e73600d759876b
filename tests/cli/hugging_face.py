"""Models of Hugging Face's transformers that commands are called with, by name."""

from __future__ import annotations

from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import opfuser.hf


def plain(vocab_size: int = 37) -> nn.Module:
    """A model as transformers builds it."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


plain.example_inputs = "2x8:int64"  # type: ignore[attr-defined]


def applied() -> nn.Module:
    """The same, computed by Sequentials that no module registers."""
    model = plain()
    opfuser.hf.apply(model)
    return model


applied.example_inputs = "2x8:int64"  # type: ignore[attr-defined]
