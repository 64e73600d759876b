"""A decoder language model of the Llama family, its layers and their two blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from opfuser import (
    CrossEntropy,
    DotProductAttention,
    Embedding,
    Linear,
    Residual,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    SwiGLU,
)
from opfuser.errors import ArgumentError, explain
from opfuser.quantization.region import check_recipe
from opfuser.recipe import Recipe

__all__ = [
    "DecoderConfig",
    "attention_block",
    "decoder_layer",
    "decoder_layers",
    "decoder_lm",
    "swiglu_block",
]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder, and where its parameters live.

    Attributes:
        vocab_size: rows of the token table, and classes of the head.
        dim: features of a token between the blocks.
        num_layers: pairs of an attention block and a feed-forward block.
        num_heads: query heads, each of ``dim / num_heads`` features, an even number.
        num_kv_heads: key heads, and as many value heads; None is ``num_heads``.
        ffn_dim: features inside the feed-forward block; None is 8/3 ``dim``, rounded up to a
            multiple of 64 (Shazeer, "GLU Variants Improve Transformer", 2020).
        rope_base: base of the rotary frequencies.
        norm_eps: added to the mean square in every RMSNorm.
        tied_head: whether the head's weight is the token table, one and the same parameter. Like
            any tied parameter of torch it comes apart when moved off the meta device.
        init_std: standard deviation of the initial weights; divided by ``sqrt(2 num_layers)`` where
            a block adds to the residual stream (Radford et al., GPT-2, 2019).
        device: of the parameters; None is torch's default.
        dtype: of the parameters; None is torch's default.
        recompute: None; or ``"mlp"``, for feed-forward blocks that save their input alone and
            recompute their first linear in backward: two ninths more GEMM work in them.
        recipe: of :mod:`opfuser.recipe`: how the layers' linear operations compute, whatever the
            region. It is the recipe of the Sequential that is made, so that a call opens one
            region. None leaves it to :class:`opfuser.autocast`. Features that do not fit its blocks
            stay in high precision, as the plan says: choose multiples of 128. The head stays in
            high precision with every recipe.

    Raises:
        ArgumentError: a size is not positive, the heads do not divide as needed, ``recompute`` is
            neither None nor "mlp", or ``recipe`` is neither None nor a recipe.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    ffn_dim: int | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tied_head: bool = True
    init_std: float = 0.02
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    recompute: str | None = None
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        names = "vocab_size dim num_layers num_heads num_kv_heads ffn_dim".split()
        sizes = {name: getattr(self, name) for name in names}
        wrong = {name: size for name, size in sizes.items() if size is not None and size < 1}
        invariant = "Sizes must be positive" if wrong else ""
        if not wrong and (self.dim % self.num_heads or self.dim // self.num_heads % 2):
            invariant = "dim must be a multiple of num_heads, and even for each head"
            wrong = {"dim": self.dim, "num_heads": self.num_heads}
        elif not wrong and self.num_heads % self.key_heads:
            invariant = "num_heads must be a multiple of num_kv_heads"
            wrong = {"num_heads": self.num_heads, "num_kv_heads": self.key_heads}
        if not invariant and self.recompute not in (None, "mlp"):
            invariant, wrong = "recompute must be None or 'mlp'", {"recompute": self.recompute}
        if invariant:
            received = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
            raise ArgumentError(explain(invariant, where="DecoderConfig", received=received))
        if self.recipe is not None:
            check_recipe(self.recipe, "DecoderConfig")

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.dim // self.num_heads

    @property
    def key_heads(self) -> int:
        """Number of key heads, and of value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn_features(self) -> int:
        """Features inside the feed-forward block."""
        return -(-8 * self.dim // 192) * 64 if self.ffn_dim is None else self.ffn_dim


def _norm(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.dim, eps=config.norm_eps, device=config.device, dtype=config.dtype)


def _linear(config: DecoderConfig, in_features: int, out_features: int) -> Linear:
    linear = Linear(in_features, out_features, bias=False, device=config.device, dtype=config.dtype)
    linear.initialize_weight(partial(nn.init.normal_, std=config.init_std))
    return linear


def _output_linear(config: DecoderConfig, in_features: int) -> Linear:
    """A linear that ends a block, scaled so that the sum over all blocks keeps the size of one."""
    linear = _linear(config, in_features, config.dim)
    std = config.init_std / (2 * config.num_layers) ** 0.5
    linear.initialize_weight(partial(nn.init.normal_, std=std))
    return linear


def attention_block(config: DecoderConfig) -> Sequential:
    """Causal self-attention with rotary positions: ``y = x + out(attend(rope(qkv(norm(x)))))``.

    Shapes: x and y ``(batch, sequence, dim)``; qkv is packed, queries first, then keys, then
    values.

    Args:
        config: sizes of the model.
    """
    heads = config.num_heads + 2 * config.key_heads
    block = Residual(
        _norm(config),
        _linear(config, config.dim, heads * config.head_dim),
        RotaryEmbedding(
            config.num_heads,
            config.head_dim,
            num_kv_heads=config.key_heads,
            base=config.rope_base,
        ),
        DotProductAttention(config.num_heads, config.key_heads, causal=True),
        _output_linear(config, config.dim),
    )
    block.recipe = config.recipe
    return block


def swiglu_block(config: DecoderConfig) -> Sequential:
    """Gated feed-forward block: ``y = x + down(silu(gate(norm(x))) * up(norm(x)))``.

    Shapes: x and y ``(..., dim)``; one weight ``(2 ffn_dim, dim)`` holds gate and up, gate first.

    Args:
        config: sizes of the model.
    """
    activation = SwiGLU()
    if config.recompute == "mlp":
        activation.recompute_mlp = True
    block = Residual(
        _norm(config),
        _linear(config, config.dim, 2 * config.ffn_features),
        activation,
        _output_linear(config, config.ffn_features),
    )
    block.recipe = config.recipe
    return block


def decoder_layer(config: DecoderConfig) -> Sequential:
    """An attention block and a feed-forward block, named ``attention`` and ``mlp``.

    Args:
        config: sizes of the model.
    """
    inside = replace(config, recipe=None)
    blocks = {"attention": attention_block(inside), "mlp": swiglu_block(inside)}
    return Sequential(blocks, recipe=config.recipe)


def decoder_layers(config: DecoderConfig) -> Sequential:
    """All ``num_layers`` layers: from (batch, sequence, dim) to the same shape.

    Args:
        config: sizes of the model.
    """
    inside = replace(config, recipe=None)
    layers = (decoder_layer(inside) for _ in range(config.num_layers))
    return Sequential(*layers, recipe=config.recipe)


def decoder_lm(config: DecoderConfig, with_loss: bool = True) -> Sequential:
    """The whole language model, as one Sequential.

    Its modules are ``embedding``, ``layers``, ``norm``, ``head`` and, with a loss, ``loss``. Their
    operations form one group: fusions apply across the borders of blocks and layers.

    Args:
        config: sizes of the model.
        with_loss: whether the model ends with a loss, or with logits.

    Call:
        With a loss, ``model(tokens, targets)``: the mean cross entropy in nats, 0-d, of predicting
        ``targets`` (batch, sequence). Without, ``model(tokens)``: logits
        (batch, sequence, vocab_size). tokens: (batch, sequence) of int32 or int64.
        ``model[:-1]`` of a model with a loss is the same model without one.
    """
    embedding = Embedding(config.vocab_size, config.dim, device=config.device, dtype=config.dtype)
    nn.init.normal_(embedding.weight, std=config.init_std)
    head = _linear(config, config.dim, config.vocab_size)
    head.recipe = None  # also without a loss, which would refuse it
    if config.tied_head:
        head.weight = embedding.weight
    modules: dict[str, nn.Module] = {
        "embedding": embedding,
        "layers": decoder_layers(replace(config, recipe=None)),
        "norm": _norm(config),
        "head": head,
    }
    if with_loss:
        modules["loss"] = CrossEntropy()
    return Sequential(modules, recipe=config.recipe)
