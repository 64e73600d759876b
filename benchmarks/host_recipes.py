"""Host time of a feed-forward block with each recipe, against the same block without.

A region is opened at each step, as in training. All run in one process, alternating; medians are
compared. On a GPU a sample begins with an idle device and ends when the host is done. On a CPU,
where FP8 is emulated, most of the time is that of the emulation: calls of Python functions are what
can be compared there. A region updates the scales of all models in the process: ``--recipes`` takes
some alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from timing import HostTimer

import opfuser
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PredictedScaling,
    MXFP8BlockScaling,
    Recipe,
)

RECIPES: dict[str, Recipe | None] = {
    "without": None,
    "delayed": DelayedScaling(),
    "predicted": Float8PredictedScaling(),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),  # on a GPU that multiplies it
}
STEPS = 10  # per sample: few, so that no queue of launches is full


def step_of(recipe: Recipe | None, features: int, tokens: int, device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = opfuser.Sequential(
        opfuser.RMSNorm(features),
        opfuser.Linear(features, 2 * features, bias=False),
        opfuser.SwiGLU(),
        opfuser.Linear(features, features, bias=False),
    ).to(device, torch.bfloat16)
    x = torch.randn(tokens, features, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    leaves = [x, *model.parameters()]

    def step() -> None:
        if recipe is None:
            y = model(x)
        else:
            with opfuser.autocast(recipe=recipe):
                y = model(x)
        y.backward(dy)
        for leaf in leaves:
            leaf.grad = None

    return step


def calls_of(step: Callable[[], None]) -> Counter[str]:
    """Of functions in Python, and of builtin ones, among which those of torch are."""
    count: Counter[str] = Counter()

    def note(frame: object, event: str, argument: object) -> None:
        count[event] += 1

    sys.setprofile(note)
    step()
    sys.setprofile(None)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES)[:-1])
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".* is emulated")
    torch.set_num_threads(1)
    opfuser.replay("off")
    names = dict.fromkeys(["without", *args.recipes])
    steps = {
        name: step_of(RECIPES[name], args.features, args.tokens, args.device) for name in names
    }
    for step in steps.values():
        for _ in range(6):  # plans, compiles, and is recorded
            step()
    timer = HostTimer(torch.device(args.device), STEPS)
    times = [[timer(step) for step in steps.values()] for _ in range(args.rounds)]
    medians = [statistics.median(own) for own in zip(*times)]
    print(f"{'recipe':<12}{'us':>10}{'ratio':>8}{'calls':>8}{'builtin':>8}")
    for (name, step), median in zip(steps.items(), medians):
        ratio, calls = median / medians[0], calls_of(step)
        print(f"{name:<12}{median * 1e6:>10.1f}{ratio:>8.2f}{calls['call']:>8}{calls['c_call']:>8}")


if __name__ == "__main__":
    main()
