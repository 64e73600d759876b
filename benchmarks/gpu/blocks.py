"""Training steps of blocks: wall time, memory, and at the smallest size host time.

Blocks are pre-norm SwiGLU, attention + SwiGLU (both Llama-shaped, f = 3.5 d), and the one of GPT
(LayerNorm, GELU, biases, f = 4 d) without and with dropout. A step is forward and backward, for the
gradients of the input and of all parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import opfuser
from benchmarks import timing
from benchmarks.gpu import peer_blocks, peers, replay, torch_models
from benchmarks.gpu.contest import solve
from benchmarks.gpu.engine_layers import EngineLayer, LayerKind
from benchmarks.gpu.gemm_problems import in_float64
from benchmarks.gpu.problem import (
    RANDOM_TOLERANCE,
    STEP,
    STEP_AS_GRAPH,
    STEP_BY_CALLER,
    Case,
    Function,
    Options,
    Problem,
    Row,
    norms,
)
from benchmarks.gpu.row_problems import DROPOUT, EPS, drawing
from benchmarks.gpu.torch_models import Parts, share
from opfuser.models import DecoderConfig, decoder_layer, swiglu_block

MODES = ("default",)  # autotuning the GEMMs takes minutes per size
CALLS = 5  # in a row, per sample
HOST_CALLS = 20
HOST_BOUND = 2**21  # elements of the input
LONGEST = 4096  # sequence
# Gradients through attention have larger errors than those of one operation.
ATTENTION_TOLERANCE = {torch.bfloat16: 4e-2}

SIZES: tuple[Mapping[str, int], ...] = (
    {"dim": 4096, "tokens": 8192},
    {"dim": 1024, "tokens": 2048},
    {"dim": 256, "tokens": 128},  # host time
    {"dim": 1024, "tokens": 8192},
    {"dim": 1024, "tokens": 16384},
    {"dim": 4096, "tokens": 2048},
    {"dim": 4096, "tokens": 16384},
    {"dim": 2048, "tokens": 8192},
)
FEW_SIZES = SIZES[:3]
TINY = {"dim": 64, "tokens": 8}
COMPILED = (0, 1, 2)


def calls(dim: int) -> int:
    return HOST_CALLS if dim <= 256 else CALLS


def passes(options: Options, dim: int, tokens: int) -> dict[str, None]:
    """The passes to measure; where the host is the limit, also those that reduce host time."""
    if dim * tokens > HOST_BOUND:
        return {STEP: None}
    graph = [] if options.tiny else [STEP_AS_GRAPH]
    return dict.fromkeys([STEP, STEP_BY_CALLER, *graph])


def decoder_config(options: Options, dim: int) -> DecoderConfig:
    heads = max(2, dim // 128)
    return DecoderConfig(
        vocab_size=1,
        dim=dim,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=max(1, heads // 4),
        ffn_dim=dim * 7 // 2,
        norm_eps=EPS,
        device=options.device,
        dtype=options.dtype,
    )


def gemms(x: Tensor, shapes: list[tuple[int, int]]) -> timing.Call:
    """Forward, input gradient and weight gradient of linears with weights (out, in)."""
    operands = [
        tuple(
            torch.randn(shape, device=x.device).to(x.dtype)
            for shape in ((out, in_), (len(x), in_), (len(x), out))
        )
        for out, in_ in shapes
    ]

    def step() -> None:
        for w, a, dy in operands:
            torch.mm(a, w.t())
            torch.mm(dy, w)
            torch.mm(dy.t(), a)

    return step


def swiglu(options: Options, dim: int, tokens: int) -> Problem:
    config = decoder_config(options, dim)
    source = torch_models.swiglu_block(config, Parts())
    randomize(source)
    norm, fc1, fc2 = parameters = tuple(source.parameters())
    functions: dict[str, Function] = {
        "opfuser": share(swiglu_block(config), source),
        **replay.replayed(share(swiglu_block(config), source), options.device),
        "opfuser, recompute": share(swiglu_block(replace(config, recompute="mlp")), source),
        "torch": source,
        **peer_blocks.with_parts(
            lambda parts: share(torch_models.swiglu_block(config, parts), source), peers.LIGER
        ),
        **peer_blocks.swiglu_block(norm, fc1, fc2, EPS),
    }
    ffn = config.ffn_features
    return Problem(
        drawing(options, ((tokens, dim),), ((tokens, dim),)),
        functions,
        passes(options, dim, tokens),
        parameters,
        floor=lambda x: gemms(x, [(2 * ffn, dim), (dim, ffn)]),
        exact=partial(in_float64, source),
        wall=calls(dim),
        left_out=replay.left_out(options.device),
    )


def attention_swiglu(options: Options, dim: int, tokens: int) -> Problem:
    config = decoder_config(options, dim)
    length = min(tokens, LONGEST)
    kind = LayerKind(config.num_heads, EPS, rotary_length=length, gated=True)
    shape = (tokens // length, length, dim)
    source = torch_models.decoder_layer(config, Parts(), length)
    randomize(source)
    functions: dict[str, Function] = {
        "opfuser": share(decoder_layer(config), source),
        **replay.replayed(share(decoder_layer(config), source), options.device),
        "torch": source,
        **peer_blocks.with_parts(
            lambda parts: share(torch_models.decoder_layer(config, parts, length), source),
            peers.LIGER,
        ),
        **peer_blocks.decoder_layer(source, EPS),
        **peers.peer(peers.TE, lambda: EngineLayer(source, kind, num_gqa_groups=config.key_heads)),
    }
    return Problem(
        drawing(options, (shape,), (shape,)),
        functions,
        passes(options, dim, tokens),
        tuple(source.parameters()),
        tolerance=ATTENTION_TOLERANCE.get(options.dtype),
        exact=partial(in_float64, source),
        wall=calls(dim),
        left_out=replay.left_out(options.device),
    )


def gpt(options: Options, dim: int, tokens: int, dropout: float = 0.0) -> Problem:
    to = {"device": options.device, "dtype": options.dtype}
    hidden = 4 * dim
    source = torch_models.gpt_block(dim, hidden, dropout, EPS, to)
    randomize(source)
    parameters = tuple(source.parameters())

    def ours() -> nn.Module:
        block = opfuser.Residual(
            opfuser.LayerNorm(dim, eps=EPS, **to),
            opfuser.Linear(dim, hidden, **to),
            opfuser.GELU(),
            opfuser.Linear(hidden, dim, **to),
            *([opfuser.Dropout(dropout)] if dropout else []),
        )
        return share(block, source)

    functions: dict[str, Function] = {
        "opfuser": ours(),
        **replay.replayed(ours(), options.device),
        "torch": source,
    }
    if not dropout:
        functions.update(peer_blocks.gpt_block(parameters, EPS))
    return Problem(
        drawing(options, ((tokens, dim),), ((tokens, dim),)),
        functions,
        passes(options, dim, tokens),
        parameters,
        floor=lambda x: gemms(x, [(hidden, dim), (dim, hidden)]),
        observe=norms if dropout else list,
        exact=None if dropout else partial(in_float64, source),
        tolerance=RANDOM_TOLERANCE if dropout else None,
        wall=calls(dim),
        left_out=replay.left_out(options.device),
    )


def gpt_dropout(options: Options, dim: int, tokens: int) -> Problem:
    return gpt(options, dim, tokens, DROPOUT)


@torch.no_grad()
def randomize(module: nn.Module) -> None:
    """Sets weights that preserve magnitudes, and norms and biases near one and zero."""
    for name, p in module.named_parameters():
        if p.dim() == 2:
            p.normal_(std=p.shape[1] ** -0.5)
        else:
            p.normal_(std=0.1).add_(0.0 if name.endswith("bias") else 1.0)


CASES = (
    Case("SwiGLU block", swiglu, SIZES, TINY, COMPILED),
    Case("attention + SwiGLU block", attention_swiglu, SIZES, TINY, COMPILED),
    Case("GPT block", gpt, SIZES, TINY, COMPILED),
    Case("GPT block, dropout", gpt_dropout, FEW_SIZES, {"dim": 512, "tokens": 64}, (0,)),
)


def rows(options: Options) -> Iterator[Row]:
    modes = MODES if options.modes is None else options.modes
    for case in CASES:
        yield from solve(case, options, modes)
