"""What computes the modules of a model, as data that prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from ..errors import counted


class Computed(NamedTuple):
    """A module whose calls a sequence of operations computes.

    Attributes:
        path: of the module in the model.
        operations: of the sequence.
        calls: number of its calls that a sequence computed.
        fell_back: number of its calls that its own forward computed, by reason.
        called: children that the sequence calls unchanged, by path, and why.
    """

    path: str
    operations: str
    calls: int = 0
    fell_back: tuple[tuple[str, int], ...] = ()
    called: tuple[tuple[str, str], ...] = ()

    def covers(self, path: str) -> bool:
        """Whether the sequence computes what a module inside does, without calling it."""
        return is_below(path, self.path) and not any(
            is_below(path, f"{self.path}.{child}".lstrip(".")) for child, _ in self.called
        )


class Inside(NamedTuple):
    """A module that is computed as part of another module's sequence.

    Attributes:
        path: of the module in the model.
        outer: path of that module.
    """

    path: str
    outer: str


class Kept(NamedTuple):
    """A module whose own forward computes its calls.

    Attributes:
        path: of the module in the model.
        reason: why, as a predicate of the module.
        fell_back: number of calls, by reason.
    """

    path: str
    reason: str
    fell_back: tuple[tuple[str, int], ...] = ()


class Report(NamedTuple):
    """Which modules with parameters are computed by sequences, and which are not.

    Each is in one of three lists. ``str(report)`` has one line for all modules with the same
    outcome.

    Attributes:
        computed: modules computed by sequences of operations.
        inside: modules inside of a computed one.
        kept: modules whose own forward runs.
    """

    computed: tuple[Computed, ...]
    inside: tuple[Inside, ...]
    kept: tuple[Kept, ...]

    def __str__(self) -> str:
        lines = ["computed by opfuser:" if self.computed else "nothing is computed by opfuser"]
        for done, paths in _grouped(self.computed).items():
            lines.append(f"  {_listed(paths)}: {counted(done.calls, 'call')} each")
            lines.append(f"    {done.operations}")
            lines += [f"    {child} is called: it {reason}" for child, reason in done.called]
            lines += _counts(done.fell_back)
        if self.inside:
            lines.append(f"  and {counted(len(self.inside), 'module')} inside of these")
        if self.kept:
            lines.append("kept as they are:")
        for left, paths in _grouped(self.kept).items():
            lines.append(f"  {_listed(paths)}: {left.reason}")
            if len(left.fell_back) > 1:
                lines += _counts(left.fell_back)
        return "\n".join(lines)


def is_below(path: str, outer: str) -> bool:
    """Whether a module is another one, or inside of it."""
    return not outer or path == outer or path.startswith(f"{outer}.")


Entry = TypeVar("Entry", Computed, Kept)


def _grouped(entries: Iterable[Entry]) -> dict[Entry, list[str]]:
    """The paths of those that differ in nothing else."""
    out: dict[Entry, list[str]] = {}
    for entry in entries:
        out.setdefault(entry._replace(path=""), []).append(entry.path)
    return out


def _counts(calls: tuple[tuple[str, int], ...]) -> list[str]:
    return [f"    {counted(n, 'call')} by its own forward: {reason}" for reason, n in calls]


def _listed(paths: list[str]) -> str:
    paths = [path or "the model itself" for path in paths]
    if len(paths) == 2:
        return ", ".join(paths)
    return paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]} ({len(paths)})"


def in_order(counts: Counter[str]) -> tuple[tuple[str, int], ...]:
    """Counts, the largest first."""
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
