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

__all__ = [
    "DecoderConfig",
    "attention_block",
    "decoder_layer",
    "decoder_layers",
    "decoder_lm",
    "swiglu_block",
]
