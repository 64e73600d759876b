"""torch.compile of opfuser against torch.compile of torch.nn, with the same parameters.

Of each model of ``host_models.py``: the time until the first step is traced (Dynamo and
AOTAutograd, without code generation), how often steps of changing lengths are traced, and the time
of a compiled step. All of it in one process, alternating; medians are compared. Prints a table and
writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import host_models
import torch
import torch._dynamo.testing
from host_overhead import make_call, measure
from machine import machine
from torch import Tensor, nn

CASES = (
    *(case for case in host_models.CASES if case.name.startswith(("GPT", "language model"))),
    host_models.trained("language model, 12 layers", 12),
)
LENGTHS = (32, 24, 40, 17, 33)
CPU = torch.device("cpu")


def counting() -> Any:
    """A backend that generates no code, and counts the graphs that it gets."""
    return torch._dynamo.testing.CompileCounterWithBackend("aot_eager")


def step(model: Callable[..., Tensor], *inputs: Tensor) -> None:
    model(*inputs).sum().backward()


def seconds_to_trace(
    models: Iterable[nn.Module], inputs: tuple[Tensor, ...], rounds: int
) -> list[float]:
    """Median processor time of each model's first step; what a process does once comes before."""
    times: list[list[float]] = []
    for _ in range(1 + rounds):
        times.append([])
        for model in models:
            torch.compiler.reset()
            began = time.process_time()
            step(torch.compile(model, fullgraph=True, backend="aot_eager"), *inputs)
            times[-1].append(time.process_time() - began)
    return [statistics.median(own) for own in zip(*times[1:])]


def graphs(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """How often steps of changing lengths are traced."""
    torch.compiler.reset()
    backend = counting()
    compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
    for length in LENGTHS:
        step(compiled, *[x.repeat(1, 2, *[1] * (x.dim() - 2))[:, :length] for x in inputs])
    return int(backend.frame_count)


def seconds_to_step(
    models: tuple[nn.Module, ...], inputs: tuple[Tensor, ...], rounds: int
) -> list[float]:
    torch.compiler.reset()
    calls = [make_call(torch.compile(m, fullgraph=True), inputs, True) for m in models]
    return measure(tuple(calls), rounds, CPU)


def row(case: host_models.Case, traces: int, rounds: int) -> dict[str, Any]:
    ours, theirs, inputs = case.build(CPU)
    models = {"opfuser": ours, "torch_nn": theirs}
    found: dict[str, Any] = {"case": case.name}
    times = seconds_to_trace(models.values(), inputs, traces)
    for (name, model), seconds in zip(models.items(), times):
        found |= {f"{name}_trace_s": seconds, f"{name}_graphs": graphs(model, inputs)}
    if rounds:
        steps = seconds_to_step((ours, theirs), inputs, rounds)
        found |= {f"{name}_step_us": 1e6 * own for name, own in zip(models, steps)}
    return found


def cell(found: dict[str, Any], what: str, scale: float = 1) -> str:
    if f"opfuser_{what}" not in found:
        return f"{'':>28}"
    own, other = found[f"opfuser_{what}"] * scale, found[f"torch_nn_{what}"] * scale
    return f"{own:>10.1f}{other:>10.1f}{own / other:>8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="of steps; 0 generates no code")
    parser.add_argument("--traces", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'opfuser, torch.nn, ratio':<28}{'trace, ms':>28}{'step, us':>28}{'graphs':>12}")
    for case in CASES:
        if args.only not in case.name:
            continue
        found = row(case, args.traces, args.rounds)
        rows.append(found)
        counts = f"{found['opfuser_graphs']:>8}{found['torch_nn_graphs']:>4}"
        print(f"{case.name:<28}{cell(found, 'trace_s', 1e3)}{cell(found, 'step_us')}{counts}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
