"""Modules of Transformer Engine as formulas over its own parameter names, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser.integrations.te import LayerNormMLPOptions, TransformerLayerOptions

Parameters = Mapping[str, Tensor]


def gate(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: Tensor) -> Tensor:
    return F.relu(x) ** 2


def clamped(x: Tensor, limit: float = 7.0) -> Tensor:
    a, b = x.chunk(2, -1)
    return qgelu(a.clamp(max=limit)) * (b.clamp(-limit, limit) + 1)


ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "gelu": gelu, "geglu": gate(gelu), "glu": gate(torch.sigmoid), "qgelu": qgelu,
    "qgeglu": gate(qgelu), "relu": F.relu, "reglu": gate(F.relu), "srelu": srelu,
    "sreglu": gate(srelu), "silu": F.silu, "swiglu": gate(F.silu), "clamped_swiglu": clamped,
}  # fmt: skip


def norm(options: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight = weight + 1 if options.zero_centered_gamma else weight
    if options.normalization == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], weight, options.eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, options.eps)


def linear(p: Parameters, x: Tensor, name: str) -> Tensor:
    return F.linear(x, p[f"{name}weight"], p.get(f"{name}bias"))


def layer_norm_of(options: Any, p: Parameters, x: Tensor, prefix: str) -> Tensor:
    names = [f"{prefix}layer_norm_{kind}" for kind in ("weight", "bias")]
    return norm(options, x, p[names[0]], p.get(names[1]))


def mlp(options: Any, p: Parameters, x: Tensor, prefix: str = "") -> Tensor:
    """Without the norm."""
    activation = ACTIVATIONS[options.activation]
    params = dict(options.activation_params or {})
    hidden = activation(linear(p, x, f"{prefix}fc1_"), **params)
    return linear(p, hidden, f"{prefix}fc2_")


def layer_norm_mlp(options: LayerNormMLPOptions, p: Parameters, x: Tensor) -> Tensor:
    return mlp(options, p, layer_norm_of(options, p, x, ""))


def qkv_of(options: TransformerLayerOptions, p: Parameters, x: Tensor, prefix: str) -> Any:
    """Queries, keys and values, each (..., heads, size)."""
    heads = options.num_attention_heads
    groups = options.num_gqa_groups or heads
    size = options.kv_channels or options.hidden_size // heads
    if not options.fuse_qkv_params:
        pieces = [linear(p, x, f"{prefix}{n}_") for n in ("query", "key", "value")]
        return [t.unflatten(-1, (-1, size)) for t in pieces]
    packed = linear(p, x, prefix)
    each = heads // groups
    if not options.qkv_weight_interleaved:
        return packed.unflatten(-1, (-1, size)).split([heads, groups, groups], -2)
    parts = packed.unflatten(-1, (groups, each + 2, size)).split([each, 1, 1], -2)
    return [t.flatten(-3, -2) for t in parts]


def rotate(x: Tensor, base: float) -> Tensor:
    """(batch, sequence, heads, size): the two halves of a head are rotated."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(options: TransformerLayerOptions, p: Parameters, x: Tensor, prefix: str) -> Tensor:
    parts = qkv_of(options, p, x, prefix)
    if options.attn_input_format == "sbhd":
        parts = [t.transpose(0, 1) for t in parts]
    q, k, v = parts

    def normalize(t: Tensor, name: str) -> Tensor:
        weight = p[f"self_attention.{name}_norm.weight"]
        return F.rms_norm(t, t.shape[-1:], weight, options.qk_norm_eps)

    steps: list[Callable[[Tensor, str], Tensor]] = []
    if options.rotary_base is not None:
        base = options.rotary_base
        steps.append(lambda t, _: rotate(t, base))
    if options.qk_norm_type is not None:
        steps.insert(0 if options.qk_norm_before_rope else len(steps), normalize)
    for step in steps:
        q, k = step(q, "q"), step(k, "k")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    each = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(each, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    before, behind = options.window_size or (-1, -1)
    seen = distance <= before if before >= 0 else distance < len(distance)
    if options.self_attn_mask_type != "no_mask":
        behind = 0
    if behind >= 0:
        seen = seen & (-distance <= behind)
    y = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
    y = y.transpose(0, 1) if options.attn_input_format == "sbhd" else y
    return linear(p, y, "self_attention.proj.")


def transformer_layer(options: TransformerLayerOptions, p: Parameters, x: Tensor) -> Tensor:
    last = options.output_layernorm
    prefix = f"self_attention.{'qkv' if last else 'layernorm_qkv'}."
    after_norm = options.apply_residual_connection_post_layernorm
    z = x if last else layer_norm_of(options, p, x, prefix)
    x = (z if after_norm else x) + attention(options, p, z, prefix)
    z = layer_norm_of(options, p, x, "layernorm_mlp.")
    x = (z if after_norm else x) + mlp(options, p, z, "layernorm_mlp.")
    if last:
        x = norm(options, x, p["layernorm.weight"], p.get("layernorm.bias"))
    return x
