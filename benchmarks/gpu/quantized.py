"""Training steps of blocks in FP8, beside bf16 and Transformer Engine in the same recipes."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import opfuser
from benchmarks.gpu import model as whole
from benchmarks.gpu import peer_blocks, peers, replay, torch_models
from benchmarks.gpu.blocks import LONGEST, calls, decoder_config, gemms, randomize
from benchmarks.gpu.contest import solve
from benchmarks.gpu.engine_layers import EngineLayer, LayerKind
from benchmarks.gpu.problem import STEP, Case, Function, Options, Problem, Row, Within
from benchmarks.gpu.row_problems import EPS, drawing
from benchmarks.gpu.torch_models import Parts, share
from opfuser import recipe as recipes
from opfuser.models import decoder_layer, decoder_lm, swiglu_block

# E5M2 rounds a gradient by up to an eighth, and here gradients pass through several products.
TOLERANCE = 0.2

RECIPES: Mapping[str, recipes.Recipe] = {
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "predicted": recipes.Float8PredictedScaling(),
    "block": recipes.Float8BlockScaling(),
    "delayed, activations saved in FP8": recipes.DelayedScaling(save_activations="fp8"),
}
ENGINE_RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
}
KEPT = "opfuser, delayed, weights kept"

SIZES: tuple[Mapping[str, int], ...] = (
    {"dim": 4096, "tokens": 8192},
    {"dim": 1024, "tokens": 8192},
    {"dim": 1024, "tokens": 16384},
    {"dim": 2048, "tokens": 8192},
)
TINY = {"dim": 128, "tokens": 8}
SMALL = {"vocab_size": 67, "dim": 128, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 256}
TINY_MODEL = {"layers": 1, "length": 4}


def region(recipe: recipes.Recipe) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: opfuser.autocast(recipe=recipe)


class Kept:
    """A module whose quantized weights stay from call to call, as those of micro-batches do."""

    def __init__(self, module: nn.Module, recipe: recipes.Recipe) -> None:
        self.module, self.region = module, region(recipe)
        self.context = contextvars.copy_context()  # so that no other contestant keeps any
        kept = opfuser.keep_quantized_weights()
        self.context.run(kept.__enter__)
        weakref.finalize(self, self.context.run, kept.__exit__, None, None, None)

    def __call__(self, *args: Tensor) -> Any:
        return self.context.run(self._run, *args)

    def _run(self, *args: Tensor) -> Any:
        with self.region():
            return self.module(*args)


def ours(make: Callable[[], nn.Module], source: nn.Module) -> dict[str, Function]:
    """Ours in bf16 and in each recipe; each has scales of its own."""
    device = next(source.parameters()).device
    return {
        "opfuser": share(make(), source),
        **{
            f"opfuser, {name}": Within(share(make(), source), region(recipe))
            for name, recipe in RECIPES.items()
        },
        KEPT: Kept(share(make(), source), RECIPES["delayed"]),
        **replayed(make, source, device),
    }


def replayed(
    make: Callable[[], nn.Module], source: nn.Module, device: torch.device
) -> dict[str, Function]:
    """In bf16 and with one recipe, where the host would be the limit; or none."""

    def both() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(replay.context())
        stack.enter_context(region(RECIPES["delayed"])())
        return stack

    if replay.missing(device) is not None:
        return {}
    own = share(make(), source)
    return {
        **replay.replayed(share(make(), source), device),
        "opfuser, delayed, replayed": Within(own, both, lambda: replay.captured(own)),
    }


def engines(title: str, build: Callable[[], Function]) -> dict[str, Function]:
    """Transformer Engine in bf16 and in each recipe that it has."""
    if not peers.installed(peers.TE):
        return {}

    def within(kind: str) -> Callable[[], AbstractContextManager[Any]]:
        def context() -> AbstractContextManager[Any]:
            engine = importlib.import_module("transformer_engine.pytorch")
            own = importlib.import_module("transformer_engine.common.recipe")
            opened: AbstractContextManager[Any] = engine.autocast(
                enabled=True, recipe=getattr(own, kind)()
            )
            return opened

        return context

    return {
        title: peers.late(build),
        **{
            f"{title}, {name}": Within(peers.late(build), within(kind))
            for name, kind in ENGINE_RECIPES.items()
        },
    }


def engine_block(*operations: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Function:
    """A residual block of te.ops, as :func:`peers.engine_ops` takes them."""
    sequence = peers.engine_ops(*operations, eps=EPS)
    return lambda x: x + sequence(x)


# torchao's recipes with scales from the values of a call, and ours that are computed likewise.
TORCHAO = {"current": "tensorwise", "scales of rows": "rowwise"}
LARGE = 4096  # features from which torchao takes part: compiling takes long


def torchao(make: Callable[[], nn.Module], source: nn.Module, features: int) -> dict[str, Function]:
    """The same block of torch.nn, its linear layers converted by torchao, in torch.compile."""
    if not peers.installed(peers.TORCHAO) or features < LARGE:
        return {}

    def build(name: str) -> Function:
        float8 = importlib.import_module("torchao.float8")
        block = share(make(), source)
        config = float8.Float8LinearConfig.from_recipe_name(name)
        converted = float8.convert_to_float8_training(block, config=config)
        torch.compiler.reset()  # otherwise one function reaches the limit of recompilations
        compiled: Function = torch.compile(converted, dynamic=False, fullgraph=True)
        return compiled

    return {
        f"torchao, compiled, {scales}": peers.late(lambda name=name: build(name))
        for scales, name in TORCHAO.items()
    }


def swiglu(options: Options, dim: int, tokens: int) -> Problem:
    config = decoder_config(options, dim)
    source = torch_models.swiglu_block(config, Parts())
    randomize(source)
    norm, fc1, fc2 = parameters = tuple(source.parameters())
    ffn = config.ffn_features

    def of_ops() -> Function:
        return engine_block(
            ("RMSNorm", (dim,), {"weight": norm}),
            ("Linear", (dim, 2 * ffn), {"weight": fc1}),
            ("SwiGLU", (), {}),
            ("Linear", (ffn, dim), {"weight": fc2}),
        )

    functions: dict[str, Function] = {
        "torch": source,
        **ours(lambda: swiglu_block(config), source),
        **engines("te.ops", of_ops),
        **engines("te.LayerNormMLP", lambda: peer_blocks.engine_swiglu_block(norm, fc1, fc2, EPS)),
        **torchao(lambda: torch_models.swiglu_block(config, Parts()), source, dim),
    }
    return Problem(
        drawing(options, ((tokens, dim),), ((tokens, dim),)),
        functions,
        {STEP: None},
        parameters,
        floor=lambda x: gemms(x, [(2 * ffn, dim), (dim, ffn)]),
        tolerance=TOLERANCE,
        wall=calls(dim),
    )


def gpt(options: Options, dim: int, tokens: int) -> Problem:
    to = {"device": options.device, "dtype": options.dtype}
    hidden = 4 * dim
    source = torch_models.gpt_block(dim, hidden, 0.0, EPS, to)
    randomize(source)
    parameters = tuple(source.parameters())
    norm, norm_bias, fc1, fc1_bias, fc2, fc2_bias = parameters

    def make() -> nn.Module:
        return opfuser.Residual(
            opfuser.LayerNorm(dim, eps=EPS, **to),
            opfuser.Linear(dim, hidden, **to),
            opfuser.GELU(),
            opfuser.Linear(hidden, dim, **to),
        )

    def of_ops() -> Function:
        return engine_block(
            ("LayerNorm", (dim,), {"weight": norm, "bias": norm_bias}),
            ("Linear", (dim, hidden), {"weight": fc1, "bias": fc1_bias}),
            ("GELU", (), {}),
            ("Linear", (hidden, dim), {"weight": fc2, "bias": fc2_bias}),
        )

    functions: dict[str, Function] = {
        "torch": source,
        **ours(make, source),
        **engines("te.ops", of_ops),
        **engines("te.LayerNormMLP", lambda: peer_blocks.engine_gpt_block(parameters, EPS)),
        **torchao(lambda: torch_models.gpt_block(dim, hidden, 0.0, EPS, to), source, dim),
    }
    return Problem(
        drawing(options, ((tokens, dim),), ((tokens, dim),)),
        functions,
        {STEP: None},
        parameters,
        floor=lambda x: gemms(x, [(hidden, dim), (dim, hidden)]),
        tolerance=TOLERANCE,
        wall=calls(dim),
    )


def layer(options: Options, dim: int, tokens: int) -> Problem:
    config = replace(decoder_config(options, dim), num_kv_heads=None)
    length = min(tokens, LONGEST)
    shape = (tokens // length, length, dim)
    source = torch_models.decoder_layer(config, Parts(), length)
    randomize(source)
    kind = LayerKind(config.num_heads, EPS, rotary_length=length, gated=True)
    functions: dict[str, Function] = {
        "torch": source,
        **ours(lambda: decoder_layer(config), source),
        **engines("te.TransformerLayer", lambda: EngineLayer(source, kind)),
        **torchao(lambda: torch_models.decoder_layer(config, Parts(), length), source, dim),
    }
    return Problem(
        drawing(options, (shape,), (shape,)),
        functions,
        {STEP: None},
        tuple(source.parameters()),
        tolerance=2 * TOLERANCE,
        wall=calls(dim),
    )


def model(options: Options, sizes: Mapping[str, int], layers: int, length: int) -> Problem:
    """A decoder with its head and loss, which stay in bf16."""
    config = whole.decoder_config(options, SMALL if options.tiny else sizes, layers)
    source = torch_models.DecoderLM(config, Parts(), length)
    randomize(source)
    return Problem(
        whole.batches(options, config.vocab_size, 2, length),
        {"torch": source, **ours(lambda: decoder_lm(config), source)},
        {STEP: None},
        tuple(source.parameters()),
        tolerance=3 * TOLERANCE,
        wall=1,
    )


def llama_8b(options: Options, layers: int, length: int) -> Problem:
    return model(options, whole.LLAMA_8B, layers, length)


def llama_1b(options: Options, layers: int, length: int) -> Problem:
    return model(options, whole.LLAMA_1B, layers, length)


CASES = (
    Case("SwiGLU block", swiglu, SIZES, TINY),
    Case("GPT block", gpt, SIZES, TINY),
    Case("decoder layer", layer, SIZES[:2], TINY),
    Case("Llama 8B, slice", llama_8b, ({"layers": 2, "length": 4096},), TINY_MODEL),
    Case("Llama 1B", llama_1b, ({"layers": 16, "length": 4096},), TINY_MODEL),
)


def rows(options: Options) -> Iterator[Row]:
    for case in CASES:
        yield from solve(case, options, () if options.modes is None else options.modes)
