"""Encoders of images: ViT."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opfuser import Dropout, LayerNorm, Linear, PositionEmbedding, Sequential
from opfuser.errors import ArgumentError, InputError
from opfuser.recipe import Recipe

from .config import DecoderConfig, encoder_blocks
from .decoder import decoder_layers
from .hf_config import image_encoder_arguments


@dataclass(frozen=True)
class ImageEncoderConfig:
    """Sizes of an encoder of images, and where its parameters live.

    Attributes:
        image_size: rows and columns of an image, or one number for both.
        patch_size: rows and columns of a patch, which divide those of the image.
        dim: features of a patch between the blocks.
        num_layers: pairs of an attention block and a feed-forward block.
        num_heads: heads, each of ``dim / num_heads`` features.
        ffn_dim: features inside the feed-forward block; None is ``4 dim``.
        channels: of an image.
        qkv_bias: whether queries, keys and values have a bias.
        activation: of the feed-forward block, as in :class:`DecoderConfig`.
        norm_eps: added to the variance in every LayerNorm.
        dropout: probability of dropout after the embedding, and before every residual sum.
        attention_dropout: probability of dropping a weight of attention.
        init_std: standard deviation of the initial weights, as in :class:`DecoderConfig`.
        device: of the parameters; None is torch's default.
        dtype: of the parameters; None is torch's default.
        recipe: of :mod:`opfuser.recipe`, as in :class:`DecoderConfig`.

    Raises:
        ArgumentError: patches do not fit; or as for :class:`DecoderConfig`.
    """

    image_size: int | tuple[int, int]
    patch_size: int | tuple[int, int]
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int | None = None
    channels: int = 3
    qkv_bias: bool = True
    activation: str = "gelu"
    norm_eps: float = 1e-12
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        sizes = zip(_pair(self.image_size), _pair(self.patch_size))
        if self.channels < 1 or any(patch < 1 or whole % patch for whole, patch in sizes):
            received = f"image_size={self.image_size}, patch_size={self.patch_size}"
            raise ArgumentError.explained(
                "An image consists of one or more channels and a whole number of patches",
                where="ImageEncoderConfig",
                received=f"{received}, channels={self.channels}",
            )
        self.blocks()  # which refuses what is wrong

    @classmethod
    def from_hf(cls, config: Any, **changes: Any) -> ImageEncoderConfig:
        """As :meth:`DecoderConfig.from_hf`, of ``model_type`` vit.

        Args:
            config: a ``PreTrainedConfig``, or an object with its attributes.
            **changes: attributes of the result.

        Raises:
            NotSupportedError: a model of another type, or with a feature that this class has no
                attribute for.
        """
        return cls(**{**image_encoder_arguments(config), **changes})

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        (height, width), (rows, cols) = _pair(self.image_size), _pair(self.patch_size)
        return (height // rows) * (width // cols)

    def blocks(self) -> DecoderConfig:
        """The configuration of its blocks, without a vocabulary."""
        return encoder_blocks(
            self, vocab_size=1, learned_positions=1 + self.num_patches, qkv_bias=self.qkv_bias
        )


class Patches(nn.Module):
    """The patches of images, row by row, as vectors: channels first, then rows, then columns.

    Shapes: from ``(batch, channels, height, width)`` to
    ``(batch, patches, channels * rows * columns of a patch)``.

    Args:
        image_size: height and width.
        patch_size: rows and columns of a patch.

    Raises:
        InputError: in forward, if the images are of another size.
    """

    def __init__(self, image_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
        super().__init__()
        self.image_size = image_size
        self.patch_size = patch_size

    def forward(self, images: Tensor) -> Tensor:
        """The patches."""
        if images.dim() != 4 or tuple(images.shape[2:]) != self.image_size:
            height, width = self.image_size
            raise InputError.explained(
                f"Images must be (batch, channels, {height}, {width})",
                where="Patches",
                received=f"shape {tuple(images.shape)}",
            )
        rows, cols = self.patch_size
        batch, channels, height, width = images.shape
        rows, cols = self.patch_size
        parts = images.reshape(batch, channels, height // rows, rows, width // cols, cols)
        return parts.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def extra_repr(self) -> str:
        """Sizes of image and patch."""
        return f"{self.image_size}, {self.patch_size}"


class ClassToken(nn.Module):
    """Puts a learned vector in front of each sequence: (batch, s, dim) to (batch, s + 1, dim).

    Args:
        dim: features.
        device: of the vector; None is torch's default.
        dtype: of the vector; None is torch's default.
    """

    def __init__(
        self,
        dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the vector from the standard normal distribution."""
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The longer sequences, in the dtype of ``x``."""
        first = self.weight.to(x.dtype).expand(x.shape[0], 1, -1)
        return torch.cat([first, x], 1)


def image_encoder(config: ImageEncoderConfig) -> Sequential:
    """An encoder of images, as one Sequential: a vector for each patch.

    Its modules are ``patches``, ``embedding``, ``class_token``, ``positions``, ``dropout`` if there
    is any, ``layers`` and ``norm``.

    Args:
        config: of the model.

    Call:
        ``model(images)``: from (batch, channels, height, width) to the hidden states
        (batch, 1 + patches, dim), of which the first one is that of the class token.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020, arXiv 2010.11929.
    """
    to: dict[str, Any] = {"device": config.device, "dtype": config.dtype}
    rows, cols = patch = _pair(config.patch_size)
    embedding = Linear(config.channels * rows * cols, config.dim, **to)
    positions = PositionEmbedding(1 + config.num_patches, config.dim, **to)
    token = ClassToken(config.dim, **to)
    initial = partial(nn.init.normal_, std=config.init_std)
    embedding.initialize_weight(initial)
    for weight in (positions.weight, token.weight):
        initial(weight)
    modules: dict[str, nn.Module] = {
        "patches": Patches(_pair(config.image_size), patch),
        "embedding": embedding,
        "class_token": token,
        "positions": positions,
    }
    if config.dropout:
        modules["dropout"] = Dropout(config.dropout)
    modules["layers"] = decoder_layers(config.blocks())
    modules["norm"] = LayerNorm(config.dim, eps=config.norm_eps, **to)
    return Sequential(modules)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Rows and columns."""
    if isinstance(size, int):
        return size, size
    rows, cols = size
    return rows, cols
