"""Tiny models of every family, for what all of them promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opfuser.models import (
    DecoderConfig,
    EncoderConfig,
    ImageEncoderConfig,
    MoEConfig,
    decoder_lm,
    image_encoder,
    text_encoder,
)

__all__ = ["FAMILIES", "batch", "grads", "make"]

F64 = torch.float64
_SIZES: dict[str, Any] = {
    "vocab_size": 17, "dim": 12, "num_layers": 1, "num_heads": 2, "ffn_dim": 10, "tied_head": False,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
_GEMMA = {
    **_GROUPED, "num_layers": 2, "window": (4, None), "zero_centered_gamma": True,
    "post_norms": True, "activation": "geglu", "embedding_scale": 12**0.5, "tied_head": True,
}  # fmt: skip
_ENCODER: dict[str, Any] = {"dim": 12, "num_layers": 1, "num_heads": 2, "dropout": 0.0}


def _experts(top_k: int, **others: Any) -> dict[str, Any]:
    moe = MoEConfig(12, 6, num_experts=4, top_k=top_k, init_std=0.5, **others)
    return {**_GROUPED, "moe": moe, "router_aux_loss_coef": 0.5}


_DECODERS: dict[str, dict[str, Any]] = {
    "Llama": _GROUPED,
    "the examples'": {**_SIZES, "tied_head": True},
    "Mistral": {**_GROUPED, "window": 4},
    "Qwen2": {**_GROUPED, "qkv_bias": True, "tied_head": True},
    "Qwen3": {**_GROUPED, "qk_norm": True, "tied_head": True},
    "Gemma 2": {**_GEMMA, "attention_softcap": 2.0, "logit_softcap": 3.0},
    "Gemma 3": {**_GEMMA, "qk_norm": True, "local_rope_base": 100.0},
    "GPT-2": {
        **_SIZES, "norm": "layer", "learned_positions": 32, "activation": "gelu_tanh",
        "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied_head": True,
    },
    "Mixtral": _experts(2),
    "Qwen2-MoE": {**_experts(3, shared_ffn_dim=6, shared_gate=True), "qkv_bias": True},
}  # fmt: skip
_ENCODERS: dict[str, Callable[..., nn.Module]] = {
    "BERT": lambda **to: text_encoder(
        EncoderConfig(17, **_ENCODER, num_positions=32, norm_first=False, **to)
    ),
    "ViT": lambda **to: image_encoder(
        ImageEncoderConfig(image_size=6, patch_size=2, channels=2, **_ENCODER, **to)
    ),
}
FAMILIES = [*_DECODERS, *_ENCODERS]


class _MeanSquare(nn.Module):
    """A loss for a model that has none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        y: Tensor = self.model(*inputs)
        return y.square().mean()


def make(family: str, dtype: torch.dtype = F64, device: str = "cpu") -> nn.Module:
    """From inputs to a loss, with weights large enough that every part matters."""
    to: Any = {"dtype": dtype, "device": device}
    model: nn.Module
    if family in _DECODERS:
        model = decoder_lm(DecoderConfig(**{**_DECODERS[family], **to}))
    else:
        model = _MeanSquare(_ENCODERS[family](**to))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3) if p.dim() > 1 else p.uniform_(0.5, 1.5)
    return model


def batch(
    family: str, rows: int, length: int, dtype: torch.dtype = F64, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Inputs; images are of one size."""
    if family == "ViT":
        return (torch.randn(rows, 2, 6, 6, dtype=dtype, device=device),)
    classes = 2 if family == "BERT" else 17  # of types, or of targets
    return (
        torch.randint(17, (rows, length), device=device),
        torch.randint(classes, (rows, length), device=device),
    )


def grads(loss: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """The loss, and the gradients of parameters by their names."""
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()))
    return {"loss": loss.detach(), **dict(zip(named, found))}
