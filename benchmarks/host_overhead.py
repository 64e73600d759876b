"""Host time per operation: an opfuser.Sequential against torch.nn.Sequential of equal modules.

The operations are tiny (a scale, a bias over 8 elements), so that nearly all of the time is host
overhead of Python and of the dispatcher. Both sides run in one process, alternating; medians are
compared. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import machine
from torch import Tensor, nn

import opfuser

WIDTH = 8


class Scale(nn.Module):
    """ConstantScale as a user of torch.nn would write it."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Bias(nn.Module):
    """Bias as a user of torch.nn would write it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def build(kind: str, count: int) -> tuple[nn.Module, nn.Module]:
    if kind == "scale":
        ours = opfuser.Sequential(*(opfuser.ConstantScale(1.01) for _ in range(count)))
        return ours, nn.Sequential(*(Scale(1.01) for _ in range(count)))
    ours = opfuser.Sequential(*(opfuser.Bias(WIDTH, device="cpu") for _ in range(count)))
    return ours, nn.Sequential(*(Bias(WIDTH) for _ in range(count)))


def make_call(model: nn.Module, train: bool) -> Callable[[], None]:
    x = torch.ones(1, WIDTH, requires_grad=train)
    grad = torch.ones(1, WIDTH)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def step() -> None:
        model(x).backward(grad)
        x.grad = None
        for p in model.parameters():
            p.grad = None

    return step if train else forward


def measure(calls: list[Callable[[], None]], rounds: int, repeat: int) -> list[float]:
    """Median seconds per call of each contestant, alternating between them."""
    for call in calls:
        for _ in range(repeat):
            call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, own in zip(calls, times):
            began = time.perf_counter()
            for _ in range(repeat):
                call()
            own.append((time.perf_counter() - began) / repeat)
    return [statistics.median(own) for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(
        f"{'operation':<10}{'count':>6}{'pass':>20}{'ours us/op':>12}{'torch.nn':>10}{'ratio':>8}"
    )
    for kind in ("scale", "bias"):
        for count in (4, 64):
            for train in (False, True):
                models = build(kind, count)
                calls = [make_call(model, train) for model in models]
                repeat = max(4, 1024 // count)
                ours, theirs = measure(calls, args.rounds, repeat)
                rows.append(
                    {
                        "operation": kind,
                        "count": count,
                        "pass": "forward + backward" if train else "forward, no grad",
                        "opfuser_us_per_op": ours / count * 1e6,
                        "torch_nn_us_per_op": theirs / count * 1e6,
                        "ratio": ours / theirs,
                    }
                )
                row = rows[-1]
                print(
                    f"{kind:<10}{count:>6}{row['pass']:>20}{row['opfuser_us_per_op']:>12.2f}"
                    f"{row['torch_nn_us_per_op']:>10.2f}{row['ratio']:>8.2f}"
                )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
