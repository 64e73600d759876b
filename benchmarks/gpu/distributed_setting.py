"""What every contest of distributed.py is made of: where it runs, and who takes part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from benchmarks.gpu import gpt_layers
from benchmarks.gpu.blocks import randomize
from benchmarks.gpu.compiled import COMPILED

COMPILED_BY_UNIT = COMPILED["default"]
EPS = gpt_layers.EPS
LAYER, BLOCK = "layer", "block"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
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
        in_fp8: whether its GEMMs are quantized.
    """

    name: str
    build: Callable[[], Training]
    unit: str = ""
    in_fp8: bool = False

    @property
    def compiles(self) -> bool:
        return self.name.endswith(COMPILED_BY_UNIT)


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

    @property
    def how_compiled(self) -> dict[str, Any]:
        # Inductor would need a compiler of C++ for a CPU.
        backend = "aot_eager" if self.tiny else "inductor"
        return {"fullgraph": True, "dynamic": False, "backend": backend}

    def compiled(self, function: Any) -> Any:
        return torch.compile(function, **self.how_compiled)


def sharded(root: nn.Module, units: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=POLICY)
    fully_shard(root, mesh=mesh, mp_policy=POLICY)


def seeded(source: nn.Module) -> nn.Module:
    """The module with random weights, the same ones for each contestant and on each rank."""
    torch.manual_seed(0)
    with torch.no_grad():
        randomize(source)
    return source


def distance(stack: nn.Module, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """The loss of layers without a head. As behind an embedding, the first one has a gradient."""
    x.requires_grad_()

    def loss() -> Tensor:
        x.grad = None
        return F.mse_loss(stack(x).float(), target.float())

    return loss
