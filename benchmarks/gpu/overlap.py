"""Training steps of blocks with the gradients of weights on a stream of their own, or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

import opfuser
from benchmarks.gpu import replay, torch_models
from benchmarks.gpu.blocks import LONGEST, calls, decoder_config, randomise
from benchmarks.gpu.contest import solve
from benchmarks.gpu.problem import STEP, Case, Function, Options, Problem, Row, Within
from benchmarks.gpu.quantized import TINY, TOLERANCE
from benchmarks.gpu.row_problems import drawing
from benchmarks.gpu.torch_models import Parts, share
from opfuser.models import decoder_layer, swiglu_block
from opfuser.recipe import DelayedScaling

SIZES: tuple[Mapping[str, int], ...] = (
    {"dim": 4096, "tokens": 8192},
    {"dim": 1024, "tokens": 8192},
)


def contexts(options: Options) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """What surrounds the calls of each pair of contestants."""

    def quantised() -> AbstractContextManager[Any]:
        return opfuser.autocast(recipe=DelayedScaling())

    def both() -> AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(replay.context())
        stack.enter_context(quantised())
        return stack

    found: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "opfuser": contextlib.nullcontext,
        "opfuser, delayed": quantised,
    }
    if replay.missing(options.device) is None:
        found |= {"opfuser, replayed": replay.context, "opfuser, delayed, replayed": both}
    return found


def pairs(
    options: Options, make: Callable[[], nn.Module], source: nn.Module
) -> dict[str, Function]:
    """Each kind of step on one stream, and overlapped."""
    functions: dict[str, Function] = {}
    for name, context in contexts(options).items():
        functions[name] = Within(share(make(), source), context)
        overlapped = share(make(), source)
        opfuser.overlap_wgrad(overlapped)
        functions[f"{name}, overlapped"] = Within(overlapped, context)
    return functions


def swiglu(options: Options, dim: int, tokens: int) -> Problem:
    config = decoder_config(options, dim)
    source = torch_models.swiglu_block(config, Parts())
    return problem(options, (tokens, dim), lambda: swiglu_block(config), source)


def layer(options: Options, dim: int, tokens: int) -> Problem:
    config = decoder_config(options, dim)
    length = min(tokens, LONGEST)
    source = torch_models.decoder_layer(config, Parts(), length)
    shape = (tokens // length, length, dim)
    return problem(options, shape, lambda: decoder_layer(config), source)


def problem(
    options: Options, shape: tuple[int, ...], make: Callable[[], nn.Module], source: nn.Module
) -> Problem:
    randomise(source)
    return Problem(
        drawing(options, (shape,), (shape,)),
        {"torch": source, **pairs(options, make, source)},
        {STEP: None},
        tuple(source.parameters()),
        tolerance=2 * TOLERANCE,
        wall=calls(shape[-1]),
    )


CASES = (
    Case("SwiGLU block", swiglu, SIZES, TINY),
    Case("decoder layer", layer, SIZES, TINY),
)


def rows(options: Options) -> Iterator[Row]:
    for case in CASES:
        yield from solve(case, options, ())
