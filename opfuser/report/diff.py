"""Two explanations of a model side by side: what a fusion, or an upgrade, changes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, unified_diff
from itertools import groupby
from textwrap import wrap
from typing import Any, NamedTuple

from ..engine.folding import joined_names, like
from ..errors import TargetError, explain
from ..registry import disable, enable, fusions
from .inputs import did_you_mean
from .plan_json import document, explained
from .sizes import in_bytes
from .target import Target

__all__ = [
    "DIFF",
    "Change",
    "Difference",
    "Figure",
    "ProgramChange",
    "around",
    "check_fusion_name",
    "data",
    "difference",
    "matches",
    "text",
]

DIFF = "opfuser.diff/1"


class Figure(NamedTuple):
    """A number on both sides; None where it is not known.

    Attributes:
        name: what it counts.
        unit: ``"bytes"``, or empty.
        before, after: on either side.
    """

    name: str
    unit: str
    before: int | None
    after: int | None


class Change(NamedTuple):
    """Steps of a pass that cover the same operations on both sides, and are others.

    Attributes:
        path: of the Sequential.
        stage: ``"forward"``, ``"backward"`` or ``"both passes"``.
        before, after: the steps of either side: fusion (or type) and types of operations.
        places: names of the operations that they cover, once for each time this occurs; none if
            the sides have other operations.
    """

    path: str
    stage: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    places: tuple[tuple[str, ...], ...]


class ProgramChange(NamedTuple):
    """The programs of equal Sequentials, line by line.

    Attributes:
        paths: of the Sequentials.
        diff: of the programs on both sides, as ``diff -u`` shows it.
    """

    paths: tuple[str, ...]
    diff: str


class Difference(NamedTuple):
    """What differs between two explanations.

    Attributes:
        sides: names of both.
        matches: of each fusion whose number of matches differs.
        figures: steps, launches, traffic and saved bytes of the whole model.
        changes: steps that differ, equal ones together.
        missing: why there are no counts, if there are none.
        only: Sequentials that only one side has, with its name.
        programs: those that differ, if programs are compared.
    """

    sides: tuple[str, str]
    matches: tuple[Figure, ...]
    figures: tuple[Figure, ...]
    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    only: tuple[tuple[str, str], ...]
    programs: tuple[ProgramChange, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether both sides say the same."""
        figures = any(f.before != f.after for f in self.figures)
        return not (self.matches or self.changes or self.only or self.programs or figures)


