"""Reads every family of transformers that can be made tiny: recomputation, and mutations.

``python -m tests.reading.sweep [family ...]`` takes the families that are named, or all. Each
module that is read has to compute the same values and gradients in fp64, in evaluation, in training
and with a cache, which then holds the same; and with one operation more behind each of its
operations, it has to be kept or to be read with it. Prints what failed, and counts, family by
family; exits with 1 if anything did. ``--part=2/8`` takes every eighth mutation from the third on,
so that eight runs take all, and ``--no-mutants`` none.
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

from .mutations import mutants_of, outcome_of
from .recomputed import Example, assert_equal_steps, called_in, read_of
from .tiny import calls_of, families, model_of

MODES = "evaluation", "training", "with a cache"


class NotMadeError(Exception):
    """No tiny model of a family can be made or called."""


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
        NotMadeError: no tiny model can be made or called.
    """
    training, cached = mode == "training", mode == "with a cache"
    try:
        model = model_of(family, dropout=float(training), use_cache=cached).train(training)
        calls = calls_of(model)
    except Exception as error:
        raise NotMadeError(_text_of(error)) from error
    return [_outcome(*call) for call in calls if not cached or call.example.cache() is not None]


def _outcome(path: str, example: Example) -> Outcome:
    try:
        reading = read_of(example)
        return Outcome(path, example, reading, build(reading, example.module))
    except KeptError as kept:
        return Outcome(path, example, None, None, kept.reason)


def _text_of(error: Exception) -> str:
    """The first line of an error, with its type."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def swept(
    family: str, counts: Counter[str], mode: str, part: tuple[int, int] | None
) -> Iterator[str]:
    """Reads and mutates the modules of a family, counts, and returns what is wrong.

    Args:
        family: type of its configuration.
        counts: to which its own are added.
        mode: one of ``MODES``.
        part: the first mutant and the distance of the next; None is no mutant.

    Raises:
        NotMadeError: no tiny model can be made or called.
    """
    done: list[str] = []
    for outcome in outcomes_of(family, mode):
        counts["traces"] += 1
        kind = "read whole" if outcome.whole else "read in part" if outcome.reading else "kept"
        counts[kind] += 1
        if outcome.built is None:
            continue
        place = f"{family}, {outcome.path}, {mode}"
        try:
            assert_equal_steps(outcome.example, outcome.built)
        except Exception as error:  # noqa: BLE001 - whatever computes otherwise raises
            counts["wrong"] += 1
            yield f"{place}: {_text_of(error)}"
        if any(outcome.path.startswith(f"{path}.") for path in done):
            continue
        done.append(outcome.path)
        yield from () if part is None else _missed(place, outcome.example, counts, *part)


def _missed(
    place: str, example: Example, counts: Counter[str], first: int, distance: int
) -> Iterator[str]:
    """Mutates a module behind each of its operations, with all mutations in turn."""
    for number, name in mutants_of(example)[first::distance]:
        counts["mutants"] += 1
        try:
            outcome_of(example, number, name)
        except Exception as error:  # noqa: BLE001 - as above
            counts["missed"] += 1
            yield f"{place}: {name} behind operation {number} is missed: {_text_of(error)}"


def _lines(
    family: str, counts: Counter[str], mode: str, part: tuple[int, int] | None
) -> Iterator[str]:
    """What is wrong in one mode of a family, and why it was not read."""
    try:
        yield from swept(family, counts, mode, part)
    except NotMadeError as error:
        yield f"{family}, {mode}: no tiny model: {error}"
    except Exception as error:  # noqa: BLE001 - whatever a reader that is wrong raises
        counts["wrong"] += 1
        yield f"{family}, {mode}: {_text_of(error)}"


def _told(counts: Counter[str]) -> str:
    """Counts, in one line."""
    names = "traces", "read whole", "read in part", "kept", "wrong", "mutants", "missed"
    return ", ".join(f"{counts[name]} {name}" for name in names)


def main(args: list[str]) -> int:
    """The exit status of the command."""
    warnings.simplefilter("ignore")
    options = dict(a[2:].partition("=")[::2] for a in args if a.startswith("--"))
    first, distance = map(int, options.get("part", "0/1").split("/"))
    part = None if "no-mutants" in options else (first, distance)
    total: Counter[str] = Counter()
    for family in [a for a in args if not a.startswith("--")] or families():
        counts: Counter[str] = Counter()
        for mode in MODES:
            for wrong in _lines(family, counts, mode, part):
                print(wrong, flush=True)
            if not counts["traces"]:
                break  # what cannot be made in evaluation never can
        counts["families"] = bool(counts["traces"])
        print(f"{family}: {_told(counts)}", flush=True)
        total += counts
    print(f"{total['families']} families, {_told(total)}")
    return 1 if total["wrong"] or total["missed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
