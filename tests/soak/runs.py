"""Runs of the soak: unbroken ones, and ones that are saved and go on in fresh processes."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context, start_processes

from examples.lm_data import Corpus, load_corpus
from tests.soak.training import Case, Training

__all__ = ["Losses", "Schedule", "Soak", "difference", "first_difference"]

Losses = dict[tuple[int, str], float]
"""Of a run, by the number of the step and ``"loss"`` or ``"held_out"``."""


class Schedule(NamedTuple):
    """When something happens.

    Attributes:
        steps: of a run.
        evaluate: after so many steps the loss of what was held out is computed.
        resume: after so many steps a run that is to be broken is saved, and fresh processes go on.
    """

    steps: int = 300
    evaluate: int = 10
    resume: int = 50


class Segment(NamedTuple):
    """The steps of a run that are done by the same processes.

    Attributes:
        case: how they are done.
        first: how many there were before; what these have left is read, unless there were none.
        last: how many there are afterwards; a checkpoint is left, unless it is the last one.
        folder: of the run.
    """

    case: Case
    first: int
    last: int
    folder: Path


def _train(segment: Segment, schedule: Schedule, corpus: Corpus) -> None:
    training = Training(segment.case, corpus)
    if segment.first:
        training.load(segment.folder / str(segment.first))
    rows: list[dict[str, float]] = []
    while training.step < segment.last:
        loss = training.train()
        rows.append({"step": training.step, "loss": loss})
        if training.step % schedule.evaluate == 0:
            rows[-1]["held_out"] = training.evaluate()
    if segment.last < schedule.steps:
        training.save(segment.folder / str(segment.last))
    if dist.get_rank() == 0:
        with (segment.folder / "losses.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _process(
    rank: int, ranks: int, store: str, segments: list[Segment], schedule: Schedule, corpus: Corpus
) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.filterwarnings("ignore", "FP8 is emulated|.* are emulated|.* is emulated")
    # Of reentrant checkpoints in evaluation.
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    group = dist.FileStore(store, ranks)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=ranks)
    for segment in segments:
        _train(segment, schedule, corpus)
        gc.collect()  # the states of operations live until then
    dist.destroy_process_group()


class Soak:
    """Runs of some cases.

    Args:
        folder: an empty one.
        cases: the same processes train one after the other.
        schedule: of every run.
    """

    def __init__(self, folder: Path, cases: Sequence[Case], schedule: Schedule) -> None:
        self.folder, self.cases, self.schedule = folder, cases, schedule
        self.corpus = load_corpus()

    def unbroken(self, ranks: int) -> list[Losses]:
        """Of each case the losses of a run that nothing happens to."""
        return self._run(f"unbroken on {ranks}", [ranks], self.schedule.steps)

    def resumed(self, *ranks: int) -> list[Losses]:
        """Of runs that go on in fresh processes, on these numbers of ranks in turn."""
        return self._run(f"resumed on {ranks}", ranks, self.schedule.resume)

    def _run(self, name: str, ranks: Sequence[int], length: int) -> list[Losses]:
        steps = self.schedule.steps
        folders = [self.folder / name / str(case) for case in self.cases]
        for folder in folders:
            folder.mkdir(parents=True)
        for n, first in enumerate(range(0, steps, length)):
            last = min(first + length, steps)
            of = zip(self.cases, folders)
            segments = [Segment(case, first, last, folder) for case, folder in of]
            self._start(ranks[n % len(ranks)], segments)
        return [_losses(folder) for folder in folders]

    def _start(self, ranks: int, segments: list[Segment]) -> None:
        # Fresh processes, that need not import torch again: of a short run most of the time.
        get_context("forkserver").set_forkserver_preload([__name__])
        with tempfile.TemporaryDirectory() as store:
            given = (ranks, os.path.join(store, "store"), segments, self.schedule, self.corpus)
            start_processes(_process, given, nprocs=ranks, start_method="forkserver")


def _losses(folder: Path) -> Losses:
    rows = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    return {(row["step"], key): row[key] for row in rows for key in row.keys() - {"step"}}


def difference(ours: Losses, theirs: Losses) -> float:
    """The largest one, relative to the loss."""
    assert ours.keys() == theirs.keys()
    return max(abs(ours[key] - theirs[key]) / theirs[key] for key in theirs)


def first_difference(ours: Losses, theirs: Losses) -> int | None:
    """The first step after which a loss is another one; None if all are equal."""
    assert ours.keys() == theirs.keys()
    return min((key[0] for key in theirs if ours[key] != theirs[key]), default=None)