def around(
    target: Target, fusion: str, *, programs: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The explanations of a model without a fusion, and with it.

    Args:
        target: the model and its inputs.
        fusion: its name; ``"*"`` for all that are on.
        programs: whether they have programs.

    Raises:
        TargetError: no fusion has that name, or the model fails.
    """
    if fusion == "*":
        names = [info.name for info in fusions() if info.enabled]
    else:
        check_fusion_name(fusion)
        names = [fusion]
    with disable(*names):
        before = document(explained(target), programs=programs)
    with enable(*names):
        after = document(explained(target), programs=programs)
    return before, after


def check_fusion_name(name: str) -> None:
    """Raises TargetError unless a fusion has that name."""
    known = [info.name for info in fusions()]
    if name not in known:
        raise TargetError(
            explain(
                "No fusion has that name",
                received=repr(name),
                remedy=did_you_mean(name, known) or f"There are {', '.join(known)}",
            )
        )


def difference(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    sides: tuple[str, str],
    *,
    programs: bool = False,
) -> Difference:
    """What differs between two documents of the schema ``opfuser.explain/1``.

    Args:
        before, after: the documents.
        sides: what to call them.
        programs: whether programs are compared.

    Raises:
        TargetError: a document lacks the programs to compare.
    """
    left, right = before["sequences"], after["sequences"]
    both = [path for path in left if path in right]
    changes: dict[Any, Change] = {}
    for path in both:
        for stage in ("forward", "backward"):
            for change in _changes(path, stage, left[path], right[path]):
                known = changes.setdefault(change._replace(stage=""), change)
                if known.stage != stage:
                    changes[change._replace(stage="")] = change._replace(stage="both passes")
    lonely = [(path, sides[0]) for path in left if path not in right]
    lonely += [(path, sides[1]) for path in right if path not in left]
    missing = [d["traffic_missing"] for d in (before, after) if d["traffic"] is None]
    return Difference(
        sides,
        tuple(_matches(left, right)),
        tuple(_figures(before, after)),
        tuple(changes.values()),
        tuple(dict.fromkeys(filter(None, missing))),
        tuple(lonely),
        tuple(_programs(left, right, sides)) if programs else (),
    )


def matches(explanation: Mapping[str, Any], fusion: str) -> int:
    """How often a fusion (``"*"``: any) matches in an explanation."""
    return sum(
        len(record["matches"])
        for plan in explanation["sequences"].values()
        for record in plan["fusions"]
        if fusion in ("*", record["name"])
    )


def data(found: Difference) -> dict[str, Any]:
    """A difference as plain data: its fields, under the schema ``opfuser.diff/1``."""
    rows = {name: [row._asdict() for row in getattr(found, name)] for name in _ROWS}
    rest = {"sides": list(found.sides), "missing": list(found.missing)}
    only = [{"path": path, "side": side} for path, side in found.only]
    return {"schema": DIFF, **rest, **rows, "only": only}


_ROWS = ("matches", "figures", "changes", "programs")


def _matches(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Figure]:
    counts: list[dict[tuple[str, str], int]] = []
    for side in (left, right):
        own: dict[tuple[str, str], int] = {}
        for plan in side.values():
            for record in plan["fusions"]:
                key = record["name"], record["stage"]
                own[key] = own.get(key, 0) + len(record["matches"])
        counts.append(own)
    for name, stage in dict.fromkeys((*counts[0], *counts[1])):
        before, after = (own.get((name, stage), 0) for own in counts)
        if before != after:
            yield Figure(f"{name} ({stage})", "", before, after)


def _figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Figure]:
    for stage in ("forward", "backward"):
        counts = [
            sum(len(plan[stage]) for plan in side["sequences"].values()) for side in (before, after)
        ]
        yield Figure(f"steps in {stage}", "", *counts)
    totals = [side["traffic"] for side in (before, after)]
    rows = (
        ("launches", "", ("launches",)),
        ("bytes read", "bytes", ("read",)),
        ("bytes written", "bytes", ("written",)),
        ("bytes read and written", "bytes", ("read", "written")),
        ("bytes saved for backward", "bytes", ("saved_bytes",)),
    )
    for name, unit, keys in rows:
        yield Figure(
            name, unit, *(None if t is None else sum(t[key] for key in keys) for t in totals)
        )


def _programs(
    left: Mapping[str, Any], right: Mapping[str, Any], sides: tuple[str, str]
) -> Iterator[ProgramChange]:
    for side, plans in zip(sides, (left, right)):
        if not all("program" in plan for plan in plans.values()):
            raise TargetError(
                explain(
                    "The file has no programs",
                    received=side,
                    remedy="Write it with opfuser explain --program --format json -o FILE",
                )
            )
    found: dict[tuple[str, str, str], list[str]] = {}
    for path in left:
        if path in right and left[path]["program"] != right[path]["program"]:
            both = left[path]["program"], right[path]["program"]
            found.setdefault((like(path), *both), []).append(path)
    for (_, before, after), paths in found.items():
        old, new = (f"{side} {joined_names(paths)}".rstrip() for side in sides)
        lines = unified_diff(before.splitlines(), after.splitlines(), old, new, lineterm="")
        yield ProgramChange(tuple(paths), "\n".join(lines))


class _Region(NamedTuple):
    """A stretch of operations at whose ends both sides begin a step, and the steps of each."""

    before: list[Mapping[str, Any]]
    after: list[Mapping[str, Any]]


def _changes(
    path: str, stage: str, left: Mapping[str, Any], right: Mapping[str, Any]
) -> list[Change]:
    if [op["type"] for op in left["operations"]] != [op["type"] for op in right["operations"]]:
        return list(_other_operations(path, stage, left, right))
    found: dict[tuple[Any, ...], list[tuple[str, ...]]] = {}
    for region in _regions(left[stage], right[stage]):
        labels = tuple(_labels(region.before, left)), tuple(_labels(region.after, right))
        if labels[0] == labels[1]:
            continue
        names = [left["operations"][i]["name"] for s in region.before for i in s["indices"]]
        found.setdefault((*labels, tuple(map(like, names))), []).append(tuple(names))
    return [
        Change(path, stage, before, after, tuple(places))
        for (before, after, _), places in found.items()
    ]


def _regions(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> Iterator[_Region]:
    """Plain modules, which cover no operation, are left out: they are on both sides."""
    left, right = ([s for s in side if s["indices"]] for side in (before, after))
    ends = sorted({s["indices"][-1] for s in left} & {s["indices"][-1] for s in right})

    def region(step: Mapping[str, Any]) -> int:
        return bisect_left(ends, step["indices"][-1])

    cut = ([list(steps) for _, steps in groupby(side, region)] for side in (left, right))
    yield from map(_Region, *cut)


def _other_operations(
    path: str, stage: str, left: Mapping[str, Any], right: Mapping[str, Any]
) -> Iterator[Change]:
    """The changes between plans of other operations, as far as their steps tell."""
    old, new = (list(_labels(plan[stage], plan)) for plan in (left, right))
    for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            yield Change(path, stage, tuple(old[a:b]), tuple(new[c:d]), ())


def _labels(steps: Iterable[Mapping[str, Any]], plan: Mapping[str, Any]) -> Iterator[str]:
    for step in steps:
        kinds = " + ".join(plan["operations"][i]["type"] for i in step["indices"])
        yield f"{kinds} -> {step['fusion']}" if step["fusion"] else kinds or step["operation"]


def text(found: Difference) -> str:
    """A difference as text, for people."""
    if found.is_empty:
        return f"{found.sides[0]} and {found.sides[1]} do not differ."
    rows = [("", *found.sides, "")]
    if found.matches:
        rows += [("matches", "", "", ""), *(_row(figure) for figure in found.matches)]
    rows += [("whole model", "", "", ""), *(_row(figure) for figure in found.figures)]
    widths = [max(len(row[c]) for row in rows) for c in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {a:>{widths[1]}}  {b:>{widths[2]}}  {change:>{widths[3]}}".rstrip()
        for name, a, b, change in rows
    ]
    for why in found.missing:
        lines += wrap(f"No launches and bytes: {why}", 80, subsequent_indent="  ")
    for change in found.changes:
        lines += ["", *wrap(_heading(change), 80, subsequent_indent="    ")]
        for sign, labels in (("-", change.before), ("+", change.after)):
            for label in labels:
                lines += wrap(
                    f"{sign} {label}", 80, initial_indent="  ", subsequent_indent="      "
                )
    lines += [f"Only {side} has {path or 'the model itself'}" for path, side in found.only]
    for program in found.programs:
        lines += ["", program.diff]
    return "\n".join(lines)


def _row(figure: Figure) -> tuple[str, str, str, str]:
    name, unit, before, after = figure
    shown = in_bytes if unit else str
    cells = ["not known" if n is None else shown(n) for n in (before, after)]
    change = ""
    if before is not None and after is not None and before != after:
        sign = "-" if after < before else "+"
        change = sign + shown(abs(after - before))
        percent = 100 * (after - before) / before if before else 0
        change += f" ({percent:+.{abs(percent) < 10:d}f} %)" if before else ""
    return f"  {name}", cells[0], cells[1], change


def _heading(change: Change) -> str:
    """Where steps differ, as in ``forward, 54 times: layers.0-26.mlp.1 to layers.0-26.mlp.2``."""
    text = f"{change.path} {change.stage}".strip()
    if not change.places:
        return f"{text}: other operations"
    columns = list(zip(*change.places))
    ends = [joined_names(columns[0])]
    if len(columns) > 1:
        ends.append(joined_names(columns[-1]))
    times = f", {len(change.places)} times" if len(change.places) > 1 else ""
    return f"{text}{times}: {' to '.join(ends)}"
