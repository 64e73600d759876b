"""Training steps of whole small models, with AdamW whose learning rate is 0."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gpu import peer_blocks, peers, replay
from benchmarks.gpu.blocks import randomize
from benchmarks.gpu.engine_layers import LayerKind, engine_model
from benchmarks.gpu.model import TOLERANCE, adamw_update
from benchmarks.gpu.problem import OURS, REFERENCE, STEP, Case, Function, Inputs, Options, Problem
from benchmarks.gpu.small_models import EPS, GPT, HEAD_DIM, PATCH, Config, OurGPT, ViT, our_vit
from benchmarks.gpu.torch_models import DecoderLM, Parts, share
from opfuser.models import DecoderConfig, decoder_lm

CALLS = 5  # in a row, per sample
GRAPHED = "opfuser, graphed callables"


@dataclass(frozen=True)
class Builders:
    """How to make a model and its inputs.

    Attributes:
        libraries: those that replace parts of the torch model; none stands for all.
        layer: of Transformer Engine.
    """

    in_torch: Callable[[Parts], nn.Module]
    ours: Callable[[], nn.Module]
    draw: Callable[[], Inputs]
    libraries: tuple[str, ...]
    layer: LayerKind


def training(options: Options, builders: Builders) -> Problem:
    source = builders.in_torch(Parts())
    randomize(source)
    parameters = tuple(source.parameters())

    def ours() -> nn.Module:
        return share(builders.ours(), source)

    def in_torch(parts: Parts) -> nn.Module:
        return share(builders.in_torch(parts), source)

    left_out = replay.left_out(options.device)
    functions: dict[str, Function] = {
        OURS: ours(),
        **replay.replayed(ours(), options.device),
        REFERENCE: source,
        **peer_blocks.with_parts(in_torch, *builders.libraries),
        **engine_model(lambda: in_torch(Parts()), builders.layer),
    }
    if options.tiny:
        left_out[GRAPHED] = "CUDA graphs need a CUDA device"
    else:
        functions[GRAPHED] = graphed(ours())
    return Problem(
        builders.draw,
        functions,
        {STEP: None},
        parameters,
        tolerance=TOLERANCE.get(options.dtype),
        exact=lambda inputs: in_fp32(source, inputs),
        wall=CALLS,
        after=adamw_update(parameters),
        input_grads=False,
        left_out=left_out,
    )


def in_fp32(source: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The loss and the gradients of the same model in fp32: in bf16, torch is no reference."""
    model = copy.deepcopy(source).float()
    args = (t.float() if t.is_floating_point() else t for t in inputs.args)
    loss = model(*args)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), inputs.grads)]


def graphed(model: nn.Module) -> Function:
    """The model in ``torch.cuda.make_graphed_callables``, captured at its first call."""
    made: list[Function] = []

    def function(*args: Tensor) -> Tensor:
        if not made:
            samples = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in args)
            made.append(torch.cuda.make_graphed_callables(model, samples))
        loss: Tensor = made[0](*args)
        return loss

    return function


def drawing(options: Options, *shape: int, classes: int) -> Callable[[], Inputs]:
    """Tokens, and those to predict."""

    def draw() -> Inputs:
        tokens, targets = torch.randint(classes, (2, *shape), device=options.device)
        return Inputs((tokens, targets), (torch.ones((), device=options.device),))

    return draw


def gpt(options: Options, layers: int, dim: int, batch: int, length: int, classes: int) -> Problem:
    to = {"device": options.device, "dtype": options.dtype}
    config = Config(layers, dim, length, classes, to=to)
    builders = Builders(
        lambda parts: GPT(config, parts),
        lambda: OurGPT(config),
        drawing(options, batch, length, classes=classes),
        (peers.LIGER,),
        LayerKind(config.heads, EPS),
    )
    return training(options, builders)


def llama(
    options: Options, layers: int, dim: int, ffn: int, batch: int, length: int, classes: int
) -> Problem:
    config = DecoderConfig(
        classes,
        dim,
        layers,
        dim // HEAD_DIM,
        ffn_dim=ffn,
        tied_head=False,
        device=options.device,
        dtype=options.dtype,
    )
    builders = Builders(
        lambda parts: DecoderLM(config, parts, length),
        lambda: decoder_lm(config),
        drawing(options, batch, length, classes=classes),
        (),
        LayerKind(config.num_heads, config.norm_eps, rotary_length=length, gated=True),
    )
    return training(options, builders)


def vit(options: Options, layers: int, dim: int, batch: int, pixels: int, classes: int) -> Problem:
    to = {"device": options.device, "dtype": options.dtype}
    config = Config(layers, dim, (pixels // PATCH) ** 2 + 1, classes, causal=False, to=to)

    def draw() -> Inputs:
        images = torch.randn(batch, 3, pixels, pixels, **to)
        targets = torch.randint(classes, (batch,), device=options.device)
        return Inputs((images, targets), (torch.ones((), device=options.device),))

    builders = Builders(
        lambda parts: ViT(config, parts),
        lambda: our_vit(config),
        draw,
        (peers.LIGER,),
        LayerKind(config.heads, EPS, causal=False),
    )
    return training(options, builders)


class Entry(NamedTuple):
    """A model of one size, and the modes of torch.compile, the most important first."""

    case: Case
    modes: tuple[str, ...]

    def chosen(self, options: Options) -> tuple[str, ...]:
        """The modes to run."""
        return self.modes if options.modes is None else options.modes


def one_size(name: str, make: Callable[..., Problem], tiny: dict[str, int], **size: int) -> Case:
    return Case(name, make, (size,), {**size, **tiny})


TINY = {"layers": 1, "dim": 2 * HEAD_DIM, "batch": 2, "length": 4, "classes": 67}
TINY_VIT = {"layers": 1, "dim": 2 * HEAD_DIM, "batch": 2, "pixels": 2 * PATCH, "classes": 11}
GPT_2 = {"layers": 12, "dim": 768, "classes": 50257}
FIRST = one_size("GPT 6 x 384", gpt, TINY, layers=6, dim=384, batch=16, length=256, classes=65)
ENTRIES = (
    Entry(FIRST, ("default", "reduce-overhead", "opfuser")),
    Entry(
        one_size("GPT-2 124M, batch 2", gpt, TINY, **GPT_2, batch=2, length=512),
        ("reduce-overhead", "default"),
    ),
    Entry(
        one_size(
            "Llama 60M",
            llama,
            {**TINY, "ffn": 96},
            layers=8,
            dim=512,
            ffn=1376,
            batch=8,
            length=512,
            classes=32000,
        ),
        ("default", "reduce-overhead", "opfuser"),
    ),
    Entry(
        one_size("ViT-S/16", vit, TINY_VIT, layers=12, dim=384, batch=64, pixels=224, classes=1000),
        ("default", "reduce-overhead"),
    ),
    Entry(one_size("GPT-2 124M, batch 8", gpt, TINY, **GPT_2, batch=8, length=1024), ("default",)),
)
