"""A layer of experts on several ranks, each with some of the experts and with tokens of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from benchmarks import timing
from benchmarks.gpu.contest import distance
from benchmarks.gpu.experts import (
    DEEPSEEK,
    MIXTRAL,
    QWEN,
    TINY,
    TOLERANCE,
    TOLERANCE_FP8,
    Size,
    Source,
)
from benchmarks.gpu.experts import by_hand as on_one_gpu
from benchmarks.gpu.experts_exact import in_float64
from benchmarks.gpu.problem import (
    OURS,
    REFERENCE,
    STEP,
    Function,
    Inputs,
    Options,
    Problem,
    Within,
)
from benchmarks.gpu.quantized import RECIPES, region
from benchmarks.gpu.ranks import Ranks
from benchmarks.gpu.torch_models import share
from opfuser.models.moe import MoEConfig, experts
from opfuser.models.parallel import parallelize

CAPACITY = 1.25  # of the mean
PASSES = "forward", STEP
OF_EXPERTS = slice(3, 5)  # places of the experts' gradients: after output, input's and router's
ONE_GPU = "one GPU"
EXCHANGE = "exchange alone"
IN_TURN = "shared expert in turn"
# With an expert for all tokens: that of DeepSeek-V3, with fewer others, and of Qwen1.5-MoE-A2.7B.
SHARED: tuple[Size, ...] = (
    {**DEEPSEEK, "shared": DEEPSEEK["ffn"]},
    {"dim": 2048, "ffn": 1408, "count": 60, "top_k": 4, "tokens": 16384, "shared": 5632},
)
SIZES: tuple[Size, ...] = (
    QWEN,
    MIXTRAL,
    *({**size, "tokens": 8192} for size in (QWEN, MIXTRAL)),
    *SHARED,
)
TINY_SIZE: Size = {**TINY, "tokens": 64, "shared": 64}


@dataclass(frozen=True)
class Entry:
    """A contestant on this rank.

    Attributes:
        function: of this rank's tokens.
        parameters: the router, and the experts that this rank has.
        gradients: how many times what autograd returns the sum over all ranks' tokens is.
        alone: whether the rank has all experts, and meets no other one's tokens.
        capacity: that of an expert, in multiples of the mean; beyond it tokens are dropped.
    """

    function: Function
    parameters: tuple[nn.Parameter, ...]
    gradients: int = 1
    alone: bool = False
    capacity: float = math.inf


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received
        return exchanged(x, sent, received)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        sent, received = ctx.sizes
        return exchanged(dy.contiguous(), received, sent), None, None


def exchanged(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x, received, sent)
    return out


def by_hand(router: Tensor, gate_up: Tensor, down: Tensor, x: Tensor, top_k: int) -> Tensor:
    """The layer as one writes it with torch alone; the host reads the sizes of what is exchanged.

    ``gate_up`` and ``down`` are those of this rank's experts.
    """
    ranks, own = dist.get_world_size(), len(gate_up)
    probabilities = F.linear(x, router).softmax(-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.zeros(ranks * own, device=x.device, dtype=torch.int64)
    counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent, received = torch.stack([counts, arriving]).view(2, ranks, own).sum(-1).tolist()
    token = order // top_k
    rows = _Exchange.apply(x.index_select(0, token), sent, received)
    expert = torch.arange(own, device=x.device).repeat(ranks)
    expert = expert.repeat_interleave(arriving, output_size=sum(received))
    by_expert = expert.argsort(stable=True)
    ends = arriving.view(ranks, own).sum(0).cumsum(0, dtype=torch.int32)
    rows = rows.index_select(0, by_expert)
    gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    y = _Exchange.apply(y.index_select(0, by_expert.argsort()), received, sent)
    y = y * weights.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x).index_add(0, token, y)


def entries(
    source: Source, size: Size, options: Options, mesh: DeviceMesh
) -> Mapping[str, Callable[[], Entry]]:
    """Contestants by name, to be made on all ranks together; the first is what others race."""
    ranks, rank, top_k = mesh.size(), mesh.get_local_rank(), size["top_k"]
    of_shared = list(source.parameters())[3:]

    def in_torch() -> Entry:
        parts = [p.detach().chunk(ranks)[rank].clone() for p in (source.gate_up, source.down)]
        gate_up, down = map(nn.Parameter, parts)

        def function(x: Tensor) -> Tensor:
            return by_hand(source.router, gate_up, down, x, top_k) + source.shared(x)

        return Entry(function, (source.router, gate_up, down, *of_shared))

    def torch_alone() -> Entry:
        def function(x: Tensor) -> Tensor:
            y = on_one_gpu(source.router, source.gate_up, source.down, x, top_k)
            return y + source.shared(x)

        return Entry(function, tuple(source.parameters()), alone=True)

    def ours(
        recipe: str | None, factor: float | None, *, alone: bool, overlap: bool = True
    ) -> Entry:
        names = ("dim", "ffn", "count", "top_k")
        config = MoEConfig(
            *(size[name] for name in names),
            shared_ffn_dim=size.get("shared", 0),
            capacity_factor=factor,
            device="meta",
            dtype=options.dtype,
        )
        model: Any = share(experts(config), source)
        if not alone:
            model = parallelize(model, expert_parallel=mesh, overlap_shared=overlap)
        parameters = tuple(model.parameters())
        if recipe is not None:
            model = Within(model, region(RECIPES[recipe]))
        # Of the mean of the ranks' losses.
        return Entry(model, parameters, 1 if alone else ranks, alone, factor or math.inf)

    found: dict[str, Callable[[], Entry]] = {REFERENCE: in_torch}
    for recipe in (None, "delayed"):
        name = OURS if recipe is None else f"{OURS}, {recipe}"
        found[name] = lambda recipe=recipe: ours(recipe, None, alone=False)
        found[f"{name}, capacity {CAPACITY}"] = lambda r=recipe: ours(r, CAPACITY, alone=False)
        found[f"{name}, {ONE_GPU}"] = lambda recipe=recipe: ours(recipe, None, alone=True)
    if of_shared:
        found[f"{OURS}, {IN_TURN}"] = lambda: ours(None, None, alone=False, overlap=False)
    found[f"{REFERENCE}, {ONE_GPU}"] = torch_alone
    return found


def exchange_alone(size: Size, options: Options, passed: str) -> Callable[[], None]:
    """Rows to the experts and back, of equal sizes, and in a step their gradients too."""
    rows = size["tokens"] * size["top_k"]
    x = torch.randn(rows, size["dim"], device=options.device, dtype=options.dtype)
    out = torch.empty_like(x)

    def call() -> None:
        for _ in range(4 if passed == STEP else 2):
            dist.all_to_all_single(out, x)

    return call


class Layer:
    """A size: the parameters and tokens of this rank, and what every contestant should compute.

    Attributes:
        alone: output and gradients of this rank's tokens, in float64.
        together: the same, with the gradients of this rank's experts from the tokens of all ranks.
        fullest: rows of the expert with the most, in multiples of the mean, of this rank; ranks
            have to agree on it.
    """

    def __init__(self, size: Size, options: Options, ranks: Ranks) -> None:
        self.ranks, top_k = ranks, size["top_k"]
        torch.manual_seed(0)
        self.source = Source(size, options, block=False, led=0)
        torch.manual_seed(100 + ranks.rank)
        self.inputs = draw(size, options)
        self.alone = in_float64(self.source, top_k, self.inputs)
        self.together = [*self.alone]
        self.together[OF_EXPERTS] = map(self._own_part, self.alone[OF_EXPERTS])
        chosen = F.linear(self.inputs.args[0], self.source.router.detach()).topk(top_k).indices
        rows = chosen.flatten().bincount(minlength=size["count"])
        self.fullest = (rows.max() / rows.float().mean()).item()

    def _own_part(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total.chunk(self.ranks.world)[self.ranks.rank].clone()

    def compare(self, entry: Entry, step: timing.Call) -> float:
        """The error of outputs and gradients; raises where they differ."""
        if self.fullest > entry.capacity:
            raise AssertionError(
                f"tokens are dropped: an expert has {self.fullest:.2f} times the mean"
            )
        tolerance = TOLERANCE_FP8 if isinstance(entry.function, Within) else TOLERANCE
        found = [local(t) for t in step()]
        found[OF_EXPERTS] = [t * entry.gradients for t in found[OF_EXPERTS]]
        error = distance(found, self.alone if entry.alone else self.together)
        if not error <= tolerance:
            raise AssertionError(f"the result is off by {error:.2g}, {tolerance:.2g} is allowed")
        return error


def draw(size: Size, options: Options) -> Inputs:
    how: Any = {"device": options.device, "dtype": options.dtype}
    x, dy = (torch.randn(size["tokens"], size["dim"], **how) for _ in range(2))
    return Inputs((x,), (dy,))


def problem(entry: Entry, size: Size, options: Options) -> Problem:
    """What ``ready`` makes the passes of a contestant from."""
    drawn = functools.partial(draw, size, options)
    return Problem(drawn, {}, dict.fromkeys(PASSES), entry.parameters)


def local(t: Tensor) -> Tensor:
    t = t.detach()
    return t.to_local() if isinstance(t, DTensor) else t
