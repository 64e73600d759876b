"""Host time of eager calls: opfuser against torch.nn with the same parameters.

The last case is a model of transformers after ``opfuser.hf.apply`` against the untouched one.

The models of ``host_models.py`` are tiny, so that nearly all of the time is host overhead of Python
and of the dispatcher. Both sides run in one process, alternating; medians are compared. On a GPU a
sample begins with an idle device and ends when the host is done. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from host_models import CASES, Case
from machine import machine
from timing import HostTimer
from torch import Tensor, nn

import opfuser

SAMPLE = 0.01  # seconds, about


def make_call(model: nn.Module, inputs: tuple[Tensor, ...], train: bool) -> Callable[[], None]:
    leaves = [x.requires_grad_(train) for x in inputs if x.is_floating_point()]
    leaves += model.parameters()
    with torch.no_grad():
        grad = torch.ones_like(model(*inputs))

    def forward() -> None:
        with torch.no_grad():
            model(*inputs)

    def step() -> None:
        model(*inputs).backward(grad)
        for leaf in leaves:
            leaf.grad = None

    return step if train else forward


def measure(
    calls: tuple[Callable[[], None], ...], rounds: int, device: torch.device
) -> list[float]:
    """Median seconds per call of each contestant, alternating between them."""
    first = HostTimer(device, 1)
    longest = max(min(first(call) for _ in range(5)) for call in calls)
    timer = HostTimer(device, max(1, int(SAMPLE / longest)))
    times = [[timer(call) for call in calls] for _ in range(1 + rounds)][1:]
    return [statistics.median(own) for own in zip(*times)]


def row(case: Case, train: bool, rounds: int, device: torch.device) -> dict[str, str | float]:
    ours, theirs, inputs = case.build(device)
    calls = make_call(ours, inputs, train), make_call(theirs, inputs, train)
    own, other = measure(calls, rounds, device)
    return {
        "case": case.name,
        "pass": "forward + backward" if train else "forward, no grad",
        "opfuser_us_per_op": own / case.operations * 1e6,
        "torch_nn_us_per_op": other / case.operations * 1e6,
        "ratio": own / other,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    opfuser.replay("off")
    rows = []
    print(f"{'case':<26}{'pass':>20}{'ours us/op':>12}{'torch.nn':>10}{'ratio':>8}")
    for case in CASES:
        if args.only not in case.name:
            continue
        for train in (False, True):
            found = row(case, train, args.rounds, args.device)
            rows.append(found)
            print(
                f"{found['case']:<26}{found['pass']:>20}{found['opfuser_us_per_op']:>12.2f}"
                f"{found['torch_nn_us_per_op']:>10.2f}{found['ratio']:>8.2f}"
            )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
