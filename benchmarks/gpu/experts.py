"""Mixtures of experts: the layer with its router, and the block, in bf16 and FP8, beside others.

Routing is that of the inputs: a feature that the router weighs heavily leads tokens to an expert.
Rows of a step tell how often the host waited for the device, as its reads of sizes do.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import timing
from benchmarks.gpu import peers
from benchmarks.gpu.contest import solve
from benchmarks.gpu.engine_experts import engine_layer
from benchmarks.gpu.experts_exact import in_float64, normed
from benchmarks.gpu.hugging_face import MODES
from benchmarks.gpu.passes import ready
from benchmarks.gpu.problem import (
    OURS,
    REFERENCE,
    STEP,
    Case,
    Function,
    Inputs,
    Missing,
    Options,
    Problem,
    Row,
    Within,
)
from benchmarks.gpu.quantized import region
from benchmarks.gpu.torch_models import share
from opfuser import recipe as recipes
from opfuser.models.moe import MoEConfig, experts, moe_block
from opfuser.torch_internals import scaled_grouped_mm

RECIPES: Mapping[str, recipes.Recipe] = {
    "rows": recipes.Float8RowwiseScaling(),
    "delayed": recipes.DelayedScaling(),
    "delayed, E4M3": recipes.DelayedScaling(fp8_format=recipes.Format.E4M3),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
}
# Contestants whose logits are rounded otherwise send some tokens to another expert; and E5M2 rounds
# a gradient by up to an eighth.
TOLERANCE, TOLERANCE_FP8 = 0.06, 0.25

Size = Mapping[str, int]
MIXTRAL: Size = {"dim": 4096, "ffn": 14336, "count": 8, "top_k": 2, "tokens": 16384}
QWEN: Size = {"dim": 2048, "ffn": 768, "count": 128, "top_k": 8, "tokens": 16384}
DEEPSEEK: Size = {"dim": 7168, "ffn": 2048, "count": 32, "top_k": 8, "tokens": 8192}
LONG = tuple({**QWEN, "tokens": tokens} for tokens in (4096, 8192, 32768))
TINY: Size = {"dim": 128, "ffn": 128, "count": 4, "top_k": 2, "tokens": 24}
ALONE = "GEMMs alone"
ROUTINGS = "balanced", "skewed", "one"
LEADS = 8.0
# Liger's kernels try 240 variants for each width unless this is "0" when it is imported. With 7168
# features, Triton takes 40 s for some of them; with 2048, 1 to 3 s.
TUNING = "LIGER_FUSED_MOE_AUTOTUNE"
NAME_OF_LIGER = peers.LIGER + ("" if os.environ.setdefault(TUNING, "0") != "0" else ", not tuned")


def by_hand(router: Tensor, gate_up: Tensor, down: Tensor, x: Tensor, top_k: int) -> Tensor:
    """The layer of torch's grouped GEMMs, as one writes it without a library; nothing is read."""
    probabilities = F.linear(x, router).softmax(-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.zeros(len(gate_up), device=x.device, dtype=torch.int32)
    ones = torch.ones_like(chosen.flatten(), dtype=torch.int32)
    ends = counts.scatter_add(0, chosen.flatten(), ones).cumsum(0, dtype=torch.int32)
    token = order // top_k
    gate, up = F.grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    y = y * weights.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x).index_add(0, token, y)


def transformers_block(source: Any, size: Size, way: str) -> Function:
    """The experts of Qwen3-MoE with these parameters."""
    module: Any = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = module.Qwen3MoeConfig(
        hidden_size=size["dim"],
        moe_intermediate_size=size["ffn"],
        num_experts=size["count"],
        num_experts_per_tok=size["top_k"],
        norm_topk_prob=True,
        num_hidden_layers=1,
    )
    config._experts_implementation = way
    with torch.device("meta"):
        block = module.Qwen3MoeSparseMoeBlock(config)
    block.gate.weight = source.router
    block.experts.gate_up_proj, block.experts.down_proj = source.gate_up, source.down
    return lambda x: block(x[None])[0]


