"""Reads every family of transformers that can be made tiny: recomputation, and mutations.

``python -m tests.reading.sweep [family ...]`` takes the families that are named, or all. Each
module that is read whole has to compute the same values and gradients in fp64, in evaluation, in
training and with a cache, which then holds the same; and with one operation more behind each of
its operations, it has to be kept or to be read with it. Prints what failed, and counts; exits with
1 if anything did.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from opfuser.reading.built import Built
from opfuser.reading.construction import build
from opfuser.reading.kept import KeptError
from opfuser.reading.operations import Reading

from .mutations import MUTATIONS, count_of, outcome_of
from .recomputed import Example, assert_equal_steps, called_in, read_of
from .tiny import calls_of, families, model_of

# Norms and softmax of many families are in fp32, whatever the dtype of the model.
RTOL = 1e-5
MODES = "evaluation", "training", "with a cache"


class Outcome(NamedTuple):
    """What became of a module: what was read and built, or the reason why it is kept."""

    path: str
    example: Example
    reading: Reading | None
    built: Built | None
    reason: str = ""

    @property
    def whole(self) -> bool:
        """Whether it is read without a child that is called."""
        return self.reading is not None and not called_in(self.reading)


def outcomes_of(family: str, mode: str = "evaluation") -> list[Outcome]:
    """What is read of a family's modules, one of each class, the outer ones first.

    In training, dropouts have the probability 1, at which nothing is left to chance. With a cache,
    there are the modules alone that are given one, in evaluation.

    Raises:
        Exception: of many kinds, if no tiny model can be made or called.
    """
    training, cached = mode == "training", mode == "with a cache"
    model = model_of(family, dropout=float(training), use_cache=cached).train(training)
    calls = calls_of(model)
    return [_outcome(*call) for call in calls if not cached or call.example.cache() is not None]


def _outcome(path: str, example: Example) -> Outcome:
    try:
        reading = read_of(example)
        return Outcome(path, example, reading, build(reading, example.module))
    except KeptError as kept:
        return Outcome(path, example, None, None, kept.reason)


def swept(family: str, counts: Counter[str], mode: str, *, mutants: bool) -> Iterator[str]:
    """Reads and mutates the modules of a family, counts, and returns what is wrong."""
    done: list[str] = []
    for outcome in outcomes_of(family, mode):
        counts["traces"] += 1
        kind = "read whole" if outcome.whole else "read in part" if outcome.reading else "kept"
        counts[kind] += 1
        if outcome.built is None:
            continue
        place = f"{family}, {outcome.path}, {mode}"
        try:
            assert_equal_steps(outcome.example, outcome.built, RTOL)
        except AssertionError as error:
            yield f"{place}: {error}"
        if any(outcome.path.startswith(f"{path}.") for path in done):
            continue
        done.append(outcome.path)
        yield from _missed(place, outcome.example, counts) if mutants else ()


def _missed(place: str, example: Example, counts: Counter[str]) -> Iterator[str]:
    """Mutates a module behind each of its operations, with all mutations in turn."""
    names = list(MUTATIONS)
    for number in range(count_of(example)):
        name = names[number % len(names)]
        counts["mutants"] += 1
        try:
            outcome_of(example, number, name, RTOL)
        except AssertionError:
            counts["missed"] += 1
            yield f"{place}: {name} behind operation {number} is missed"


def main(args: list[str]) -> int:
    """The exit status of the command."""
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    mutants = "--no-mutants" not in args
    failures = 0
    for family in [a for a in args if not a.startswith("--")] or families():
        for mode in MODES:
            try:
                wrong = list(swept(family, counts, mode, mutants=mutants))
            except Exception as error:  # noqa: BLE001 - whatever its code or configuration raises
                text = (str(error).splitlines() or [""])[0]
                print(f"{family}: no tiny model: {type(error).__name__}: {text[:120]}", flush=True)
                break
            failures += len(wrong)
            print(*wrong, sep="\n" if wrong else "", end="\n" if wrong else "", flush=True)
        else:
            counts["families"] += 1
    names = "families", "traces", "read whole", "read in part", "kept", "mutants", "missed"
    print(*(f"{counts[name]} {name}" for name in names), sep=", ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
