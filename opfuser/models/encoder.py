"""Encoders of text: BERT and what was derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opfuser import (
    AddEmbedding,
    DotProductAttention,
    Dropout,
    Embedding,
    LayerNorm,
    PositionEmbedding,
    Sequential,
)
from opfuser.recipe import Recipe

from .config import DecoderConfig, encoder_blocks
from .decoder import decoder_layers
from .hf_config import encoder_arguments


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of an encoder, and where its parameters live.

    Attributes:
        vocab_size: rows of the token table.
        dim: features of a token between the blocks.
        num_layers: pairs of an attention block and a feed-forward block.
        num_heads: heads, each of ``dim / num_heads`` features.
        ffn_dim: features inside the feed-forward block; None is ``4 dim``.
        num_positions: rows of the table of positions.
        num_types: rows of the table of types of tokens.
        activation: of the feed-forward block, as in :class:`DecoderConfig`.
        norm_eps: added to the variance in every LayerNorm.
        norm_first: as in :class:`DecoderConfig`.
        padding_idx: a row of the token table that gets no gradient; None is none.
        dropout: probability of dropout after the embedding, and before every residual sum.
        attention_dropout: probability of dropping a weight of attention.
        init_std: standard deviation of the initial weights, as in :class:`DecoderConfig`.
        device: of the parameters; None is torch's default.
        dtype: of the parameters; None is torch's default.
        recipe: of :mod:`opfuser.recipe`, as in :class:`DecoderConfig`.

    Raises:
        ArgumentError: as for :class:`DecoderConfig`.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int | None = None
    num_positions: int = 512
    num_types: int = 2
    activation: str = "gelu"
    norm_eps: float = 1e-12
    norm_first: bool = False
    padding_idx: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        self.blocks()  # which refuses what is wrong

    @classmethod
    def from_hf(cls, config: Any, **changes: Any) -> EncoderConfig:
        """As :meth:`DecoderConfig.from_hf`, of ``model_type`` bert.

        Args:
            config: a ``PreTrainedConfig``, or an object with its attributes.
            **changes: attributes of the result.

        Raises:
            NotSupportedError: a model of another type, or with a feature that this class has no
                attribute for.
        """
        return cls(**{**encoder_arguments(config), **changes})

    def blocks(self) -> DecoderConfig:
        """The configuration of its blocks."""
        return encoder_blocks(
            self,
            vocab_size=self.vocab_size,
            learned_positions=self.num_positions,
            padding_idx=self.padding_idx,
            qkv_bias=True,
            norm_first=self.norm_first,
            embedding_dropout=self.dropout,
        )


def text_encoder(config: EncoderConfig) -> Sequential:
    """An encoder of text, as one Sequential: a vector for each token.

    Its modules are ``embedding``, ``types``, ``positions``, ``embedding_norm``, ``dropout`` if
    there is any, ``layers`` and, with ``norm_first``, ``norm``.

    Args:
        config: of the model.

    Call:
        ``model(tokens, types)``: the hidden states ``(batch, sequence, dim)``. Both are
        ``(batch, sequence)`` of int32 or int64. A padded batch also takes
        ``op_kwargs=attention_kwargs(model, mask=mask)``, where ``mask`` is ``(batch, sequence)``
        of bool, True where there is no padding.

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
    Understanding", 2018, arXiv 1810.04805.
    """
    to: dict[str, Any] = {"device": config.device, "dtype": config.dtype}
    tables = {
        "embedding": Embedding(config.vocab_size, config.dim, padding_idx=config.padding_idx, **to),
        "types": AddEmbedding(config.num_types, config.dim, **to),
        "positions": PositionEmbedding(config.num_positions, config.dim, **to),
    }
    for table in tables.values():
        nn.init.normal_(table.weight, std=config.init_std)
    if config.padding_idx is not None:
        nn.init.zeros_(tables["embedding"].weight[config.padding_idx])
    modules: dict[str, nn.Module] = {**tables}
    modules["embedding_norm"] = LayerNorm(config.dim, eps=config.norm_eps, **to)
    if config.dropout:
        modules["dropout"] = Dropout(config.dropout)
    modules["layers"] = decoder_layers(config.blocks())
    if config.norm_first:
        modules["norm"] = LayerNorm(config.dim, eps=config.norm_eps, **to)
    return Sequential(modules)


def attention_kwargs(model: nn.Module, **keywords: Any) -> Mapping[nn.Module, dict[str, Any]]:
    """The ``op_kwargs`` that pass the same keywords, such as ``mask``, to every attention.

    Args:
        model: the Sequential to call with them.
        **keywords: of a call of :class:`opfuser.DotProductAttention`.
    """
    found = (op for op in model.modules() if isinstance(op, DotProductAttention))
    return {op: dict(keywords) for op in found}
