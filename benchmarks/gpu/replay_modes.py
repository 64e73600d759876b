"""Training steps with calls replayed nowhere, where it pays ("auto"), and everywhere; wall time.

The whole small models and the blocks, beside torch and ``torch.cuda.make_graphed_callables``. In
mode "auto" as many steps come first as a decision takes. ``over_off`` is a time in those of calls
as usual, and ``not_replayed`` says why a call was not replayed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import nn

import opfuser
from benchmarks import timing
from benchmarks.gpu import blocks, replay
from benchmarks.gpu.contest import solve
from benchmarks.gpu.passes import ready
from benchmarks.gpu.problem import (
    OURS,
    REFERENCE,
    STEP,
    Case,
    Function,
    Options,
    Problem,
    Row,
    Within,
)
from benchmarks.gpu.small import with_share_of_time
from benchmarks.gpu.small_problems import ENTRIES, GRAPHED, graphed
from benchmarks.gpu.torch_models import share

AUTO = "opfuser, auto"
STEPS = 60  # until "auto" has decided


def modes(options: Options, problem: Problem) -> Problem:
    """The problem with opfuser in every mode, each a model of its own with the same parameters."""
    source, model = problem.functions[REFERENCE], problem.functions[OURS]
    assert isinstance(source, nn.Module)
    assert isinstance(model, nn.Module)

    def ours() -> nn.Module:
        return share(copy.deepcopy(model), source)

    off = Within(ours(), lambda: opfuser.replay("off"))
    functions: dict[str, Function] = {OURS: off, REFERENCE: source}
    changed = replace(problem, functions=functions, traffic={STEP: None}, floor=None)
    missing = replay.missing(options.device)
    if missing is not None:
        return replace(changed, left_out=dict.fromkeys((AUTO, replay.REPLAYED, GRAPHED), missing))
    auto = ours()
    functions[AUTO] = Within(auto, lambda: opfuser.replay("auto"), lambda: replay.captured(auto))
    functions.update(replay.replayed(ours(), options.device))
    for name in (AUTO, replay.REPLAYED):
        settle(changed, functions[name])
    functions[GRAPHED] = graphed(ours())
    return changed


def settle(problem: Problem, function: Function) -> None:
    """Makes steps until it is decided whether they are replayed."""
    step = ready(problem, function, STEP, problem.draw())
    for _ in range(STEPS):
        step()
    timing.synchronize(problem.parameters[0].device)


def in_modes(case: Case) -> Case:
    def make(options: Options, **size: Any) -> Problem:
        return modes(options, case.make(options, **size))

    return replace(case, make=make)


def over_off(rows: list[Row]) -> list[Row]:
    """The rows of one problem, with each time in those of calls as usual."""
    off = next((row["median_us"] for row in rows if row["contestant"] == OURS), None)
    return [
        {**row, "over_off": row["median_us"] / off} if off and "median_us" in row else row
        for row in rows
    ]


def rows(options: Options) -> Iterator[Row]:
    of_blocks = blocks.CASES[:1] if options.tiny else blocks.CASES
    cases = [in_modes(case) for case in chain((entry.case for entry in ENTRIES), of_blocks)]
    for n, case in enumerate(cases):
        own = with_share_of_time(options, len(cases) - n)
        for size in case.sizes[: 1 if options.tiny else None]:
            yield from over_off(list(solve(replace(case, sizes=(size,)), own, ())))
