"""The network of train_lm.py in plain torch.nn: same results, same names of parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser.models import DecoderConfig


class Rotary(nn.Module):
    """Rotates the queries and keys of packed (batch, sequence, heads * head_dim) projections."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, qkv: Tensor) -> Tensor:
        config = self.config
        dtype = torch.promote_types(qkv.dtype, torch.float32)
        steps = torch.arange(0, config.head_features, 2, device=qkv.device, dtype=dtype)
        times = torch.arange(qkv.shape[1], device=qkv.device, dtype=dtype)
        angles = torch.outer(times, config.rope_base ** (-steps / config.head_features))
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        heads = qkv.unflatten(2, (-1, config.head_features))
        turned = config.num_heads + config.key_heads
        a, b = heads[:, :, :turned].to(dtype).chunk(2, dim=-1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(qkv.dtype)
        return torch.cat([rotated, heads[:, :, turned:]], 2).flatten(2)


class Attention(nn.Module):
    """Causal attention over packed queries, keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.sizes = (config.num_heads, config.key_heads, config.key_heads)

    def forward(self, qkv: Tensor) -> Tensor:
        heads = qkv.unflatten(2, (sum(self.sizes), -1)).transpose(1, 2)
        q, k, v = heads.split(self.sizes, dim=1)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.sizes[0] != self.sizes[1]
        )
        return y.transpose(1, 2).flatten(2)


class SwiGLU(nn.Module):
    """``silu(gate) * up``; the gate is the first half."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class Residual(nn.Module):
    """``x + modules(x)``; named from 1, as opfuser.Residual begins with a MakeExtraOutput."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        for n, module in enumerate(modules, start=1):
            self.add_module(str(n), module)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for module in self.children():
            y = module(y)
        return x + y


def _layer(config: DecoderConfig) -> nn.Sequential:
    to = {"device": config.device, "dtype": config.dtype}
    packed = (config.num_heads + 2 * config.key_heads) * config.head_features
    layer = nn.Sequential()
    layer.attention = Residual(
        nn.RMSNorm(config.dim, config.norm_eps, **to),
        nn.Linear(config.dim, packed, bias=False, **to),
        Rotary(config),
        Attention(config),
        nn.Linear(config.dim, config.dim, bias=False, **to),
    )
    layer.mlp = Residual(
        nn.RMSNorm(config.dim, config.norm_eps, **to),
        nn.Linear(config.dim, 2 * config.ffn_features, bias=False, **to),
        SwiGLU(),
        nn.Linear(config.ffn_features, config.dim, bias=False, **to),
    )
    return layer


class Twin(nn.Module):
    """``opfuser.models.decoder_lm(config)``, without opfuser's operations."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        to = {"device": config.device, "dtype": config.dtype}
        self.embedding = nn.Embedding(config.vocab_size, config.dim, **to)
        self.layers = nn.Sequential(*(_layer(config) for _ in range(config.num_layers)))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps, **to)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False, **to)
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.layers(self.embedding(tokens))
        logits = self.head(self.norm(x))
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.flatten(0, 1).to(dtype), targets.flatten())
