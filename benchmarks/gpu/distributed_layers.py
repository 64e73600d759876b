"""Layers with tensor and sequence parallelism, in torch's DTensors and in several libraries.

Where linear transformations are not sharded by features, activations are sharded by tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import opfuser
from benchmarks.gpu import model, peers, quantized, torch_models
from benchmarks.gpu.distributed_setting import (
    EPS,
    NO_SUM,
    Contest,
    Entry,
    Setting,
    Training,
    distance,
    seeded,
)
from benchmarks.gpu.engine_layers import EngineLayer, LayerKind
from benchmarks.gpu.problem import OURS, REFERENCE
from benchmarks.gpu.torch_models import Parts, share
from opfuser.models import DecoderConfig


def tensor_parallel(setting: Setting) -> Contest:
    """Layers of Llama 8B, in bf16, behind a loss.

    Between blocks a rank has its part of the batch, which is the first dimension; Transformer
    Engine's layers, which shard sequences, have their part of each sequence.
    """
    sizes = quantized.SMALL if setting.tiny else model.LLAMA_8B
    layers, length = (2, 8) if setting.tiny else (4, 4096)
    ranks = dist.get_world_size()
    if setting.tiny:
        sizes = {**sizes, "num_heads": 4, "num_kv_heads": 2}
    to: dict[str, Any] = {"device": setting.device, "dtype": torch.bfloat16}
    whole = DecoderConfig(**sizes, num_layers=layers, **to)
    local = replace(
        whole,
        num_heads=whole.num_heads // ranks,
        num_kv_heads=whole.key_heads // ranks,
        head_dim=whole.head_features,
    )
    shape = (ranks, length, whole.dim)

    def sources() -> list[nn.Module]:
        return [seeded(torch_models.decoder_layer(whole, Parts(), length)) for _ in range(layers)]

    def data(dim: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(setting.device).manual_seed(100)
        pair = (torch.randn(shape, generator=generator, **setting.to) for _ in range(2))
        x, target = (t.to(to["dtype"]).chunk(ranks, dim)[dist.get_rank()] for t in pair)
        return (x, target) if dim == 0 else (x.transpose(0, 1), target.transpose(0, 1))

    def trained(stack: nn.Module, dim: int = 0, *, sums: bool = True) -> Training:
        x, target = (t.contiguous() for t in data(dim))
        parameters = tuple(stack.parameters())
        norms = tuple(p for p in parameters if p.dim() == 1) if sums else NO_SUM
        return Training(distance(stack, x, target), parameters, layers, norms)

    def in_torch() -> Training:
        mesh = setting.mesh(ranks)
        stack = nn.Sequential(*(planned_layer(one, local, length, mesh) for one in sources()))
        return trained(stack, sums=False)

    def ours() -> Training:
        made = (our_parallel_layer(whole, local, of_rank(one, whole)) for one in sources())
        return trained(opfuser.Sequential(*made))

    def engine() -> Training:
        kind = LayerKind(whole.num_heads, EPS, rotary_length=length, gated=True)
        options = {
            "num_gqa_groups": whole.key_heads,
            "attn_input_format": "sbhd",
            "tp_group": dist.group.WORLD,
            "tp_size": ranks,
            "set_parallel_mode": True,
            "sequence_parallel": True,
        }
        made = (
            EngineLayer(nn.ParameterList(of_rank(one, whole)), kind, **options) for one in sources()
        )
        return trained(nn.Sequential(*made), dim=1)

    entries = [Entry(REFERENCE, in_torch), Entry(OURS, ours)]
    if peers.installed(peers.TE):
        entries.append(Entry(peers.TE, engine))
    size = {"layers": layers, "dim": whole.dim, "batch": ranks, "length": length}
    return Contest("Llama layers, TP + SP", size, ranks, ranks * length, tuple(entries))


def by_ranks(weight: Tensor, parts: list[int]) -> list[Tensor]:
    """Rows of packed weights for each rank, which gets an equal share of each one of them."""
    ranks = dist.get_world_size()
    shares = [part.chunk(ranks) for part in weight.split(parts)]
    return [torch.cat(own) for own in zip(*shares)]


def packed(config: DecoderConfig) -> tuple[list[int], list[int]]:
    """Rows of queries, keys and values; of gate and up."""
    size, ffn = config.head_features, config.ffn_features
    heads = [config.num_heads, config.key_heads, config.key_heads]
    return [n * size for n in heads], [ffn, ffn]


def of_rank(layer: nn.Module, config: DecoderConfig) -> list[nn.Parameter]:
    """What this rank has of the parameters of a layer, in their order."""
    norm1, qkv, out, norm2, up, down = (p.detach() for p in layer.parameters())
    of_heads, of_gates = packed(config)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = [
        norm1,
        by_ranks(qkv, of_heads)[rank],
        out.chunk(ranks, dim=1)[rank],
        norm2,
        by_ranks(up, of_gates)[rank],
        down.chunk(ranks, dim=1)[rank],
    ]
    return [nn.Parameter(t.clone(memory_format=torch.contiguous_format)) for t in own]


def planned_layer(
    layer: nn.Module, local: DecoderConfig, length: int, mesh: DeviceMesh
) -> nn.Module:
    """The layer under a plan of DTensors; between linear transformations tensors are local."""
    attention, mlp = layer.children()
    norm1, qkv, _, _, out = attention.children()
    norm2, up, gated, down = mlp.children()
    heads, size = local.num_heads + 2 * local.key_heads, local.head_features
    ranks = mesh.size()
    of_heads = [n * size * ranks for n in (local.num_heads, local.key_heads, local.key_heads)]
    with torch.no_grad():  # a rank's rows follow each other
        qkv.weight.copy_(torch.cat(by_ranks(qkv.weight, of_heads)))
        up.weight.copy_(torch.cat(by_ranks(up.weight, [len(up.weight) // 2] * 2)))
    assert len(qkv.weight) == heads * size * ranks
    device = qkv.weight.device
    kinds = local.num_heads, local.key_heads
    blocks = nn.Sequential(
        torch_models.Residual(
            norm1,
            qkv,
            torch_models.Rotary(*kinds, size, length, local.rope_base, device),
            torch_models.Attention(*kinds),
            out,
        ),
        torch_models.Residual(norm2, up, gated, down),
    )
    tokens = Shard(0)
    styles: dict[str, ParallelStyle] = {}
    for name, first, last in (("0", "1", "4"), ("1", "1", "3")):
        styles[f"{name}.0"] = SequenceParallel(sequence_dim=0)
        styles[f"{name}.{first}"] = ColwiseParallel(input_layouts=tokens)
        styles[f"{name}.{last}"] = RowwiseParallel(output_layouts=tokens)
    return parallelize_module(blocks, mesh, styles)


def our_parallel_layer(
    whole: DecoderConfig, local: DecoderConfig, parameters: list[nn.Parameter]
) -> nn.Module:
    to: dict[str, Any] = {"device": whole.device, "dtype": whole.dtype}
    of_heads, of_gates = packed(whole)

    def linear(in_features: int, out_features: int, mode: str) -> opfuser.Linear:
        return opfuser.Linear(
            in_features,
            out_features,
            bias=False,
            tensor_parallel_mode=mode,
            sequence_parallel=True,
            **to,
        )

    kinds = local.num_heads, local.key_heads
    layer = opfuser.Sequential(
        opfuser.Residual(
            opfuser.RMSNorm(whole.dim, eps=whole.norm_eps, **to),
            linear(whole.dim, sum(of_heads), "column"),
            opfuser.RotaryEmbedding(
                kinds[0], local.head_features, num_kv_heads=kinds[1], base=local.rope_base
            ),
            opfuser.DotProductAttention(*kinds, causal=True),
            linear(of_heads[0], whole.dim, "row"),
        ),
        opfuser.Residual(
            opfuser.RMSNorm(whole.dim, eps=whole.norm_eps, **to),
            linear(whole.dim, sum(of_gates), "column"),
            opfuser.SwiGLU(),
            linear(of_gates[0], whole.dim, "row"),
        ),
    )
    return share(layer, nn.ParameterList(parameters))
