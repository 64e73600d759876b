"""Layers of transformers, untouched and with ``opfuser.apply``: latent attention, and experts."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from benchmarks.gpu.blocks import randomize
from benchmarks.gpu.contest import solve
from benchmarks.gpu.hugging_face import MODES, available, sharing
from benchmarks.gpu.problem import STEP, Case, Function, Inputs, Options, Problem, Row

LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
RANKS = {"q_lora_rank": 1536, "kv_lora_rank": 512}
TINY = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
TINY_RANKS = {"q_lora_rank": 24, "kv_lora_rank": 16}


def applied(source: nn.Module, x: Tensor, **given: Any) -> nn.Module:
    """A copy that shares parameters, all of which sequences of operations compute.

    Raises:
        AssertionError: something is not computed, so that the figures would be those of others.
    """
    module = sharing(source)
    told = opfuser.apply(module, example={"hidden_states": x.detach(), **given})
    routers = {path for entry in told.computed for path, _ in entry.called}
    kept = [entry for entry in told.kept if entry.path not in routers]
    if kept or not told.computed:
        raise AssertionError(f"is kept: {kept[0].reason if kept else 'all of it'}")
    return module


def latent_layer(options: Options, hidden: int, heads: int, ffn: int, length: int) -> Problem:
    """A dense layer of DeepSeek-V3, with causal attention and without a mask."""
    module: Any = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = module.DeepseekV3Config(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=ffn,
        num_hidden_layers=1,
        max_position_embeddings=length,
        attn_implementation="sdpa",
        **(TINY | TINY_RANKS if options.tiny else LATENT | RANKS),
    )
    with torch.device(options.device):
        layer: nn.Module = module.DeepseekV3DecoderLayer(config, 0).to(options.dtype).train()
        rotary: nn.Module = module.DeepseekV3RotaryEmbedding(config)
        x = torch.empty(1, length, hidden, dtype=options.dtype)
        tables = rotary(x, torch.arange(length)[None])
    randomize(layer)
    given = {"position_embeddings": tables}
    functions = {
        "torch": functools.partial(layer, **given),
        "opfuser": functools.partial(applied(layer, x, **given), **given),
    }

    def exact(inputs: Inputs) -> list[Tensor]:
        wide = copy.deepcopy(layer).float()
        return with_gradients(
            lambda x: wide(x, position_embeddings=tuple(t.float() for t in tables)),
            inputs,
            tuple(wide.parameters()),
            torch.float32,
        )

    return problem(options, (1, length, hidden), functions, layer, exact)


class Feed(nn.Module):
    """Experts with their router, less the weights that it has chosen."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden_states: Tensor) -> Tensor:
        y: Tensor = self.mlp(hidden_states)[0]
        return y


def experts(
    options: Options, hidden: int, ffn: int, count: int, top_k: int, length: int
) -> Problem:
    """The experts of gpt-oss, which are stored as (in, out), by grouped GEMMs.

    Ours is read of their loop, as grouped GEMMs of transformers 5.17 mask rows besides.
    """
    module: Any = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss")
    config = module.GptOssConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_local_experts=count,
        num_experts_per_tok=top_k,
        num_hidden_layers=1,
    )
    config._experts_implementation = "eager"
    with torch.device(options.device):
        feed = Feed(module.GptOssMLP(config)).to(options.dtype).train()
        x = torch.randn(1, length, hidden, dtype=options.dtype)
    randomize(feed)
    for weight in (feed.mlp.experts.gate_up_proj, feed.mlp.experts.down_proj):
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    functions: dict[str, Function] = {"opfuser": applied(feed, x)}
    feed.mlp.experts.config._experts_implementation = "grouped_mm"
    functions["torch"] = feed
    exact = functools.partial(experts_in_turn, feed)
    return problem(options, (1, length, hidden), functions, feed, exact)


def experts_in_turn(feed: Any, inputs: Inputs) -> list[Tensor]:
    """The experts of gpt-oss in fp64, one after the other, of the rows that the router chooses."""
    wide, experts = copy.deepcopy(feed).double(), feed.mlp.experts
    own, router = wide.mlp.experts, wide.mlp.router
    with torch.no_grad():
        chosen = feed.mlp.router(inputs.args[0].flatten(0, 1))[-1]

    def forward(x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        logits = F.linear(rows, router.weight, router.bias)
        weights = logits.gather(1, chosen).softmax(1)
        y = torch.zeros_like(rows)
        for e in range(experts.num_experts):
            row, place = (chosen == e).nonzero(as_tuple=True)
            both = rows[row] @ own.gate_up_proj[e] + own.gate_up_proj_bias[e]
            gate = both[:, ::2].clamp(max=experts.limit)
            up = both[:, 1::2].clamp(-experts.limit, experts.limit)
            h = (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
            down = h @ own.down_proj[e] + own.down_proj_bias[e]
            y = y.index_add(0, row, down * weights[row, place, None])
        return y.view(x.shape)

    return with_gradients(forward, inputs, tuple(wide.parameters()), torch.float64)


def with_gradients(
    function: Function, inputs: Inputs, parameters: tuple[nn.Parameter, ...], dtype: torch.dtype
) -> list[Tensor]:
    """The output and all gradients, computed in a wider dtype."""
    x, dy = (t.detach().to(dtype) for t in (*inputs.args, *inputs.grads))
    y = function(x.requires_grad_())
    return [t.float() for t in (y.detach(), *torch.autograd.grad(y, (x, *parameters), dy))]


def problem(
    options: Options,
    shape: tuple[int, ...],
    functions: dict[str, Function],
    source: nn.Module,
    exact: Any,
) -> Problem:
    def draw() -> Inputs:
        x, dy = (torch.randn(shape, device=options.device, dtype=options.dtype) for _ in range(2))
        return Inputs((x,), (dy,))

    parameters = tuple(source.parameters())
    return Problem(draw, functions, {"forward": None, STEP: None}, parameters, exact=exact)


CASES = (
    Case(
        "DeepSeek-V3 dense layer",
        latent_layer,
        ({"hidden": 4096, "heads": 32, "ffn": 10944, "length": 4096},),
        {"hidden": 32, "heads": 4, "ffn": 48, "length": 16},
    ),
    Case(
        "gpt-oss experts",
        experts,
        ({"hidden": 2880, "ffn": 2880, "count": 32, "top_k": 4, "length": 4096},),
        {"hidden": 32, "ffn": 48, "count": 4, "top_k": 2, "length": 16},
        compiled=(),
    ),
)


def rows(options: Options) -> Iterator[Row]:
    modes = MODES if options.modes is None else options.modes
    for case in CASES if available() else ():
        yield from solve(case, options, modes if case.compiled else ())
