"""Host time: of a launch by opfuser's launcher, by Triton and bare; and of operations.

Tensors are so small that the device always waits. A bare launch calls the compiled kernel with all
arguments in place: the lower bound of any launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from benchmarks import timing
from benchmarks.gpu import peers
from benchmarks.gpu.problem import Function, Options, Row
from benchmarks.gpu.row_problems import EPS, layer, rms
from benchmarks.gpu.torch_models import swiglu
from opfuser.kernels.launch import Recorded, recorded

ROWS, COLS = 4, 128
LAUNCHES = 200  # in a row, per sample
STEPS = 20


@dataclass(frozen=True)
class Kind:
    """An operation, its inputs and the contestants."""

    name: str
    functions: dict[str, Function]
    parameters: tuple[nn.Parameter, ...] = ()


def kinds(options: Options) -> tuple[Kind, ...]:
    w, norm = rms(options, COLS)
    lw, lb, layer_norm = layer(options, COLS)
    return (
        Kind(
            "RMSNorm",
            {
                "opfuser": opfuser.Sequential(norm),
                "torch": lambda x: F.rms_norm(x, (COLS,), w, EPS),
                **peers.rms_norm(w, EPS),
            },
            (w,),
        ),
        Kind(
            "LayerNorm",
            {
                "opfuser": opfuser.Sequential(layer_norm),
                "torch": lambda x: F.layer_norm(x, (COLS,), lw, lb, EPS),
                **peers.layer_norm(lw, lb, EPS),
            },
            (lw, lb),
        ),
        Kind(
            "SwiGLU",
            {"opfuser": opfuser.Sequential(opfuser.SwiGLU()), "torch": swiglu, **peers.swiglu()},
        ),
    )


def rows(options: Options) -> Iterator[Row]:
    label = {"size": {"rows": ROWS, "cols": COLS}, "dtype": str(options.dtype)[6:]}
    for kind in kinds(options):
        if not options.runs(kind.name):
            continue
        x = torch.randn(ROWS, COLS, device=options.device).to(options.dtype)
        for passed, make in (("forward, no grad", forward_call), ("step", step_call)):
            calls = {who: make(f, x, kind.parameters) for who, f in kind.functions.items()}
            for row in measured(calls, options, STEPS):
                yield {"case": kind.name, **label, "pass": passed, **row}
        if options.tiny:
            failure = "not run: launches need a CUDA device"
            yield {
                "case": kind.name,
                **label,
                "pass": "launch",
                "contestant": "",
                "failure": failure,
            }
            continue
        with recorded() as launches:
            step_call(kind.functions["opfuser"], x, kind.parameters)()
        for launch in launches:
            for row in measured(launch_calls(launch), options, LAUNCHES):
                yield {"case": launch.launch.name, **label, "pass": "launch", **row}


def forward_call(function: Function, x: Tensor, _: tuple[nn.Parameter, ...]) -> timing.Call:
    def forward() -> None:
        with torch.no_grad():
            function(x)

    return forward


def step_call(function: Function, x: Tensor, parameters: tuple[nn.Parameter, ...]) -> timing.Call:
    leaf = x.clone().requires_grad_()
    dy: list[Tensor] = []

    def step() -> None:
        y = function(leaf)
        if not dy:
            dy.append(torch.randn_like(y))
        y.backward(dy[0])
        for t in (leaf, *parameters):
            t.grad = None

    return step


def launch_calls(noted: Recorded) -> dict[str, timing.Call]:
    launch, grid = noted.launch, noted.grid
    args = (*noted.tensors, *noted.ints, *noted.floats, *launch.values)
    function = launch.function
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    kernel = function[grid](*args, **options)
    run, handle, metadata = kernel.run, kernel.function, kernel.packed_metadata
    stream = torch.cuda.current_stream().cuda_stream
    own = noted.tensors, noted.ints, noted.floats
    return {
        "opfuser": lambda: launch(grid, *own),
        "Triton": lambda: function[grid](*args, **options),
        "bare": lambda: run(*grid, stream, handle, metadata, None, None, None, *args),
    }


def measured(
    calls: dict[str, Callable[[], object]], options: Options, repeat: int
) -> Iterator[Row]:
    timer = timing.HostTimer(options.device, repeat)
    samplers = {name: (lambda call=call: timer(call)) for name, call in calls.items()}
    times, failures = timing.alternate(samplers, options.seconds)
    for name, failure in failures.items():
        yield {"contestant": name, "failure": failure}
    medians = {name: timing.spread(own) for name, own in times.items()}
    for name, own in medians.items():
        row: Row = {
            "contestant": name,
            "median_us": own.median * 1e6,
            "quartiles_us": [own.low * 1e6, own.high * 1e6],
            "samples": own.samples,
        }
        if "torch" in medians:
            row["speedup"] = medians["torch"].median / own.median
        if "bare" in medians:
            row["over_bare_us"] = (own.median - medians["bare"].median) * 1e6
        yield row
