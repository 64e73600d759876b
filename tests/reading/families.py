"""Small models of many families, and the calls that their layers get."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .recomputed import Example
from .tiny import BATCH, LENGTH, WIDTH, inputs_of, randomized

VISION = frozenset({"vit", "clip_vision_model", "siglip_vision_model", "deit"})


def layer_of(model: nn.Module, **inputs: Any) -> Example:
    """The first of a model's layers, and the call that it gets."""
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    calls: list[Example] = []
    handle = layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(Example(module, args, kwargs).again()),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(**(inputs or inputs_of(model)[0]))
    handle.remove()
    call = calls[0]
    x = stream().requires_grad_() if VISION.isdisjoint({model.config.model_type}) else None
    old = call.args[0] if call.args else call.kwargs["hidden_states"]
    if x is None or x.shape != old.shape:
        x = torch.randn_like(old).requires_grad_()
    if call.args:
        return call._replace(args=(x, *call.args[1:]))
    return call._replace(kwargs={**call.kwargs, "hidden_states": x})


def stream(*shape: int) -> Tensor:
    """A random input of a layer."""
    return torch.randn(shape or (BATCH, LENGTH, WIDTH), dtype=torch.float64)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of halves."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class NanoGPTBlock(nn.Module):
    """A block as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.drop = nn.Dropout(0.0)

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in (q, k, v))
        p = self.drop.p if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.drop(self.c_out(F.gelu(self.c_fc(self.ln_2(x)))))


class Llama2cBlock(nn.Module):
    """A block as in llama2.c: neighbors turn, by tables of one angle per pair."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, 16, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, 48, bias=False) for _ in range(2))
        self.w2 = nn.Linear(48, WIDTH, bias=False)
        self.scale_1, self.scale_2 = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def norm(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * scale

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        cos, sin = cos[None, :, None], sin[None, :, None]
        pair = real * cos - imaginary * sin, real * sin + imaginary * cos
        return torch.stack(pair, dim=-1).flatten(3)

    def repeat(self, x: Tensor) -> Tensor:
        b, t, h, d = x.shape
        return x[:, :, :, None, :].expand(b, t, h, 2, d).reshape(b, t, 2 * h, d)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.norm(x, self.scale_1)
        q = self.turn(self.wq(h).view(b, t, 4, 8), cos, sin)
        k, v = self.wk(h).view(b, t, 2, 8), self.wv(h).view(b, t, 2, 8)
        k, v = self.repeat(self.turn(k, cos, sin)), self.repeat(v)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(b, t, -1))
        h = self.norm(x, self.scale_2)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class ComplexBlock(Llama2cBlock):
    """As in Meta's Llama: angles are complex numbers."""

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * cos[None, :, None]).flatten(3)


class TimmBlock(nn.Module):
    """A block as in timm: fused projections, scaled queries, attention as products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def attend(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q * (c // 4) ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GatedCrossBlock(nn.Module):
    """Attention to another input by turned and normalized queries, with sinks and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.gate, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.sinks = nn.Parameter(torch.randn(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, 8)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        h = F.layer_norm(x, (WIDTH,))
        k, v = self.kv(F.rms_norm(memory, (WIDTH,), None, 1e-5)).chunk(2, -1)
        scores = self.heads(self.q(h)) @ self.heads(k).mT * 0.3 + mask
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        y = (weights @ self.heads(v)).transpose(1, 2).flatten(2)
        return x + self.out(y * torch.sigmoid(self.gate(h)))


def own_blocks() -> dict[str, Example]:
    """Blocks that people write themselves, and calls of them."""
    angles = torch.randn(LENGTH, 4, dtype=torch.float64)
    complex_angles = torch.polar(torch.ones_like(angles), angles)
    causal = torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64).triu(1)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.float64)
    padding[0, -2:] = -math.inf
    torch_layer = nn.TransformerEncoderLayer
    x, memory = stream().requires_grad_(), stream(BATCH, 9, WIDTH).requires_grad_()
    bias = torch.randn(BATCH, 1, LENGTH, 9, dtype=torch.float64)
    feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.SiLU(), nn.Linear(48, WIDTH))
    first: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    return {
        name: example._replace(module=randomized(example.module))
        for name, example in {
            "nanoGPT": Example(NanoGPTBlock(), (x,)),
            "llama2.c": Example(Llama2cBlock(), (x, angles.cos(), angles.sin())),
            "Meta's Llama": Example(ComplexBlock(), (x, complex_angles, angles)),
            "timm": Example(TimmBlock(), (x,)),
            "cross": Example(GatedCrossBlock(), (x, memory, bias)),
            "Sequential": Example(feed, (x,)),
            "RMSNorm": Example(nn.RMSNorm(WIDTH), (x,)),
            "encoder layer": Example(torch_layer(WIDTH, 4, 48, 0.0), (x,)),
            "encoder layer, norm first": Example(torch_layer(WIDTH, 4, 48, **first), (x,)),
            "encoder layer, mask": Example(torch_layer(WIDTH, 4, 48, **first), (x, causal)),
            "encoder layer, causal": Example(
                torch_layer(WIDTH, 4, 48, **first), (x, causal), {"is_causal": True}
            ),
            "encoder layer, padding": Example(
                torch_layer(WIDTH, 4, 48, **first), (x, causal, padding)
            ),
            "encoder layer, bool masks": Example(
                torch_layer(WIDTH, 4, 48, **first), (x, causal < 0, padding < 0)
            ),
            "encoder": Example(
                nn.TransformerEncoder(
                    torch_layer(WIDTH, 4, 48, **first), 2, enable_nested_tensor=False
                ),
                (x,),
            ),
        }.items()
    }
