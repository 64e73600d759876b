"""Training step of a pre-norm SwiGLU block on a CPU: opfuser, torch.nn, torch.compile, bare GEMMs.

The block is ``x + down(silu(gate) * up)`` with ``[gate, up] = gate_up(rms_norm(x))``; a step is its
forward and backward, for the gradients of x and of all weights. All contestants run in one process,
alternating; medians are compared. The floor is the six matrix products that no formulation can
avoid. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPS = 1e-5


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def manual_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    return x * rstd.to(x.dtype) * weight


class Block(nn.Module):
    """The block in torch.nn; ``norm`` is one formulation of RMSNorm."""

    def __init__(self, d: int, f: int, norm: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.ones(d))
        self.gate_up = nn.Linear(d, 2 * f, bias=False)
        self.down = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x, self.weight)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def opfuser_block(d: int, f: int) -> nn.Module:
    return opfuser.Residual(
        opfuser.RMSNorm(d, eps=EPS),
        opfuser.Linear(d, 2 * f, bias=False),
        opfuser.SwiGLU(),
        opfuser.Linear(f, d, bias=False),
    )


def share_weights(model: nn.Module, source: nn.Module) -> nn.Module:
    with torch.no_grad():
        for own, theirs in zip(model.parameters(), source.parameters()):
            own.copy_(theirs)
    return model


def training_step(model: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    x = x.clone().requires_grad_()

    def step() -> None:
        model(x).backward(dy)
        x.grad = None
        for p in model.parameters():
            p.grad = None

    return step


def bare_gemms(d: int, f: int, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward, input gradient and weight gradient of both linears, and nothing else."""
    w1, w2 = torch.randn(2 * f, d, dtype=x.dtype), torch.randn(d, f, dtype=x.dtype)
    h = torch.randn(len(x), f, dtype=x.dtype)
    dgate_up = torch.randn(len(x), 2 * f, dtype=x.dtype)

    def step() -> None:
        torch.mm(x, w1.t())
        torch.mm(h, w2.t())
        torch.mm(dy, w2)
        torch.mm(dy.t(), h)
        torch.mm(dgate_up, w1)
        torch.mm(dgate_up.t(), x)

    return step


def contestants(
    d: int, f: int, tokens: int, dtype: torch.dtype, compiled: bool
) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    x, dy = torch.randn(tokens, d).to(dtype), torch.randn(tokens, d).to(dtype)
    source = Block(d, f, torch_rms_norm).to(dtype)
    models = {
        "opfuser": share_weights(opfuser_block(d, f).to(dtype), source),
        "torch.nn, F.rms_norm": source,
        "torch.nn, manual norm": share_weights(Block(d, f, manual_rms_norm).to(dtype), source),
    }
    if compiled:
        block = share_weights(Block(d, f, manual_rms_norm).to(dtype), source)
        models["torch.compile"] = torch.compile(block)
    check(models, x)
    steps = {name: training_step(model, x, dy) for name, model in models.items()}
    return {**steps, "bare GEMMs": bare_gemms(d, f, x, dy)}


def check(models: dict[str, nn.Module], x: Tensor) -> None:
    """Checks that all contestants compute the same results."""
    with torch.no_grad():
        outputs = {name: model(x).double() for name, model in models.items()}
    wanted = outputs["torch.nn, F.rms_norm"]
    bound = 8 * torch.finfo(x.dtype).eps * wanted.abs().max()
    for name, y in outputs.items():
        if (y - wanted).abs().max() > bound:
            raise AssertionError(f"{name} computes something else")


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each contestant, alternating between them."""
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - began)
    return times


def summarize(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    medians = {name: statistics.median(own) for name, own in times.items()}
    eager = min(value for name, value in medians.items() if name.startswith("torch.nn"))
    rows = []
    for name, own in times.items():
        low, _, high = statistics.quantiles(own, n=4)
        rows.append(
            {
                "name": name,
                "median_ms": medians[name] * 1e3,
                "quartiles_ms": [low * 1e3, high * 1e3],
                "fastest_ms": min(own) * 1e3,
                "over_gemms": medians[name] / medians["bare GEMMs"],
                "over_fastest_eager": medians[name] / eager,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--f", type=int, default=1792)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    compiled = not args.no_compile
    if compiled and shutil.which(os.environ.get("CXX", "g++")) is None:
        print("torch.compile is left out: there is no C++ compiler")
        compiled = False
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(f"d={args.d}, f={args.f}, {args.tokens} tokens; medians of {args.rounds} rounds, in ms")
    print(
        f"{'':<6}{'':<24}{'median':>9}{'quartiles':>18}{'fastest':>9}{'/ GEMMs':>9}{'/ eager':>9}"
    )
    results = {}
    for label in args.dtypes:
        steps = contestants(args.d, args.f, args.tokens, DTYPES[label], compiled)
        results[label] = summarize(measure(steps, args.rounds))
        for row in results[label]:
            low, high = row["quartiles_ms"]
            print(
                f"{label:<6}{row['name']:<24}{row['median_ms']:>9.2f}"
                f"{f'{low:.2f} - {high:.2f}':>18}{row['fastest_ms']:>9.2f}"
                f"{row['over_gemms']:>9.2f}{row['over_fastest_eager']:>9.2f}"
            )
    if args.json is not None:
        shape = {"d": args.d, "f": args.f, "tokens": args.tokens, "rounds": args.rounds}
        document = {"machine": machine(), "shape": shape, "results": results}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
