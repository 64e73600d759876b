"""Models under FSDP2, torch's ``fully_shard``, each in several libraries.

Parameters are in fp32; they are gathered and computed in bf16.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import opfuser
from benchmarks.gpu import gpt_layers, model, peers, quantized
from benchmarks.gpu.distributed_layers import tensor_parallel
from benchmarks.gpu.distributed_setting import (
    BLOCK,
    COMPILED_BY_UNIT,
    EPS,
    LAYER,
    POLICY,
    Contest,
    Entry,
    Setting,
    Training,
    distance,
    seeded,
    sharded,
)
from benchmarks.gpu.engine_layers import EngineLayer, LayerKind
from benchmarks.gpu.problem import OURS, REFERENCE
from benchmarks.gpu.torch_models import DecoderLM, Parts, linear_cross_entropy, share
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.models.sharding import shard_layers

RECIPES = ("delayed", "predicted")


def gpt(setting: Setting) -> Contest:
    """Pre-norm layers with LayerNorm, GELU by tanh and biases, by layer and by block."""
    sizes = {"layers": 12, "dim": 2048, "batch": 4, "length": 2048}
    if setting.tiny:
        sizes = {"layers": 2, "dim": 64, "batch": 2, "length": 4}
    layers, dim, batch, length = sizes.values()
    gpus = dist.get_world_size()
    heads = max(1, dim // 128)
    shape = (batch, length, dim)
    mesh = setting.mesh(gpus)

    def source() -> nn.Module:
        def norm() -> nn.Module:
            return nn.LayerNorm(dim, EPS, **setting.to)

        made = (gpt_layers.torch_layer(dim, heads, norm, setting.to) for _ in range(layers))
        return seeded(nn.Sequential(*(nn.Sequential(*layer) for layer in made)))

    def compiled() -> nn.Module:
        return nn.Sequential(*(setting.compiled(layer) for layer in source().children()))

    def ours() -> nn.Module:
        made = (gpt_layers.our_layer(dim, heads, setting.to) for _ in range(layers))
        return share(opfuser.Sequential(*(opfuser.Sequential(*one) for one in made)), source())

    def ours_compiled() -> nn.Module:
        stack: Any = ours()
        for layer in stack:
            layer.compile(**setting.how_compiled)
        return stack  # type: ignore[no-any-return]

    def trained(make: Callable[[], nn.Module], unit: str) -> Training:
        stack: Any = make()
        units = [*stack] if unit == LAYER else [block for layer in stack for block in layer]
        sharded(stack, units, mesh)
        generator = setting.draw()
        x, target = (torch.randn(shape, generator=generator, **setting.to) for _ in range(2))
        return Training(distance(stack, x, target), tuple(stack.parameters()), len(units))

    def entry(name: str, unit: str, make: Callable[[], nn.Module]) -> Entry:
        return Entry(name, functools.partial(trained, make, unit), unit)

    entries = [
        entry(REFERENCE, LAYER, source),
        entry(REFERENCE, BLOCK, source),
        entry(OURS, LAYER, ours),
        entry(OURS, BLOCK, ours),
    ]
    if setting.compiles:
        entries.append(entry(COMPILED_BY_UNIT, LAYER, compiled))
        entries.append(entry(f"{OURS}, {COMPILED_BY_UNIT}", LAYER, ours_compiled))
    return Contest("GPT, FSDP2", sizes, gpus, gpus * batch * length, tuple(entries))


def llama(setting: Setting, gpus: int) -> Contest:
    """A whole decoder with head and loss, in bf16 and with layers in FP8."""
    sizes = quantized.SMALL if setting.tiny else model.LLAMA_1B
    layers, batch, length = (2, 2, 4) if setting.tiny else (setting.layers or 16, 2, 4096)
    config = DecoderConfig(**sizes, num_layers=layers, device=setting.device)
    mesh = setting.mesh(gpus)

    def source(parts: Parts | None = None) -> Any:
        return seeded(DecoderLM(config, parts or Parts(), length))

    def trained(call: Callable[..., Tensor], root: nn.Module) -> Training:
        generator = setting.draw()
        shape = (2, batch, length)
        tokens = torch.randint(config.vocab_size, shape, generator=generator, **setting.to)
        # A unit for each layer, and one for what is around them.
        return Training(lambda: call(*tokens), tuple(root.parameters()), layers + 1)

    def in_torch() -> Training:
        root = source()
        sharded(root, root.layers, mesh)
        return trained(root, root)

    def compiled() -> Training:
        root = source(Parts(linear_cross_entropy=setting.compiled(linear_cross_entropy)))
        root.layers = nn.Sequential(*(setting.compiled(layer) for layer in root.layers))
        sharded(root, root.layers, mesh)
        return trained(root, root)

    def ours(recipe: str | None) -> Training:
        own = replace(config, recipe=None if recipe is None else quantized.RECIPES[recipe])
        root = share(decoder_lm(own), source())
        shard_layers(root, mesh=mesh, mp_policy=POLICY)
        return trained(root, root)

    def engine(recipe: str | None) -> Training:
        root = source()
        kind = LayerKind(config.num_heads, EPS, rotary_length=length, gated=True)
        groups = {"num_gqa_groups": config.key_heads}
        root.layers = nn.Sequential(*(EngineLayer(one, kind, **groups) for one in root.layers))
        sharded(root, root.layers, mesh)

        def call(*batch: Tensor) -> Tensor:
            with engine_region(recipe):
                loss: Tensor = root(*batch)
            return loss

        return trained(call, root)

    entries = [
        Entry(REFERENCE, in_torch, LAYER),
        Entry(OURS, lambda: ours(None), LAYER),
        *(Entry(f"{OURS}, {r}", lambda r=r: ours(r), LAYER, in_fp8=True) for r in RECIPES),
    ]
    if peers.installed(peers.TE):
        entries.append(Entry(peers.TE, lambda: engine(None), LAYER))
        entries.append(Entry(f"{peers.TE}, delayed", lambda: engine("delayed"), LAYER, in_fp8=True))
    if setting.compiles and gpus > 1:
        entries.append(Entry(COMPILED_BY_UNIT, compiled, LAYER))
    size = {"layers": layers, "batch": batch, "length": length}
    return Contest("Llama 1B, FSDP2", size, gpus, gpus * batch * length, tuple(entries))


def engine_region(recipe: str | None) -> AbstractContextManager[Any]:
    """In which Transformer Engine quantizes."""
    if recipe is None:
        return contextlib.nullcontext()
    of_recipes = importlib.import_module("transformer_engine.common.recipe")
    kind = getattr(of_recipes, quantized.ENGINE_RECIPES[recipe])
    region: AbstractContextManager[Any] = peers.engine("autocast")(enabled=True, recipe=kind())
    return region


ON_ONE = "llama_on_one"
CASES: dict[str, Callable[[Setting], Contest]] = {
    "gpt": gpt,
    "llama": lambda setting: llama(setting, dist.get_world_size()),
    "tensor_parallel": tensor_parallel,
    ON_ONE: lambda setting: llama(setting, 1),
}
