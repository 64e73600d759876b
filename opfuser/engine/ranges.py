"""Ranges of the steps of a pass in a profile, as torch.profiler and Nsight Systems show them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from torch.autograd.profiler import record_function

from ..core.fusion import Stage
from .plan import Plan, Step


def place(paths: Sequence[str], step: Step) -> str:
    """Where a step stands, as in ``layers.0.norm-linear``; empty without paths."""
    return _span(paths[step.indices[0]], paths[step.indices[-1]]) if paths else ""


def range_of(paths: Sequence[str], step: Step, stage: Stage) -> record_function:
    """The range of a step; ``paths`` are those of all operations, if they have any."""
    return _range(paths, step.indices[0], step.indices[-1], step.name, stage)


def replay_range(plan: Plan, paths: Sequence[str], stage: Stage) -> record_function:
    """The range of a pass that is replayed, in which the host runs no steps."""
    return _range(paths, 0, len(plan.basic_ops) - 1, "replay", stage)


def _range(paths: Sequence[str], first: int, last: int, what: str, stage: Stage) -> record_function:
    where = f"{_span(paths[first], paths[last])}::" if paths else ""
    return record_function(f"opfuser::{where}{what}.{stage}")


def _span(first: str, last: str) -> str:
    """From one path to another: ``layers.0.norm-linear``."""
    if first == last:
        return first
    one, other = first.split("."), last.split(".")
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one[:-1], other[:-1]))))
    return f"{first}-{'.'.join(other[common:])}"