def liger_layer(source: Any, size: Size) -> Function:
    """Liger's fused experts behind a router of torch's."""
    apply = peers.liger("FusedMoE")

    def layer(x: Tensor) -> Tensor:
        probabilities = F.linear(x, source.router).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(size["top_k"], dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        y: Tensor = apply(x, source.gate_up, source.down, chosen.int(), weights)
        return y

    return layer


class Source(nn.Module):
    """The parameters that all contestants share."""

    def __init__(self, size: Size, options: Options, block: bool, led: int) -> None:
        super().__init__()
        dim, ffn, count = size["dim"], size["ffn"], size["count"]
        how: Any = {"device": options.device, "dtype": options.dtype}
        self.norm = nn.Parameter(torch.ones(dim, **how)) if block else None
        self.router = nn.Parameter(torch.randn(count, dim, **how) * dim**-0.5)
        self.gate_up = nn.Parameter(torch.randn(count, 2 * ffn, dim, **how) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(count, dim, ffn, **how) * ffn**-0.5)
        with torch.no_grad():
            self.router[:, 0] = 0
            self.router[:led, 0] = LEADS
        if shared := size.get("shared", 0):
            self.shared_gate_up = nn.Parameter(torch.randn(2 * shared, dim, **how) * dim**-0.5)
            self.shared_down = nn.Parameter(torch.randn(dim, shared, **how) * shared**-0.5)

    def shared(self, x: Tensor) -> Tensor | float:
        """What an expert for all tokens adds, or zero."""
        if not hasattr(self, "shared_down"):
            return 0.0
        gate, up = F.linear(x, self.shared_gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.shared_down)


def layer(options: Options, *, routing: str, block: bool, fp8: bool, **size: int) -> Problem:
    """A problem of one routing; contestants of FP8 are beside ours and torch's in bf16."""
    tokens, dim, top_k = size["tokens"], size["dim"], size["top_k"]
    led = {"balanced": 0, "skewed": 1, "one": top_k}[routing]
    source = Source(size, options, block, led)

    def draw() -> Inputs:
        how: Any = {"device": options.device, "dtype": options.dtype}
        x, dy = torch.randn(tokens, dim, **how), torch.randn(tokens, dim, **how)
        x[:, 0] = 0
        # All tokens to the same experts, or half of them to one.
        x[: tokens if routing == "one" else tokens // 2 if routing == "skewed" else 0, 0] = LEADS
        return Inputs((x,), (dy,))

    def within(function: Function) -> Function:
        if not block or isinstance(function, Missing):
            return function

        def in_block(x: Tensor) -> Tensor:
            y: Tensor = x + function(normed(x, source.norm))
            return y

        return in_block

    def ours() -> nn.Module:
        config = MoEConfig(
            dim, size["ffn"], size["count"], top_k, device="meta", dtype=options.dtype
        )
        made = moe_block(config) if block else experts(config)
        return share(made, source)

    functions: dict[str, Function] = {
        REFERENCE: within(lambda x: by_hand(source.router, source.gate_up, source.down, x, top_k)),
        OURS: ours(),
    }
    if fp8:
        for name, recipe in RECIPES.items():
            functions[f"{OURS}, {name}"] = Within(ours(), region(recipe))
    else:
        if importlib.util.find_spec("transformers") is not None:
            for way in ("eager", "grouped_mm"):
                built = functools.partial(transformers_block, source, size, way)
                functions[f"transformers, {way}"] = within(peers.late(built))
        for function in peers.peer(peers.LIGER, lambda: liger_layer(source, size)).values():
            functions[NAME_OF_LIGER] = within(function)
        for function in peers.peer(peers.TE, lambda: engine_layer(source, top_k)).values():
            functions[peers.TE] = within(function)
    return Problem(
        draw,
        functions,
        {"forward": None, STEP: None},
        tuple(source.parameters()),
        tolerance=TOLERANCE_FP8 if fp8 else TOLERANCE,
        exact=functools.partial(in_float64, source, top_k),
    )


def host_waits(problem: Problem, function: Function) -> int:
    """How often a step has the host wait for the device."""
    step = ready(problem, function, STEP, problem.draw())
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in told)


def group_sizes(size: Size, routing: str) -> Tensor:
    """Rows of experts in a routing, multiples of 16."""
    count, rows = size["count"], size["tokens"] * size["top_k"]
    sizes = torch.full((count,), rows // count)
    if routing == "skewed":
        sizes[:] = (rows - size["tokens"] // 2) // (count - 1)
        sizes[0] = size["tokens"] // 2
    elif routing == "one":
        sizes[:] = 0
        sizes[: size["top_k"]] = size["tokens"]
    # The grouped GEMM of FP8 takes no group without rows where it sums over them.
    return (sizes // 16 * 16).clamp_min(16)


def grouped_products(
    options: Options, size: Size, routing: str, *, fp8: bool, step: bool
) -> list[Callable[[], object]]:
    """The grouped GEMMs of a forward or of a step, alone, by torch."""
    sizes, device, count = group_sizes(size, routing), options.device, size["count"]
    rows, ends = int(sizes.sum()), sizes.cumsum(0).to(device, torch.int32)
    calls: list[Callable[[], object]] = []
    for n, k in ((2 * size["ffn"], size["dim"]), (size["dim"], size["ffn"])):
        how: Any = {"device": device, "dtype": options.dtype}
        x, dy = torch.randn(rows, k, **how), torch.randn(rows, n, **how)
        w = torch.randn(count, n, k, **how)
        if not fp8:
            calls.append(lambda x=x, w=w: F.grouped_mm(x, w.transpose(1, 2), offs=ends))
            if step:
                calls.append(lambda dy=dy, w=w: F.grouped_mm(dy, w, offs=ends))
                calls.append(lambda dy=dy, x=x: F.grouped_mm(dy.t(), x, offs=ends))
            continue
        multiply = functools.partial(functools.partial, scaled_by_ones, ends, options.dtype)
        calls.append(multiply(codes(x), codes(w).transpose(1, 2), True))
        if step:
            calls.append(multiply(codes(dy), codes(w.transpose(1, 2)).transpose(1, 2)))
            calls.append(multiply(codes(dy.t()), codes(x.t()).t()))
    return calls


def codes(t: Tensor) -> Tensor:
    return t.contiguous().to(torch.float8_e4m3fn)


def scaled_by_ones(
    ends: Tensor, dtype: torch.dtype, a: Tensor, b: Tensor, fast: bool = False
) -> Tensor:
    groups = len(ends) if b.dim() == 2 else 1
    of_a = torch.ones(len(a) * groups, device=a.device)
    shape = (b.shape[1] * groups,) if b.dim() == 2 else (len(b), b.shape[2])
    of_b = torch.ones(shape, device=a.device)
    assert scaled_grouped_mm is not None
    return scaled_grouped_mm(a, b, of_a, of_b, offs=ends, out_dtype=dtype, use_fast_accum=fast)


def gemm_rows(options: Options, size: Size, routing: str, *, fp8: bool) -> Iterator[Row]:
    """Times of the GEMMs alone, of which a layer's can be no less without a better GEMM."""
    timer = timing.DeviceTimer(options.device)
    for passed in ("forward", STEP):
        calls = grouped_products(options, size, routing, fp8=fp8, step=passed == STEP)

        def all_of_them(calls: list[Callable[[], object]] = calls) -> None:
            for call in calls:
                call()

        name = ALONE + (", FP8 rows" if fp8 else "")
        times, failed = timing.alternate(
            {name: lambda call=all_of_them: timer(call)}, options.seconds
        )
        for text in failed.values():
            yield {"pass": passed, "contestant": name, "failure": text}
        for own in map(timing.spread, times.values()):
            yield {
                "pass": passed,
                "contestant": name,
                "median_us": own.median * 1e6,
                "quartiles_us": [own.low * 1e6, own.high * 1e6],
                "samples": own.samples,
            }


def has_scaled_grouped_mm(device: torch.device) -> bool:
    return (
        scaled_grouped_mm is not None
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def useful_flops(size: Size, passed: str) -> float:
    """Of the experts' GEMMs, two for each product of a forward and four for its gradients."""
    features = size["top_k"] * size["ffn"] + size.get("shared", 0)
    forward = 6.0 * size["tokens"] * size["dim"] * features
    return forward * (3 if passed == STEP else 1)


def cases() -> Iterator[tuple[Case, str, bool]]:
    """Cases with their routing, and whether they are of FP8."""
    for fp8 in (False, True):
        for routing in ROUTINGS:
            for block in (False, True) if routing == "balanced" else (False,):
                make = functools.partial(layer, routing=routing, block=block, fp8=fp8)
                what = ("block of experts" if block else "experts") + (", FP8" if fp8 else "")
                sizes = (QWEN, MIXTRAL, DEEPSEEK, *(LONG if routing == "balanced" else ()))
                compiled = () if fp8 else (0, 1)
                yield Case(f"{what}, {routing}", make, sizes, TINY, compiled), routing, fp8


def rows(options: Options) -> Iterator[Row]:
    modes = MODES if options.modes is None else options.modes
    for case, routing, fp8 in cases():
        made: list[Problem] = []

        def make(*args: Any, make: Any = case.make, made: Any = made, **size: int) -> Problem:
            made[:] = [make(*args, **size)]
            return made[0]

        own = Case(case.name, make, case.sizes, case.tiny, case.compiled)
        alone: set[str] = set()
        for row in solve(own, options, modes if case.compiled else ()):
            size = row["size"]
            label = {key: row[key] for key in ("case", "size", "dtype")}
            if str(size) not in alone and "failure" not in row:
                alone.add(str(size))
                if not fp8 or has_scaled_grouped_mm(options.device):
                    for product in gemm_rows(options, size, routing, fp8=fp8):
                        yield with_flops({**label, **product})
            if row["pass"] == STEP and options.device.type == "cuda" and made:
                function = made[0].functions.get(row["contestant"])
                if function is not None and "failure" not in row:
                    count = functools.partial(host_waits, made[0], function)
                    waits, failure = timing.attempt(count)
                    row["host_waits"] = waits if failure is None else failure
            yield with_flops(row)


def with_flops(row: Row) -> Row:
    if "median_us" in row:
        flops = useful_flops(row["size"], row["pass"])
        row["tflops"] = flops / row["median_us"] * 1e-6
    return row
