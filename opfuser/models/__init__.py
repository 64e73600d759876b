"""Ready-made blocks and models, composed only from public operations."""

from __future__ import annotations

from .config import DecoderConfig
from .decoder import (
    attention_block,
    decoder_layer,
    decoder_layers,
    decoder_lm,
    mlp_block,
    swiglu_block,
)
from .encoder import EncoderConfig, attention_kwargs, text_encoder
from .generation import generate
from .hf_weights import hf_state_dict, load_hf
from .moe import MoEConfig, experts, moe_block, router_kwargs
from .vision_encoder import ImageEncoderConfig, image_encoder

__all__ = [
    "DecoderConfig",
    "EncoderConfig",
    "ImageEncoderConfig",
    "MoEConfig",
    "attention_block",
    "attention_kwargs",
    "decoder_layer",
    "decoder_layers",
    "decoder_lm",
    "experts",
    "generate",
    "hf_state_dict",
    "image_encoder",
    "load_hf",
    "mlp_block",
    "moe_block",
    "router_kwargs",
    "swiglu_block",
    "text_encoder",
]
