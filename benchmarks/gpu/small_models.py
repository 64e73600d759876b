"""A GPT and a vision transformer, each in torch.nn and of opfuser's operations.

Both have pre-norm layers with LayerNorm, biases, and GELU by tanh; heads have 64 features. The
parameters of the two forms are in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import opfuser
from benchmarks.gpu.gpt_layers import EPS, our_layer, torch_layer
from benchmarks.gpu.torch_models import Parts

HEAD_DIM = 64
PATCH = 16


@dataclass(frozen=True)
class Config:
    """Sizes.

    Attributes:
        length: of the sequences of tokens; for images, that of patches and the class token.
        classes: of the head; for a GPT also rows of the token table.
        to: device and dtype.
    """

    layers: int
    dim: int
    length: int
    classes: int
    causal: bool = True
    to: dict[str, Any] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        return self.dim // HEAD_DIM


class LayerNorm(nn.LayerNorm):
    def __init__(self, config: Config, parts: Parts) -> None:
        super().__init__(config.dim, EPS, **config.to)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return self.parts.layer_norm(x, self.weight, self.bias, self.eps)


def layers(config: Config, parts: Parts) -> nn.Sequential:
    def norm() -> nn.Module:
        return LayerNorm(config, parts)

    how = config.dim, config.heads, norm, config.to
    made = (torch_layer(*how, causal=config.causal) for _ in range(config.layers))
    return nn.Sequential(*(nn.Sequential(*layer) for layer in made))


def our_layers(config: Config) -> opfuser.Sequential:
    how = config.dim, config.heads, config.to
    made = (our_layer(*how, causal=config.causal) for _ in range(config.layers))
    return opfuser.Sequential(*(opfuser.Sequential(*layer) for layer in made))


class GPT(nn.Module):
    """With learned positions, and the token table as the head's weight."""

    def __init__(self, config: Config, parts: Parts) -> None:
        super().__init__()
        dim, to = config.dim, config.to
        self.parts = parts
        self.positions = nn.Parameter(torch.empty(config.length, dim, **to))
        self.embedding = nn.Embedding(config.classes, dim, **to)
        self.layers = layers(config, parts)
        self.norm = LayerNorm(config, parts)
        self.head = nn.Linear(dim, config.classes, bias=False, **to)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.layers(self.embedding(tokens) + self.positions))
        return self.parts.linear_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten())


class OurGPT(nn.Module):
    """The positions are an extra input, so that all operations are one group."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim, to = config.dim, config.to
        self.positions = nn.Parameter(torch.empty(config.length, dim, **to))
        embedding = opfuser.Embedding(config.classes, dim, **to)
        head = opfuser.Linear(dim, config.classes, bias=False, **to)
        head.weight = embedding.weight
        self.body = opfuser.Sequential(
            {
                "embedding": embedding,
                "positions": opfuser.AddExtraInput(),
                "layers": our_layers(config),
                "norm": opfuser.LayerNorm(dim, eps=EPS, **to),
                "head": head,
                "loss": opfuser.CrossEntropy(),
            }
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.body(tokens, self.positions.expand(len(tokens), -1, -1), targets)
        return loss


class Patches(nn.Module):
    """From images (batch, colors, height, width) to (batch, patches, values)."""

    def forward(self, images: Tensor) -> Tensor:
        tiles = images.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
        return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class Tokens(nn.Module):
    """Puts the class token before the patches, and adds learned positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(1, config.dim, **config.to))
        self.positions = nn.Parameter(torch.empty(config.length, config.dim, **config.to))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first.expand(len(x), 1, -1), x], dim=1) + self.positions


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def patch_features() -> int:
    return 3 * PATCH * PATCH


class ViT(nn.Module):
    """From images to the loss of one class for each."""

    def __init__(self, config: Config, parts: Parts) -> None:
        super().__init__()
        dim, to = config.dim, config.to
        self.parts = parts
        first = [Patches(), nn.Linear(patch_features(), dim, **to), Tokens(config)]
        self.embedding = nn.Sequential(*first)
        self.layers = layers(config, parts)
        self.norm = LayerNorm(config, parts)
        self.head = nn.Linear(dim, config.classes, **to)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.layers(self.embedding(images)))[:, 0]
        return self.parts.linear_cross_entropy(x, self.head.weight, targets, self.head.bias)


def our_vit(config: Config) -> opfuser.Sequential:
    """Plain modules, for which there is no operation, separate three groups."""
    dim, to = config.dim, config.to
    return opfuser.Sequential(
        {
            "patches": Patches(),
            "embedding": opfuser.Linear(patch_features(), dim, **to),
            "tokens": Tokens(config),
            "layers": our_layers(config),
            "norm": opfuser.LayerNorm(dim, eps=EPS, **to),
            "first": First(),
            "head": opfuser.Linear(dim, config.classes, **to),
            "loss": opfuser.CrossEntropy(),
        }
    )
