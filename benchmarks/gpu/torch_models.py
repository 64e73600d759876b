"""Blocks and models in torch.nn, written for speed: rotary tables are computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser.models import DecoderConfig


def swiglu(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None
) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).float(), targets)


@dataclass(frozen=True)
class Parts:
    """The modules that a library may replace in a model."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = lambda x, w, eps: F.rms_norm(
        x, w.shape, w, eps
    )
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = lambda x, w, b, eps: (
        F.layer_norm(x, w.shape, w, b, eps)
    )
    swiglu: Callable[[Tensor], Tensor] = swiglu
    linear_cross_entropy: Callable[..., Tensor] = linear_cross_entropy


class Norm(nn.Module):
    def __init__(self, parts: Parts, config: DecoderConfig) -> None:
        super().__init__()
        self.parts, self.eps = parts, config.norm_eps
        self.weight = nn.Parameter(
            torch.empty(config.dim, device=config.device, dtype=config.dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.parts.rms_norm(x, self.weight, self.eps)


class Gated(nn.Module):
    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return self.parts.swiglu(x)


class Rotary(nn.Module):
    """Rotates packed queries and keys; pairs are split halves of a head, as in Llama."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        length: int,
        base: float,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.turned, self.head_dim = heads + kv_heads, head_dim
        steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
        times = torch.arange(length, device=device, dtype=torch.float32)
        angles = torch.outer(times, base ** (-steps / head_dim))[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, heads: Tensor) -> Tensor:
        a, b = heads.chunk(2, dim=-1)
        turned = torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1)
        return turned.to(heads.dtype)

    def forward(self, qkv: Tensor) -> Tensor:
        qk, v = qkv.unflatten(-1, (-1, self.head_dim)).tensor_split([self.turned], dim=-2)
        return torch.cat([self.rotate(qk), v], dim=-2).flatten(-2)


class Attention(nn.Module):
    """Attention over packed queries, keys and values."""

    def __init__(self, heads: int, kv_heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.sizes, self.causal = (heads, kv_heads, kv_heads), causal

    def forward(self, qkv: Tensor) -> Tensor:
        heads = qkv.unflatten(-1, (sum(self.sizes), -1)).transpose(1, 2)
        q, k, v = heads.split(self.sizes, dim=1)
        grouped = self.sizes[0] != self.sizes[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        return y.transpose(1, 2).flatten(2)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def linear(config: DecoderConfig, in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(
        in_features, out_features, bias=False, device=config.device, dtype=config.dtype
    )


def swiglu_block(config: DecoderConfig, parts: Parts) -> nn.Module:
    return Residual(
        Norm(parts, config),
        linear(config, config.dim, 2 * config.ffn_features),
        Gated(parts),
        linear(config, config.ffn_features, config.dim),
    )


def attention_block(config: DecoderConfig, parts: Parts, length: int) -> nn.Module:
    heads, kv_heads = config.num_heads, config.key_heads
    base, device = config.rope_base, config.device
    return Residual(
        Norm(parts, config),
        linear(config, config.dim, (heads + 2 * kv_heads) * config.head_features),
        Rotary(heads, kv_heads, config.head_features, length, base, device),
        Attention(heads, kv_heads),
        linear(config, config.dim, config.dim),
    )


def decoder_layer(config: DecoderConfig, parts: Parts, length: int) -> nn.Module:
    return nn.Sequential(attention_block(config, parts, length), swiglu_block(config, parts))


class DecoderLM(nn.Module):
    """``opfuser.models.decoder_lm(config)``, its parameters in the same order."""

    def __init__(self, config: DecoderConfig, parts: Parts, length: int) -> None:
        super().__init__()
        self.parts = parts
        to = {"device": config.device, "dtype": config.dtype}
        self.embedding = nn.Embedding(config.vocab_size, config.dim, **to)
        layers = (decoder_layer(config, parts, length) for _ in range(config.num_layers))
        self.layers = nn.Sequential(*layers)
        self.norm = Norm(parts, config)
        self.head = linear(config, config.dim, config.vocab_size)
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.layers(self.embedding(tokens)))
        return self.parts.linear_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten())


def gpt_block(dim: int, hidden: int, dropout: float, eps: float, to: dict) -> nn.Module:
    """LayerNorm, Linear, GELU, Linear and dropout, with biases and a residual sum."""
    return Residual(
        nn.LayerNorm(dim, eps, **to),
        nn.Linear(dim, hidden, **to),
        nn.GELU(approximate="tanh"),
        nn.Linear(hidden, dim, **to),
        nn.Dropout(dropout) if dropout else nn.Identity(),
    )


def share(model: nn.Module, source: nn.Module) -> nn.Module:
    """Assigns the source's parameters, the same objects, to the model, in the order of both."""
    theirs = [p for _, p in source.named_parameters(remove_duplicate=False)]
    own = list(model.named_parameters(remove_duplicate=False))
    if [p.shape for _, p in own] != [p.shape for p in theirs]:
        raise ValueError("the models do not have the same parameters")
    for (path, _), p in zip(own, theirs):
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, p)
    return model
