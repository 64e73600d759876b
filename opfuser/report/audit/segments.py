"""What is quoted of a model: statements of its source, nodes of its graph, its modules."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from collections.abc import Iterable
from typing import Any

from torch import fx, nn
from torch.overrides import resolve_name

from .tracing import Place


def expression(path: str) -> str:
    """A module of ``model`` as Python code."""
    if "#" in path:  # called by this module, which does not register it
        return f"a Sequential that {expression(path.partition('#')[0])} calls"
    parts = path.split(".") if path else []
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def nodes(found: Iterable[fx.Node]) -> str:
    """Nodes as FX prints them, one in a line."""
    return "\n".join(str(node.format_node()) for node in found)


def modules(root: nn.Module, paths: Iterable[str]) -> str:
    """Modules of a tree as Python prints them, each once."""
    known = dict(root.named_modules())
    # A part of an operation is printed with it.
    return "\n".join(f"({path}): {known[path]!r}" for path in dict.fromkeys(paths) if path in known)


def statements(places: Iterable[Place]) -> str:
    """The statements at some places, as the source has them, each once and in order of lines.

    Statements of one file that follow each other are one text; between others stands a blank line.
    """
    spans: dict[str, set[int]] = {}
    for place in places:
        spans.setdefault(place.file, set()).update(_statement(place.file, place.line))
    parts: list[str] = []
    for file, lines in spans.items():
        before = 0
        for line in sorted(lines):
            text = linecache.getline(file, line).rstrip("\n")
            if parts and line == before + 1:
                parts[-1] += f"\n{text}"
            elif text:
                parts.append(text)
            before = line
    return "\n\n".join(parts)


def _statement(file: str, line: int) -> range:
    """The lines of the innermost statement that a line is in."""
    best: range | None = None
    for span in _statements(file):
        if line in span and (best is None or len(span) <= len(best)):
            best = span
    return range(line, line + 1) if best is None else best


@functools.lru_cache(maxsize=64)
def _statements(file: str) -> tuple[range, ...]:
    """The lines of each statement of a file that holds no others."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and not hasattr(node, "body")
    )


def located(place: Place) -> str:
    """A place as text: the module, its class, and the line of its source, unless it is torch's."""
    at = f", {line(place.file, place.line)}" if place.file else ""
    return f"{place.path or '(root)'} ({place.kind}{at})"


def function(node: fx.Node) -> str:
    """The function that a node calls, by the name under which torch documents it."""
    target: Any = node.target
    name: str = resolve_name(target) or getattr(target, "__name__", str(target))
    return name.replace("_C._nn", "nn.functional")


def line(file: str, number: int) -> str:
    """A line of a file, which is named relative to the folder from which Python imports it."""
    return f"{_short(file)}:{number}"


def _short(file: str) -> str:
    roots = [root for root in map(os.path.abspath, sys.path) if file.startswith(root + os.sep)]
    return os.path.relpath(file, max(roots, key=len)) if roots else os.path.basename(file)
