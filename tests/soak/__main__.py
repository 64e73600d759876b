"""Trains a small GPT in FP8 as long runs are trained, breaks it off, and compares the losses.

``python -m tests.soak``: recompute, micro-batches, evaluation in between, and checkpoints of
``torch.distributed.checkpoint`` from which fresh processes go on. Losses must be, bit for bit,
those of a run that nothing happens to on as many ranks, and on others the same to 1e-3. Prints a
table; exits with 1 where they are not. It takes an hour or two on a CPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.runs import Losses, Schedule, Soak, difference, first_difference
from tests.soak.training import CASES, RECIPES, Case

ACROSS = 1e-3
"""What runs on different numbers of ranks may differ by, relative to the loss."""


def options(argv: list[str] | None) -> argparse.Namespace:
    """What a command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__.split("\n")[0]
    )
    default = Schedule()
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--evaluate", type=int, default=default.evaluate, metavar="STEPS")
    parser.add_argument("--resume", type=int, default=default.resume, metavar="STEPS")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=(1, 2, 4))
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES], choices=[*RECIPES])
    return parser.parse_args(argv)


def equal(ours: Losses, theirs: Losses) -> tuple[str, bool]:
    """Whether losses are the same bit for bit, in words too."""
    step = first_difference(ours, theirs)
    if step is None:
        return "bit for bit", True
    return f"differs from step {step}, by {difference(ours, theirs):.1e}", False


def near(ours: Losses, theirs: Losses) -> tuple[str, bool]:
    """Whether losses of different numbers of ranks are the same, in words too."""
    found = difference(ours, theirs)
    return f"{found:.1e}", found <= ACROSS


def soak(case: Case, ranks: list[int], schedule: Schedule) -> bool:
    """Runs a case, prints its rows, and returns whether all is as it must be."""
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        runs = Soak(Path(folder), [case], schedule)
        one: Losses | None = None
        for count in ranks:
            began = time.perf_counter()
            (unbroken,), (resumed,) = runs.unbroken(count), runs.resumed(count)
            one = one or unbroken
            told, same = equal(resumed, unbroken)
            across, close = near(unbroken, one)
            passed &= same and close
            show(case, str(count), f"{unbroken[schedule.steps, 'loss']:.4f}", told, across, began)
        assert one is not None
        if len(ranks) > 1:
            began = time.perf_counter()
            (moved,) = runs.resumed(*ranks)
            across, close = near(moved, one)
            passed &= close
            turns = ", ".join(map(str, ranks))
            show(case, turns, f"{moved[schedule.steps, 'loss']:.4f}", "", across, began)
    return passed


def show(case: object, ranks: str, loss: str, resumed: str, across: str, began: float) -> None:
    seconds = f"{time.perf_counter() - began:.0f} s" if began else ""
    row = f"{case!s:<38}{ranks:<9}{loss:<10}{resumed:<40}{across:<12}{seconds}"
    print(row.rstrip(), flush=True)


def main(argv: list[str] | None = None) -> int:
    given = options(argv)
    schedule = Schedule(given.steps, given.evaluate, given.resume)
    show("case", "ranks", "last loss", "resumed on as many", "to the first", 0)
    cases = [case for case in CASES if case.recipe in given.recipes]
    passed = [soak(case, given.ranks, schedule) for case in cases]
    failed = [str(case) for case, well in zip(cases, passed) if not well]
    if failed:
        print(f"{len(failed)} of {len(cases)} cases failed: {'; '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
