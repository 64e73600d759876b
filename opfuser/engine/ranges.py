"""Ranges of the steps of a pass in a profile, as torch.profiler and Nsight Systems show them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from torch.autograd.profiler import record_function

from ..fusion import Stage
from .plan import Step
from .schedule import BackwardStep, ForwardStep, Schedule

__all__ = ["backward_ranges", "forward_ranges", "replay_range"]


def forward_ranges(schedule: Schedule) -> Iterator[ForwardStep]:
    """The forward steps, each in a range that ends when the next one is asked for."""
    for laid_out, step in zip(schedule.forward, schedule.plan.forward):
        with record_function(_name(schedule, step, "forward")):
            yield laid_out


def backward_ranges(schedule: Schedule) -> Iterator[BackwardStep]:
    """As :func:`forward_ranges`, the backward steps in the order of execution."""
    for laid_out, step in zip(schedule.backward, reversed(schedule.plan.backward)):
        with record_function(_name(schedule, step, "backward")):
            yield laid_out


def replay_range(schedule: Schedule, stage: Stage) -> record_function:
    """The range of a pass that is replayed, in which the host runs no steps."""
    last = len(schedule.plan.basic_ops) - 1
    return record_function(_range(schedule, 0, last, "replay", stage))


def _name(schedule: Schedule, step: Step, stage: Stage) -> str:
    what = step.fusion or type(step.op).__name__
    return _range(schedule, step.indices[0], step.indices[-1], what, stage)


def _range(schedule: Schedule, first: int, last: int, what: str, stage: Stage) -> str:
    paths = schedule.paths
    where = f"{_span(paths[first], paths[last])}::" if paths else ""
    return f"opfuser::{where}{what}.{stage}"


def _span(first: str, last: str) -> str:
    """From one path to another: ``layers.0.norm-linear``."""
    if first == last:
        return first
    one, other = first.split("."), last.split(".")
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one[:-1], other[:-1]))))
    return f"{first}-{'.'.join(other[common:])}"
