"""Ready-made blocks and models, composed only from public operations."""

from __future__ import annotations

from .decoder import (
    DecoderConfig,
    attention_block,
    decoder_layer,
    decoder_layers,
    decoder_lm,
    swiglu_block,
)
from .moe import MoEConfig, experts, moe_block

__all__ = [
    "DecoderConfig",
    "MoEConfig",
    "attention_block",
    "decoder_layer",
    "decoder_layers",
    "decoder_lm",
    "experts",
    "moe_block",
    "swiglu_block",
]
