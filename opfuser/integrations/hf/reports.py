"""What became of a model, as data that prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from opfuser.errors import counted

__all__ = ["Kept", "Replaced", "Report"]


class Replaced(NamedTuple):
    """A module whose ``forward`` runs a sequence.

    Attributes:
        path: of the module in the model.
        what: "norm", "mlp", "experts", "attention", "layer" or "loss".
        fusions: of the plan of its sequence, for training in the dtype of its parameters.
        notes: what inside of it is called as it is, and why.
        calls: how many calls the untouched forward took, by the reason.
    """

    path: str
    what: str
    fusions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    calls: tuple[tuple[str, int], ...] = ()


class Kept(NamedTuple):
    """A module that is as it was, though its like may be replaced.

    Attributes:
        path: of the module in the model.
        why: the reason.
        calls: as of :class:`Replaced`, if it was replaced once.
    """

    path: str
    why: str
    calls: tuple[tuple[str, int], ...] = ()


class Report(NamedTuple):
    """What of a model runs as sequences of operations, and what does not and why.

    ``str(report)`` is a text with one line for all modules of which the same holds.

    Attributes:
        replaced: modules inside of another one that is replaced are left out, but for mixtures of
            experts.
        kept: likewise.
    """

    replaced: tuple[Replaced, ...]
    kept: tuple[Kept, ...]

    def __str__(self) -> str:
        lines = ["replaced:" if self.replaced else "nothing is replaced"]
        for done, paths in _grouped(self.replaced).items():
            lines.append(f"  {done.what} x{len(paths)}: {_listed(paths)}")
            lines.append(f"    fusions: {', '.join(done.fusions) or 'none'}")
            lines += [f"    {note}" for note in done.notes]
            lines += _counts(done.calls)
        if self.kept:
            lines.append("kept:")
        for left, paths in _grouped(self.kept).items():
            lines.append(f"  {_listed(paths)}: {left.why}")
            lines += _counts(left.calls)
        return "\n".join(lines)


Entry = TypeVar("Entry", Replaced, Kept)


def _grouped(entries: Iterable[Entry]) -> dict[Entry, list[str]]:
    """The paths of those that differ in nothing else."""
    out: dict[Entry, list[str]] = {}
    for entry in entries:
        out.setdefault(entry._replace(path=""), []).append(entry.path)
    return out


def _counts(calls: tuple[tuple[str, int], ...]) -> list[str]:
    return [
        f"    {counted(count, 'call')} by the untouched forward: {reason}"
        for reason, count in calls
    ]


def _listed(paths: list[str]) -> str:
    if paths == [""]:
        return "the model itself"
    return paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]} ({len(paths)})"
