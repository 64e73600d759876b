"""The text of a recorded pass: its calls as lines, without those that nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ... import torch_internals as internals
from ..lines import Text
from ..plan import Step
from .memory import Call, frugal, scratch_of, unmarked

_LONG = 100


class Straight(NamedTuple):
    """What a recorded pass becomes, besides its lines.

    Attributes:
        stage: "forward" or "backward".
        arguments: of the function.
        opening: lines before the calls, each with the name that it makes, or none.
        closing: what is returned, and the names in it.
        comment: of a step.
    """

    stage: str
    arguments: str
    opening: Sequence[tuple[str | None, str]]
    closing: tuple[str, Sequence[str]]
    comment: Callable[[Step], str]


def text_of(
    noted: Sequence[Call], names: dict[str, Any], device: int | None, straight: Straight
) -> Text:
    """The function of a recorded pass: its calls in order, each name deleted after its last use."""
    stage, arguments, opening, (closing, returned), comment = straight
    calls = frugal(noted, returned, launches=device is not None)
    small: tuple[str, ...] = ()
    if device is not None:
        calls, small, names["scratch"] = scratch_of(calls, returned)
    lines: list[tuple[str, Step | None]] = [(f"def {stage}({arguments}):", None)]
    used = {name for call in calls for name in call.reads} | set(returned)
    lines += [("    " + line, None) for name, line in opening if name is None or name in used]
    if device is not None:
        names["current_stream"] = internals.cuda_stream
        lines.append((f"    stream = current_stream({device})", None))
    if small:
        lines.append(("    numbers, free = scratch(stream)", None))
        lines.append((f"    {', '.join(small)}{',' * (len(small) == 1)} = numbers", None))
    last = {name: n for n, call in enumerate(calls) for name in (*call.reads, *call.results)}
    kept = set(returned)
    step: Step | None = None
    for n, call in enumerate(calls):
        if call.step is not step and call.step is not None:
            step = call.step
            lines.append(("    " + comment(step), step))
        dead = [f"r{n}_{i}" if name is None else name for i, name in enumerate(call.results)]
        results = ", ".join(dead) + ("," if call.unpacked and len(dead) == 1 else "")
        unread = not any((name in last and last[name] > n) or name in kept for name in call.results)
        if not call.results or unread:
            line, gone = unmarked(call.text), []
        else:
            line = f"{results} = {unmarked(call.text)}"
            gone = [
                shown
                for shown, name in zip(dead, call.results)
                if name is None or (last[name] == n and name not in kept)
            ]
        lines.append(("    " + line, step))
        gone += [
            name
            for name in dict.fromkeys(call.reads)
            if last[name] == n and name not in kept and name[0] in "ts" and name not in gone
        ]
        if gone:
            lines.append((f"    del {', '.join(gone)}", step))
    if small:
        lines.append(("    free.append(numbers)", None))
    lines.append((f"    return {closing}", None))
    rows = [(row, own) for line, own in lines for row in _wrapped(line)]
    source = "".join(row + "\n" for row, _ in rows)
    return Text(source, names, {}, tuple(own for _, own in rows))


def _wrapped(line: str) -> list[str]:
    """A line in rows, broken behind commas within brackets, if it is long.

    Not one with a string or a comment, where names of a user's stand that may hold anything.
    """
    if len(line) <= _LONG or not {"#", "'", '"'}.isdisjoint(line):
        return [line]
    rows: list[str] = []
    start = last = depth = 0
    for n, character in enumerate(line):
        depth += (character in "([{") - (character in ")]}")
        if n - start >= _LONG - 8 * bool(rows) and last > start:
            rows.append(line[start:last])
            start = last + 1  # the blank behind the comma
        if character == "," and depth and line[n + 1 : n + 2] == " ":
            last = n + 1
    rows.append(line[start:])
    return [rows[0], *("        " + row for row in rows[1:])]
