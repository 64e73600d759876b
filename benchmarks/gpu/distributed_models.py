"""What distributed.py trains: layers and models on several ranks, each in several libraries.

``FSDP2`` stands for torch's ``fully_shard``, with parameters in fp32 that are gathered and computed
in bf16. ``TP + SP`` is tensor and sequence parallelism: activations are sharded by tokens where the
linear transformations are not by features.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import opfuser
from benchmarks.gpu import gpt_layers, model, peers, quantized, torch_models
from benchmarks.gpu.blocks import randomise
from benchmarks.gpu.compiled import COMPILED
from benchmarks.gpu.engine_layers import EngineLayer, LayerKind
from benchmarks.gpu.problem import OURS, REFERENCE
from benchmarks.gpu.torch_models import DecoderLM, Parts, linear_cross_entropy, share
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.models.sharding import shard_layers

COMPILED_BY_UNIT = COMPILED["default"]
EPS = gpt_layers.EPS
LAYER, BLOCK = "layer", "block"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RECIPES = ("delayed", "predicted")
NO_SUM: tuple[nn.Parameter, ...] = ()


class Training(NamedTuple):
    """A model on this rank.

    Attributes:
        loss: the mean over this rank's part of the batch.
        parameters: those of this rank.
        units: of fully_shard; without it, layers.
        summed: parameters that all ranks have whole, and whose gradients are to be summed.
    """

    loss: Callable[[], Tensor]
    parameters: tuple[nn.Parameter, ...]
    units: int
    summed: tuple[nn.Parameter, ...] = NO_SUM


@dataclass(frozen=True)
class Entry:
    """A contestant.

    Attributes:
        build: makes it, from the same weights and data as all others.
        unit: what fully_shard gathers at once, where it takes part.
        in_fp8: whether its GEMMs are quantised.
    """

    name: str
    build: Callable[[], Training]
    unit: str = ""
    in_fp8: bool = False

    @property
    def compiles(self) -> bool:
        return self.name == COMPILED_BY_UNIT


class Contest(NamedTuple):
    """Entries that are timed by turns; the first one is what the others are compared with.

    Attributes:
        gpus: that compute together. With fewer than there are, each does the same by itself.
        tokens: of one step, of these GPUs together.
    """

    case: str
    size: Mapping[str, int]
    gpus: int
    tokens: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Setting:
    """Where it runs, and how large.

    Attributes:
        layers: of Llama 1B; None is all 16.
        compiles: whether torch.compile takes part.
    """

    device: torch.device
    layers: int | None = None
    compiles: bool = True

    @property
    def tiny(self) -> bool:
        return self.device.type != "cuda"

    @property
    def to(self) -> dict[str, Any]:
        return {"device": self.device}

    def draw(self) -> torch.Generator:
        """Random numbers that differ between ranks."""
        return torch.Generator(self.device).manual_seed(100 + dist.get_rank())

    def mesh(self, gpus: int) -> DeviceMesh:
        """Of all ranks, or of this one alone."""
        ranks = dist.get_world_size()
        if gpus == ranks:
            return init_device_mesh(self.device.type, (ranks,))
        return init_device_mesh(self.device.type, (ranks, 1), mesh_dim_names=("ranks", "one"))[
            "one"
        ]

    def compiled(self, function: Any) -> Any:
        # Inductor would need a compiler of C++ for a CPU.
        backend = "aot_eager" if self.tiny else "inductor"
        return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


def sharded(root: nn.Module, units: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=POLICY)
    fully_shard(root, mesh=mesh, mp_policy=POLICY)


def seeded(source: nn.Module) -> nn.Module:
    """The module with random weights, the same ones for each contestant and on each rank."""
    torch.manual_seed(0)
    with torch.no_grad():
        randomise(source)
    return source


def distance(stack: nn.Module, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """The loss of layers without a head. As behind an embedding, the first one has a gradient."""
    x.requires_grad_()

    def loss() -> Tensor:
        x.grad = None
        return F.mse_loss(stack(x).float(), target.float())

    return loss


# GPT


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
    return Contest("GPT, FSDP2", sizes, gpus, gpus * batch * length, tuple(entries))


# Llama


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
    """In which Transformer Engine quantises."""
    if recipe is None:
        return contextlib.nullcontext()
    of_recipes = importlib.import_module("transformer_engine.common.recipe")
    kind = getattr(of_recipes, quantized.ENGINE_RECIPES[recipe])
    region: AbstractContextManager[Any] = peers.engine("autocast")(enabled=True, recipe=kind())
    return region


# Tensor and sequence parallelism


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


ON_ONE = "llama_on_one"
CASES: dict[str, Callable[[Setting], Contest]] = {
    "gpt": gpt,
    "llama": lambda setting: llama(setting, dist.get_world_size()),
    "tensor_parallel": tensor_parallel,
    ON_ONE: lambda setting: llama(setting, 1),
}
