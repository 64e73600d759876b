"""Training step of a whole decoder: embedding, layers, norm, head and loss, with or without AdamW.

One model has the sizes of Llama 3.2 1B, one is a slice of two layers of Llama 3 8B with its whole
vocabulary. AdamW has a learning rate of 0, so that all contestants keep the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from benchmarks.gpu import peer_blocks
from benchmarks.gpu.blocks import randomize
from benchmarks.gpu.contest import solve
from benchmarks.gpu.problem import STEP, Case, Function, Inputs, Options, Problem, Row
from benchmarks.gpu.torch_models import DecoderLM, Parts, share
from opfuser.models import DecoderConfig, decoder_lm

MODES = ("default",)  # autotuning the GEMMs takes minutes
# Rounding errors of forward grow through all layers.
TOLERANCE = {torch.bfloat16: 0.1}

LLAMA_1B = {"vocab_size": 128256, "dim": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 8192}
LLAMA_8B = {"vocab_size": 128256, "dim": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336}
SMALL = {"vocab_size": 67, "dim": 32, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64}


def adamw_update(parameters: Sequence[nn.Parameter]) -> Callable[[Sequence[Tensor]], None]:
    """A step of AdamW from given gradients; the parameters keep their values."""
    optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)

    def update(gradients: Sequence[Tensor]) -> None:
        for p, gradient in zip(parameters, gradients):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    return update


def decoder_config(options: Options, sizes: Mapping[str, int], layers: int) -> DecoderConfig:
    return DecoderConfig(
        **sizes,
        num_layers=layers,
        tied_head=sizes is not LLAMA_8B,
        device=options.device,
        dtype=options.dtype,
    )


def batches(options: Options, classes: int, batch: int, length: int) -> Callable[[], Inputs]:
    """Random tokens and targets, and the gradient of the loss."""

    def draw() -> Inputs:
        tokens = torch.randint(classes, (2, batch, length), device=options.device)
        return Inputs((tokens[0], tokens[1]), (torch.ones((), device=options.device),))

    return draw


def training(
    options: Options, sizes: Mapping[str, int], layers: int, batch: int, length: int, adamw: int
) -> Problem:
    config = decoder_config(options, sizes, layers)
    source = DecoderLM(config, Parts(), length)
    randomize(source)
    parameters = tuple(source.parameters())
    functions: dict[str, Function] = {
        "opfuser": share(decoder_lm(config), source),
        "torch": source,
        **peer_blocks.with_parts(lambda parts: share(DecoderLM(config, parts, length), source)),
    }
    return Problem(
        batches(options, config.vocab_size, batch, length),
        functions,
        {STEP: None},
        parameters,
        tolerance=TOLERANCE.get(options.dtype),
        wall=1,
        after=adamw_update(parameters) if adamw else None,
    )


def llama_1b(options: Options, layers: int, batch: int, length: int, adamw: int) -> Problem:
    sizes = SMALL if options.tiny else LLAMA_1B
    return training(options, sizes, layers, batch, length, adamw)


def llama_8b(options: Options, layers: int, batch: int, length: int, adamw: int) -> Problem:
    sizes = SMALL if options.tiny else LLAMA_8B
    return training(options, sizes, layers, batch, length, adamw)


TINY = {"layers": 1, "batch": 2, "length": 4}
CASES = (
    Case(
        "Llama 8B, slice",
        llama_8b,
        (
            {"layers": 2, "batch": 2, "length": 4096, "adamw": 0},
            {"layers": 2, "batch": 2, "length": 4096, "adamw": 1},
        ),
        {**TINY, "adamw": 0},
    ),
    Case(
        "Llama 1B",
        llama_1b,
        (
            {"layers": 16, "batch": 2, "length": 4096, "adamw": 0},
            {"layers": 16, "batch": 2, "length": 4096, "adamw": 1},
        ),
        {**TINY, "adamw": 1},
    ),
)


def rows(options: Options) -> Iterator[Row]:
    modes = MODES if options.modes is None else options.modes
    for case in CASES:
        for row in solve(case, options, modes):
            if "median_us" in row:
                tokens = row["size"]["batch"] * row["size"]["length"]
                row["tokens_per_s"] = tokens / row["median_us"] * 1e6
            yield row
