"""Which fusion makes a command fail: it is run with some fusions on and the others off."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from ..errors import TargetError
from ..registry import effective
from .inputs import said

_NOT_STARTED = (126, 127)  # what a shell returns for a command that it cannot run


class Outcome(NamedTuple):
    """How one run of a command ended.

    Attributes:
        status: exit status; negative: the signal that ended it.
        matches: whether its output is that of the failure in question.
        last_line: of the output.
    """

    status: int
    matches: bool = True
    last_line: str = ""

    @property
    def passes(self) -> bool:
        return self.status == 0

    def __str__(self) -> str:
        if self.passes:
            return "passes"
        if self.status < 0:
            try:
                how = signal.Signals(-self.status).name
            except ValueError:
                how = f"signal {-self.status}"
        else:
            how = f"exit status {self.status}"
        return f"fails ({how})" if self.matches else f"fails otherwise ({how})"


class Found(NamedTuple):
    """What :func:`find` has found.

    Attributes:
        fails: whether the command fails at all.
        without: whether it fails without any fusion.
        unknown: whether a fusion causes it that is registered by the command itself, so that it has
            not been told apart.
        causes: sets of fusions; all of a set have to be on for the command to fail.
        others: runs that failed in another way and were not counted.
        remedy_passes: whether the command passes with all of them off and the others on.
    """

    fails: bool
    without: bool = False
    unknown: bool = False
    causes: tuple[tuple[str, ...], ...] = ()
    others: int = 0
    remedy_passes: bool = False

    @property
    def names(self) -> list[str]:
        """All fusions that take part in a failure."""
        return [name for cause in self.causes for name in cause]


class Command:
    """A command that is run with fusions switched by the environment.

    Args:
        words: program and arguments.
        match: a regular expression; only failures whose output it is found in count.
        environ: of the command, besides the switches; None: that of this process.
    """

    def __init__(
        self, words: Sequence[str], match: str = "", environ: Mapping[str, str] | None = None
    ) -> None:
        self.words = list(words)
        try:
            self._match = re.compile(match)
        except re.error as error:
            raise TargetError.explained(
                "--match takes a regular expression", received=f"{match!r}: {error}"
            ) from error
        self._environ = dict(os.environ if environ is None else environ)

    def __str__(self) -> str:
        return shlex.join(self.words)

    def environment(self, off: Sequence[str]) -> dict[str, str]:
        """The variables of a run in which these fusions are off, and all others as they were."""
        listed = {name: self._environ.get(name, "").split(",") for name in _SWITCHES}
        disabled = [name.strip() for name in listed["OPFUSER_DISABLE"] if name.strip()]
        enabled = [name.strip() for name in listed["OPFUSER_ENABLE"] if name.strip()]
        everything = "*" in off  # an enabled fusion would stay on in spite of it
        return {
            **self._environ,
            "OPFUSER_DISABLE": ",".join(dict.fromkeys([*disabled, *off])),
            "OPFUSER_ENABLE": "" if everything else ",".join(n for n in enabled if n not in off),
        }

    def settings(self, off: Sequence[str]) -> str:
        """The variables that :meth:`environment` changes, as a shell sets them."""
        after = self.environment(off)
        changed = [n for n in _SWITCHES if after[n] != self._environ.get(n, "")]
        return " ".join(f"{name}={shlex.quote(after[name])}" for name in changed)

    def run(self, off: Sequence[str]) -> Outcome:
        """Runs the command to its end with these fusions off.

        Raises:
            TargetError: it cannot be started.
        """
        try:
            done = subprocess.run(
                self.words,
                env=self.environment(off),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
        except OSError as error:
            raise TargetError.explained(
                "The command cannot be started", received=f"{self}: {said(error)}"
            ) from error
        text = done.stdout.decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else ""
        if done.returncode in _NOT_STARTED:
            raise TargetError.explained(
                "The command cannot be started",
                received=f"{self}: exit status {done.returncode}" + (f", {last}" * bool(last)),
            )
        return Outcome(done.returncode, self._match.search(text) is not None, last)


_SWITCHES = ("OPFUSER_DISABLE", "OPFUSER_ENABLE")


def candidates() -> list[str]:
    """The fusions that are on, at least in some place, in the order in which they run."""
    on = (setting.name for setting in effective() if setting.setting == "enabled" and setting.value)
    return list(dict.fromkeys(on))


def find(
    names: Sequence[str],
    run: Callable[[Sequence[str]], Outcome],
    tell: Callable[[str], None] = lambda line: None,
) -> Found:
    """Finds the fusions that make a command fail, by runs with some of them off.

    The failure in question is that of the first run, in which all are on. A run that ends with
    another status, or without the text looked for, fails for a reason of its own and does not
    count. Each cause is a smallest set: with any of its fusions off and nothing else on but the
    set, the command does not fail so. A single fusion of ``n`` takes about ``2 log2(n)`` runs.

    Args:
        run: runs the command with these fusions off, ``"*"`` for all that there are.
        tell: called with a line before and about each run.

    Raises:
        TargetError: the first failure is not the one looked for, or without fusions the command
            fails in another way.
    """
    runs = 0
    others = 0

    def outcome(off: Sequence[str], what: str) -> Outcome:
        nonlocal runs, others
        runs += 1
        done = run(off)
        last = f": {done.last_line}" if runs == 1 and not done.passes and done.last_line else ""
        tell(f"run {runs}: {what}: {done}{last}")
        others += not (done.passes or fails(done))
        return done

    def fails(done: Outcome) -> bool:
        return done.matches and done.status == first.status

    def fails_with(on: Sequence[str]) -> bool:
        off = [name for name in names if name not in on]
        return fails(outcome(off, f"only {_listed(on, names)}"))

    first = Outcome(0)
    first = outcome((), _all(len(names)))
    if first.passes:
        return Found(False)
    if not first.matches:
        raise TargetError.explained(
            "The output of the failure has to contain what --match says",
            received=f"{first}, last line {first.last_line!r}",
        )
    others = 0
    without = outcome(names, f"without {', '.join(names)}" if names else "as they are")
    if fails(without):
        without = outcome([*names, "*"], "without any, those that the command registers too")
        if not without.passes and not fails(without):
            raise _fails_otherwise(without)
        return Found(True, without=fails(without), unknown=without.passes)
    if not without.passes:
        raise _fails_otherwise(without)
    causes: list[tuple[str, ...]] = []
    rest = list(names)
    while rest:
        causes.append(minimal(rest, fails_with))
        rest = [name for name in rest if name not in causes[-1]]
        gone = [name for cause in causes for name in cause]
        last = outcome(gone, f"all but {', '.join(gone)}")
        if not fails(last):
            return Found(True, causes=tuple(causes), others=others, remedy_passes=last.passes)
    return Found(True, causes=tuple(causes), others=others)


def minimal(names: Sequence[str], fails_with: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """A set of ``names`` that fails, while no set with one name less does.

    Delta debugging (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input,
    2002): halves first, then complements of ever smaller pieces.
    """
    found, pieces = list(names), 2
    known: dict[frozenset[str], bool] = {frozenset(found): True, frozenset(): False}

    def fails(part: Sequence[str]) -> bool:
        key = frozenset(part)
        if key not in known:
            known[key] = fails_with(part)
        return known[key]

    while len(found) > 1:
        bounds = [n * len(found) // pieces for n in range(pieces + 1)]
        parts = [found[a:b] for a, b in pairwise(bounds)]
        smaller = next((part for part in parts if fails(part)), None)
        if smaller is not None:
            found, pieces = smaller, 2
            continue
        complements = ([name for name in found if name not in part] for part in parts)
        smaller = next((part for part in complements if fails(part)), None)
        if smaller is not None:
            found, pieces = smaller, max(pieces - 1, 2)
        elif pieces < len(found):
            pieces = min(2 * pieces, len(found))
        else:
            break
    return tuple(found)


def _all(count: int) -> str:
    return "1 fusion as it is" if count == 1 else f"all {count} fusions as they are"


def _listed(some: Sequence[str], names: Sequence[str]) -> str:
    """Some of the names, three or more that follow each other as the first to the last one."""
    texts: list[str] = []
    at = [n for n, name in enumerate(names) if name in some]
    for _, numbered in groupby(enumerate(at), lambda pair: pair[1] - pair[0]):
        row = [names[n] for _, n in numbered]
        texts += row if len(row) < 3 else [f"{row[0]} to {row[-1]}"]
    return ", ".join(texts)


def _fails_otherwise(done: Outcome) -> TargetError:
    return TargetError.explained(
        "Without fusions the command has to pass, or to fail as it does with them",
        received=f"it {done}, last line {done.last_line!r}",
        remedy="Say with --match which failures are meant, or mend that one first",
    )
