"""Kernels of one backward pass on a GPU, with and without ``opfuser.overlap_wgrad``, as a picture.

``python examples/overlap_timeline.py --out overlap_timeline.svg`` profiles a SwiGLU block.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from torch import nn
from torch.profiler import ProfilerActivity, profile

import opfuser

GEMM = ("gemm", "nvjet", "cutlass", "cublas")
WAITING, CYCLES = "spin_kernel", 20_000_000  # some 10 ms
COLOURS = {"GEMM": "#3b6fb6", "other": "#c9793a"}


class Kernel(NamedTuple):
    """A kernel on a stream, from ``start`` on, in microseconds."""

    name: str
    stream: int
    start: float
    duration: float

    @property
    def kind(self) -> str:
        return "GEMM" if any(part in self.name.lower() for part in GEMM) else "other"


def kernels(trace: dict[str, Any]) -> list[Kernel]:
    """The kernels of a trace, in order, but for the one that holds them; the first starts at 0."""
    found = [
        Kernel(e["name"], int(e["args"]["stream"]), float(e["ts"]), float(e["dur"]))
        for e in trace["traceEvents"]
        if e.get("cat") == "kernel" and WAITING not in e["name"]
    ]
    found.sort(key=lambda kernel: kernel.start)
    return [k._replace(start=k.start - found[0].start) for k in found]


def length(found: Iterable[Kernel]) -> float:
    """From the first start to the last end."""
    return max(k.start + k.duration for k in found)


def picture(passes: dict[str, list[Kernel]]) -> Figure:
    """A row for each pass and stream; boxes are kernels."""
    rows = [(name, s) for name, own in passes.items() for s in dict.fromkeys(k.stream for k in own)]
    figure = Figure(figsize=(10, 1 + 0.6 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for height, (name, stream) in enumerate(reversed(rows)):
        for k in passes[name]:
            if k.stream == stream:
                axes.broken_barh(
                    [(k.start, k.duration)], (height - 0.35, 0.7), facecolor=COLOURS[k.kind],
                    edgecolor="white", linewidth=0.3,
                )  # fmt: skip
    axes.set_yticks(
        range(len(rows)),
        [f"{name}: stream {stream}, {length(passes[name]):.0f} us" for name, stream in rows[::-1]],
    )
    axes.set_xlabel("microseconds")
    for kind, colour in COLOURS.items():
        axes.bar(0, 0, color=colour, label=kind)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(COLOURS), frameon=False)
    return figure


def backward_kernels(model: nn.Module, x: torch.Tensor) -> list[Kernel]:
    """Those of the third backward pass, and of the second one that is profiled.

    They wait for a kernel of some milliseconds, so that the GPU never waits for the host.
    """
    model(x).sum().backward()
    for _ in range(2):
        loss = model(x).sum()
        torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, acc_events=True) as profiler:
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            loss.backward()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return kernels(json.loads(file.read_text()))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path("overlap_timeline.svg"))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("A timeline of streams needs a CUDA device.")
        return
    to: Any = {"device": "cuda", "dtype": torch.bfloat16}
    model = opfuser.Residual(
        opfuser.RMSNorm(args.dim, **to),
        opfuser.Linear(args.dim, 8 * args.dim, bias=False, **to),
        opfuser.SwiGLU(),
        opfuser.Linear(4 * args.dim, args.dim, bias=False, **to),
    )
    x = torch.randn(args.tokens, args.dim, **to, requires_grad=True)
    passes = {"one stream": backward_kernels(model, x)}
    with opfuser.overlap_wgrad(model):
        passes["overlapped"] = backward_kernels(model, x)
    FigureCanvasSVG(picture(passes)).print_svg(args.out)
    for name, own in passes.items():
        print(f"{name}: {length(own):.0f} us")


if __name__ == "__main__":
    main()
