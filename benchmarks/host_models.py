"""Models so small that host overhead is nearly all of their time: of opfuser, and of torch.nn.

Both sides of a case hold the same parameters, and are written as a user would write them for speed.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from gpu import gpt_layers, torch_models
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from opfuser.models import DecoderConfig, decoder_layer

WIDTH = 8  # of the operations that are counted
DIM, HEADS, TOKENS, CLASSES = 64, 4, 32, 128  # of all other models


@dataclass(frozen=True)
class Case:
    """Two models that compute the same.

    Attributes:
        name: what they are.
        operations: by which the time is divided.
        build: from a device, opfuser's model, torch's model, and the inputs of both.
    """

    name: str
    operations: int
    build: Callable[[torch.device], tuple[nn.Module, nn.Module, tuple[Tensor, ...]]]


class Scale(nn.Module):
    """ConstantScale as a user of torch.nn would write it."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Bias(nn.Module):
    """Bias as a user of torch.nn would write it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class HuggingFace(nn.Module):
    """The mean loss of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=targets).loss
        return loss


class Loss(nn.Module):
    """A model of logits, and the mean cross entropy of its predictions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def config(**to: Any) -> DecoderConfig:
    return DecoderConfig(CLASSES, DIM, 1, HEADS, ffn_dim=2 * DIM, **to)


def gpt_block(**to: Any) -> list[nn.Module]:
    return gpt_layers.our_layer(DIM, HEADS, to)


def torch_gpt_block(**to: Any) -> list[nn.Module]:
    return gpt_layers.torch_layer(DIM, HEADS, lambda: nn.LayerNorm(DIM, **to), to)


def language_model(layers: int, **to: Any) -> nn.Module:
    return opfuser.Sequential(
        opfuser.Embedding(CLASSES, DIM, **to),
        *(block for _ in range(layers) for block in gpt_block(**to)),
        opfuser.LayerNorm(DIM, **to),
        opfuser.Linear(DIM, CLASSES, **to),
        opfuser.CrossEntropy(),
    )


def torch_language_model(layers: int, **to: Any) -> nn.Module:
    return Loss(
        nn.Sequential(
            nn.Embedding(CLASSES, DIM, **to),
            *(block for _ in range(layers) for block in torch_gpt_block(**to)),
            nn.LayerNorm(DIM, **to),
            nn.Linear(DIM, CLASSES, **to),
        )
    )


def counted(
    name: str, count: int, ours: Callable[[], nn.Module], theirs: Callable[[], nn.Module]
) -> Case:
    """A sequence of equal operations over WIDTH elements."""

    def build(device: torch.device) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
        own = opfuser.Sequential(*(ours() for _ in range(count))).to(device)
        other = nn.Sequential(*(theirs() for _ in range(count))).to(device)
        return own, other, (torch.ones(1, WIDTH, device=device),)

    return Case(f"{name} x {count}", count, build)


def whole(
    name: str, ours: Callable[..., nn.Module], theirs: Callable[..., nn.Module], *shape: int
) -> Case:
    """A model of one input of floats."""

    def build(device: torch.device) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
        own = ours(device=device)
        return own, torch_models.share(theirs(device=device), own), (
            torch.randn(*shape, device=device),
        )  # fmt: skip

    return Case(name, 1, build)


def trained(name: str, layers: int) -> Case:
    """A language model with its loss."""

    def build(device: torch.device) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
        own = language_model(layers, device=device)
        other = torch_models.share(torch_language_model(layers, device=device), own)
        tokens = torch.randint(CLASSES, (1, TOKENS), device=device)
        return own, other, (tokens, tokens.roll(-1))

    return Case(name, 1, build)


def applied(name: str, layers: int) -> Case:
    """A Llama of transformers after ``opfuser.hf.apply``, and the same untouched."""

    def build(device: torch.device) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
        made: Any = importlib.import_module("transformers")
        sizes = {"vocab_size": CLASSES, "hidden_size": DIM, "intermediate_size": 2 * DIM}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
        config = made.LlamaConfig(**sizes, **heads, num_hidden_layers=layers, eos_token_id=2)
        other = made.LlamaForCausalLM(config).to(device)
        own = copy.deepcopy(other)
        importlib.import_module("opfuser.hf").apply(own)
        tokens = torch.randint(CLASSES, (1, TOKENS), device=device)
        return HuggingFace(own), HuggingFace(other), (tokens, tokens)

    return Case(name, 1, build)


CASES = (
    *(
        case
        for count in (4, 64)
        for case in (
            counted("scale", count, lambda: opfuser.ConstantScale(1.01), lambda: Scale(1.01)),
            counted("bias", count, lambda: opfuser.Bias(WIDTH, device="cpu"), lambda: Bias(WIDTH)),
        )
    ),
    whole(
        "RMSNorm",
        lambda **to: opfuser.RMSNorm(DIM, **to),
        lambda **to: nn.RMSNorm(DIM, 1e-5, **to),
        TOKENS,
        DIM,
    ),
    whole(
        "LayerNorm",
        lambda **to: opfuser.LayerNorm(DIM, **to),
        lambda **to: nn.LayerNorm(DIM, **to),
        TOKENS,
        DIM,
    ),
    whole(
        "linear + bias + GELU",
        lambda **to: opfuser.Sequential(opfuser.Linear(DIM, DIM, **to), opfuser.GELU()),
        lambda **to: nn.Sequential(nn.Linear(DIM, DIM, **to), nn.GELU(approximate="tanh")),
        TOKENS,
        DIM,
    ),
    whole(
        "GPT block",
        lambda **to: opfuser.Sequential(*gpt_block(**to)),
        lambda **to: nn.Sequential(*torch_gpt_block(**to)),
        1,
        TOKENS,
        DIM,
    ),
    whole(
        "Llama block",
        lambda **to: decoder_layer(config(**to)),
        lambda **to: torch_models.decoder_layer(config(**to), torch_models.Parts(), TOKENS),
        1,
        TOKENS,
        DIM,
    ),
    trained("language model, 1 layer", 1),
    trained("language model, 4 layers", 4),
    *([applied("hf.apply, Llama, 2 layers", 2)] if find_spec("transformers") else []),
)
