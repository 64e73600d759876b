"""A residual sum behind a GEMM: after it, from a copy of the residual, or over the residual.

Device time without gradients. ``opfuser`` does not write to a residual that the caller holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from benchmarks import timing
from benchmarks.gpu.problem import Options, Row

SIZES = (
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 1024, 1024),
    (16384, 768, 768),
    (4096, 3072, 768),
)
TINY = ((4, 16, 8),)
Sum = Callable[[Tensor, Tensor], object]


def contestants(linear: nn.Module) -> dict[str, Sum]:
    """Functions of input and residual by name; the last one overwrites the residual."""
    w, b = linear.weight, linear.bias
    return {
        "opfuser": opfuser.Sequential(linear, opfuser.AddExtraInput()),
        "torch": lambda x, z: F.linear(x, w, b) + z,
        "bare GEMMs": lambda x, z: F.linear(x, w, b),
        "from a copy": lambda x, z: torch.addmm(z if b is None else z + b, x, w.t()),
        "over the residual": lambda x, z: (z if b is None else z.add_(b)).addmm_(x, w.t()),
    }


def rows(options: Options) -> Iterator[Row]:
    sizes = TINY if options.tiny else SIZES[: 1 if options.quick else None]
    for count, inner, outer in sizes:
        for bias in (False, True):
            case = "linear + sum" if bias else "linear without bias + sum"
            if not options.runs(case) or options.out_of_time():
                continue
            linear = opfuser.Linear(
                inner, outer, bias=bias, device=options.device, dtype=options.dtype
            )
            label = {"rows": count, "in": inner, "out": outer}
            for row in measured(linear, count, options):
                yield {"case": case, "size": label, "pass": "forward, no grad", **row}


@torch.no_grad()
def measured(linear: nn.Module, count: int, options: Options) -> Iterator[Row]:
    outer, inner = linear.weight.shape
    how = {"device": options.device, "dtype": options.dtype}
    places = timing.sets_needed(count * (inner + outer) * options.dtype.itemsize, options.device)
    x, z = torch.randn(places, count, inner, **how), torch.randn(places, count, outer, **how)
    timer = timing.DeviceTimer(options.device)
    turns = dict.fromkeys(contestants(linear), 0)

    def sampler(name: str, function: Sum) -> Callable[[], float]:
        def sample() -> float:
            turns[name] = n = (turns[name] + 1) % places
            z[n].normal_()  # repeated sums would overflow
            return timer(lambda: function(x[n], z[n]))

        return sample

    expected = F.linear(x[0], linear.weight, linear.bias) + z[0]
    for name, function in contestants(linear).items():
        if name != "bare GEMMs":
            off = torch.linalg.vector_norm(function(x[0], z[0].clone()) - expected)
            assert off <= 0.01 * torch.linalg.vector_norm(expected), name
    samplers = {name: sampler(name, f) for name, f in contestants(linear).items()}
    times, failures = timing.alternate(samplers, options.seconds)
    assert not failures, failures
    spreads = {name: timing.spread(own) for name, own in times.items()}
    for name, own in spreads.items():
        yield {
            "contestant": name,
            "dtype": str(options.dtype)[6:],
            "median_us": own.median * 1e6,
            "quartiles_us": [own.low * 1e6, own.high * 1e6],
            "samples": own.samples,
            "speedup": spreads["torch"].median / own.median,
            "over_floor": own.median / spreads["bare GEMMs"].median,
        }
