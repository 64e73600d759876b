"""Two explanations of a model side by side: what a fusion, or an upgrade, changes.

A document has the schema ``opfuser.diff/1``::

    schema, sides: the schema's name, what to call both sides
    missing: why there are no counts, if there are none
    matches: of each fusion whose number of matches differs, and
    figures: of steps, launches, traffic and saved bytes of the whole model:
        [{name, unit ("bytes" or ""), before, after}], null where a number is not known
    changes: steps that cover the same operations and are others, equal ones together: [{path of
        the Sequential, stage ("forward", "backward" or "both passes"), before, after (the steps,
        as texts), places (names of the operations, once for each time)}]; no places where the
        sides have other operations
    programs: [{paths of equal Sequentials, diff as of ``diff -u``}], if programs are compared
    only: [{path, side}] of Sequentials that one side lacks
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, unified_diff
from itertools import groupby
from textwrap import wrap
from typing import Any

from ..engine.plan import together
from ..errors import TargetError
from ..explain.folding import joined_names, like
from ..registry import disable, enable, fusions
from .inputs import did_you_mean
from .plan_json import document, explained
from .sizes import in_bytes, table
from .target import Target

_Document = Mapping[str, Any]
_Labels = tuple[str, ...]


def around(
    target: Target, fusion: str, *, programs: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The explanations of a model without a fusion, and with it.

    Args:
        fusion: its name; ``"*"`` for all that are on.

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
        raise TargetError.explained(
            "No fusion has that name",
            received=repr(name),
            remedy=did_you_mean(name, known) or f"There are {', '.join(known)}",
        )


def difference(
    before: _Document, after: _Document, sides: tuple[str, str], *, programs: bool = False
) -> dict[str, Any]:
    """What differs between two documents of the schema ``opfuser.explain/1``.

    Raises:
        TargetError: a document lacks the programs to compare.
    """
    left, right = before["sequences"], after["sequences"]
    changes: dict[Any, dict[str, Any]] = {}
    for path in left:
        for stage in ("forward", "backward") if path in right else ():
            for key, places in _changes(stage, left[path], right[path]).items():
                change = {"before": key[0], "after": key[1], "places": places}
                known = changes.setdefault(
                    (path, key[:2], tuple(places)), {"path": path, "stage": stage, **change}
                )
                if known["stage"] != stage:
                    known["stage"] = "both passes"
    missing = [d["traffic_missing"] for d in (before, after) if d["traffic"] is None]
    only = [{"path": path, "side": sides[0]} for path in left if path not in right]
    only += [{"path": path, "side": sides[1]} for path in right if path not in left]
    return {
        "schema": "opfuser.diff/1",
        "sides": list(sides),
        "missing": list(dict.fromkeys(filter(None, missing))),
        "matches": list(_matches(left, right)),
        "figures": list(_figures(before, after)),
        "changes": list(changes.values()),
        "programs": list(_programs(left, right, sides)) if programs else [],
        "only": only,
    }


def is_empty(found: _Document) -> bool:
    """Whether both sides say the same."""
    figures = any(figure["before"] != figure["after"] for figure in found["figures"])
    return not (
        found["matches"] or found["changes"] or found["only"] or found["programs"] or figures
    )


def matches(explanation: _Document, fusion: str) -> int:
    """How often a fusion (``"*"``: any) matches in an explanation."""
    return sum(
        len(record["matches"])
        for plan in explanation["sequences"].values()
        for record in plan["fusions"]
        if fusion in ("*", record["name"])
    )


def _figure(name: str, unit: str, before: int | None, after: int | None) -> dict[str, Any]:
    return {"name": name, "unit": unit, "before": before, "after": after}


def _matches(left: _Document, right: _Document) -> Iterator[dict[str, Any]]:
    counts: tuple[dict[tuple[str, str], int], ...] = {}, {}
    for own, side in zip(counts, (left, right)):
        for plan in side.values():
            for record in plan["fusions"]:
                key = record["name"], record["stage"]
                own[key] = own.get(key, 0) + len(record["matches"])
    for name, stage in dict.fromkeys((*counts[0], *counts[1])):
        before, after = (own.get((name, stage), 0) for own in counts)
        if before != after:
            yield _figure(f"{name} ({stage})", "", before, after)


def _figures(before: _Document, after: _Document) -> Iterator[dict[str, Any]]:
    for stage in ("forward", "backward"):
        counts = [
            sum(len(plan[stage]) for plan in side["sequences"].values()) for side in (before, after)
        ]
        yield _figure(f"steps in {stage}", "", *counts)
    totals = [side["traffic"] for side in (before, after)]
    rows = (
        ("launches", "", ("launches",)),
        ("bytes read", "bytes", ("read",)),
        ("bytes written", "bytes", ("written",)),
        ("bytes read and written", "bytes", ("read", "written")),
        ("bytes saved for backward", "bytes", ("saved_bytes",)),
    )
    for name, unit, keys in rows:
        values = (None if t is None else sum(t[key] for key in keys) for t in totals)
        yield _figure(name, unit, *values)


def _programs(
    left: _Document, right: _Document, sides: tuple[str, str]
) -> Iterator[dict[str, Any]]:
    for side, plans in zip(sides, (left, right)):
        if not all("program" in plan for plan in plans.values()):
            raise TargetError.explained(
                "The file has no programs",
                received=side,
                remedy="Write it with opfuser explain --program --format json -o FILE",
            )
    pairs = together(
        ((like(path), left[path]["program"], right[path]["program"]), path)
        for path in left
        if path in right and left[path]["program"] != right[path]["program"]
    )
    for (_, before, after), paths in pairs.items():
        old, new = (f"{side} {joined_names(paths)}".rstrip() for side in sides)
        lines = unified_diff(before.splitlines(), after.splitlines(), old, new, lineterm="")
        yield {"paths": paths, "diff": "\n".join(lines)}


def _changes(
    stage: str, left: _Document, right: _Document
) -> dict[tuple[_Labels, ...], list[_Labels]]:
    """The places of changes, by the steps of both sides, and by the names but for numbers."""
    if [op["type"] for op in left["operations"]] != [op["type"] for op in right["operations"]]:
        return {change: [] for change in _other_operations(stage, left, right)}
    found = []
    for before, after in _regions(left[stage], right[stage]):
        labels = tuple(_labels(before, left)), tuple(_labels(after, right))
        names = tuple(left["operations"][i]["name"] for s in before for i in s["indices"])
        if labels[0] != labels[1]:
            found.append(((*labels, tuple(map(like, names))), names))
    return together(found)


def _regions(
    before: Sequence[_Document], after: Sequence[_Document]
) -> Iterator[tuple[list[_Document], list[_Document]]]:
    """The steps of both sides, in stretches at whose ends both begin a step.

    Plain modules, which cover no operation, are left out: they are on both sides.
    """
    left, right = ([s for s in side if s["indices"]] for side in (before, after))
    ends = sorted({s["indices"][-1] for s in left} & {s["indices"][-1] for s in right})

    def region(step: _Document) -> int:
        return bisect_left(ends, step["indices"][-1])

    cut = ([list(steps) for _, steps in groupby(side, region)] for side in (left, right))
    yield from zip(*cut)


def _other_operations(
    stage: str, left: _Document, right: _Document
) -> Iterator[tuple[_Labels, _Labels]]:
    """The changes between plans of other operations, as far as their steps tell."""
    old, new = (tuple(_labels(plan[stage], plan)) for plan in (left, right))
    for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            yield old[a:b], new[c:d]


def _labels(steps: Iterable[_Document], plan: _Document) -> Iterator[str]:
    for step in steps:
        kinds = " + ".join(plan["operations"][i]["type"] for i in step["indices"])
        yield f"{kinds} -> {step['fusion']}" if step["fusion"] else kinds or step["operation"]


def text(found: _Document) -> str:
    """A difference as text, for people."""
    sides = found["sides"]
    if is_empty(found):
        return f"{sides[0]} and {sides[1]} do not differ."
    rows = [("", *sides, "")]
    if found["matches"]:
        rows += [("matches", "", "", ""), *map(_row, found["matches"])]
    rows += [("whole model", "", "", ""), *map(_row, found["figures"])]
    lines = table(rows, "<>>>")
    for why in found["missing"]:
        lines += wrap(f"No launches and bytes: {why}", 80, subsequent_indent="  ")
    for change in found["changes"]:
        lines += ["", *wrap(_heading(change), 80, subsequent_indent="    ")]
        for sign, side in (("-", "before"), ("+", "after")):
            for label in change[side]:
                lines += wrap(
                    f"{sign} {label}", 80, initial_indent="  ", subsequent_indent="      "
                )
    lines += [f"Only {o['side']} has {o['path'] or 'the model itself'}" for o in found["only"]]
    for program in found["programs"]:
        lines += ["", program["diff"]]
    return "\n".join(lines)


def _row(figure: _Document) -> tuple[str, str, str, str]:
    name, unit, before, after = figure.values()
    shown = in_bytes if unit else str
    cells = ["not known" if n is None else shown(n) for n in (before, after)]
    change = ""
    if before is not None and after is not None and before != after:
        sign = "-" if after < before else "+"
        change = sign + shown(abs(after - before))
        percent = 100 * (after - before) / before if before else 0
        change += f" ({percent:+.{abs(percent) < 10:d}f} %)" if before else ""
    return f"  {name}", cells[0], cells[1], change


def _heading(change: _Document) -> str:
    """Where steps differ, as in ``forward, 54 times: layers.0-26.mlp.1 to layers.0-26.mlp.2``."""
    text, places = f"{change['path']} {change['stage']}".strip(), change["places"]
    if not places:
        return f"{text}: other operations"
    columns = list(zip(*places))
    ends = dict.fromkeys((0, len(columns) - 1))
    times = f", {len(places)} times" if len(places) > 1 else ""
    return f"{text}{times}: {' to '.join(joined_names(columns[n]) for n in ends)}"
