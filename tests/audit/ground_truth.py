"""Small models of which it is known what could be fused in them, and is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from opfuser.models import DecoderConfig, decoder_layer

D = 32


class AdaptiveNorms(nn.Module):
    """Norms without weights, modulated by what a condition says, as in diffusion transformers."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.modulations = nn.ModuleList(nn.Linear(D, 2 * D) for _ in range(depth))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for modulation in self.modulations:
            shift, scale = modulation(condition)[:, None].chunk(2, dim=-1)
            x = torch.sin(F.layer_norm(x, (D,), eps=1e-6) * (1 + scale) + shift)
        return x


class Attention(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.packed = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        hidden = torch.ones(x.shape[1], x.shape[1], device=x.device).tril() == 0
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        mixed = F.dropout(weights, 0.1, self.training) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Attentions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sin(self.first(x)))


class WrittenNorms(nn.Module):
    """Each norm as papers write it, once with a helper that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(D))
        self.weight, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def rms(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cos(self.rms(torch.sin(self.rms(x))))
        centered = x - x.mean(-1, keepdim=True)
        variance = centered.square().mean(-1, keepdim=True)
        return torch.sin(centered / torch.sqrt(variance + 1e-5) * self.weight + self.bias)


class WrittenLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(D, 48)), nn.Parameter(torch.zeros(48))
        self.v, self.c = nn.Parameter(torch.randn(16, 48)), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(x @ self.w + self.b)
        return torch.sin(torch.matmul(hidden, self.v.t()) + self.c)


class WrittenGates(nn.Module):
    """x · sigmoid(x) · up, in two associations, and with torch's silu."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.ModuleList(nn.Linear(D, 2 * D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both[0](x).chunk(2, dim=-1)
        x = torch.sin(gate * torch.sigmoid(gate) * up)
        gate, up = self.both[1](x).chunk(2, dim=-1)
        x = torch.sin(up * (gate * torch.sigmoid(gate)))
        gate, up = self.both[2](x).chunk(2, dim=-1)
        return torch.sin(F.silu(gate) * up)


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.norm(x))


class ResidualNorms(nn.Module):
    """The sum at the end of a block is what the norm of the next one reads."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cos(x)
        for block in self.blocks:
            x = block(x)
        return x


class DropoutSums(nn.Module):
    """residual + dropout(y + bias), with nothing to fuse before or behind."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.biases = nn.ParameterList(torch.zeros(D) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for bias in self.biases:
            y = torch.cos(x)
            x = torch.sin(x + F.dropout(y + bias, 0.1, self.training))
        return x


class EmbeddedNorms(nn.Module):
    """The embeddings of BERT: tables, their sum, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, D), nn.Embedding(9, D)
        self.norm = nn.LayerNorm(D)
        self.others, self.other_norm = nn.Embedding(11, D), nn.RMSNorm(D)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = torch.sin(self.norm(self.words(tokens) + self.places(places)))
        return x + torch.cos(self.other_norm(self.others(tokens)))


class DiTBlock(nn.Module):
    """A block of a diffusion transformer, with adaLN-Zero (Peebles and Xie, 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        six = self.modulation(condition)[:, None].chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = six
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        hidden = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(hidden), approximate="tanh"))


def fused() -> nn.Module:
    """A model of opfuser in which everything fuses."""
    config = DecoderConfig(
        vocab_size=1, dim=D, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48
    )
    return opfuser.Sequential(*(decoder_layer(config) for _ in range(2)))


def plain() -> nn.Module:
    """A model of torch for which there is nothing better."""
    convolution = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*convolution, nn.Linear(36, 5), nn.Softmax(-1))


class Truth(NamedTuple):
    """A model, the shapes of its inputs, and each fused operation that it misses.

    ``missed`` has how many sites there are, and how often these are called: a loop is one site.
    """

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    missed: dict[str, tuple[int, int]]
    dtype: torch.dtype = torch.float32

    def build(self, device: str = "meta") -> tuple[nn.Module, tuple[Tensor, ...]]:
        with torch.device(device):
            inputs: Any = [torch.ones(shape, dtype=self.dtype) for shape in self.shapes]
            if self.dtype.is_floating_point:
                inputs[0].requires_grad_()
            return self.make(), tuple(inputs)


X = ((2, 8, D),)
TRUTHS: dict[str, Truth] = {
    "adaptive norms": Truth(AdaptiveNorms, (*X, (2, D)), {"adaptive_layer_norm": (1, 2)}),
    "attention": Truth(Attentions, X, {"attention": (2, 2)}),
    "norms": Truth(WrittenNorms, X, {"rms_norm": (2, 2), "layer_norm": (1, 1)}),
    "matmul and bias": Truth(WrittenLinears, X, {"linear": (2, 2)}),
    "gates": Truth(WrittenGates, X, {"swiglu": (3, 3)}),
    "residual and norm": Truth(
        ResidualNorms,
        X,
        {"forward_add_layer_norm": (2, 2), "backward_add_layer_norm": (3, 3)},
    ),
    "bias, dropout, residual": Truth(DropoutSums, X, {"pointwise_chain": (1, 2)}),
    "embedding and norm": Truth(EmbeddedNorms, ((2, 8),), {"embedding_norm": (2, 2)}, torch.int64),
    "diffusion transformer": Truth(
        DiTBlock,
        (*X, (2, D)),
        {"adaptive_layer_norm": (2, 2), "attention": (1, 1), "activation_linear": (1, 1)},
    ),
    "nothing, of opfuser": Truth(fused, X, {}),
    "nothing, of torch": Truth(plain, ((2, 3, 8, 8),), {}),
}
