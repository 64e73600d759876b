"""Lines of Python in the making, and what the names in them stand for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import indent
from typing import Any, NamedTuple

from ..core.op_base import BasicOperation
from .plan import Step

_WIDTH = 100


class Text(NamedTuple):
    """One function of a program.

    Attributes:
        source: its text.
        names: what it finds under its names.
        operations: the steps whose operations are among them.
        steps: of each line, the step that it belongs to, if it does to one.
    """

    source: str
    names: dict[str, Any]
    operations: dict[str, Step]
    steps: tuple[Step | None, ...]


class Lines:
    """Lines in the making, and what their names stand for."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.operations: dict[str, Step] = {}
        self._lines: list[tuple[str, Step | None]] = []
        self._depth = 0
        self.step: Step | None = None

    def __call__(self, line: str) -> None:
        for row in line.split("\n"):
            self._lines.append(("    " * self._depth + row, self.step))

    def call(self, results: str, function: str, arguments: Sequence[str], around: str = "") -> None:
        """A line by which names get the results of a call, or several if it is long.

        Args:
            results: the names.
            function: the name of what is called.
            arguments: of the call.
            around: the name of what takes its result apart.
        """
        opening, closing = (f"{around}({function}(", "))") if around else (f"{function}(", ")")
        line = f"{results} = {opening}{', '.join(arguments)}{closing}"
        if 4 * self._depth + len(line) <= _WIDTH and "\n" not in line:
            self(line)
            return
        self(f"{results} = {opening}")
        for argument in arguments:
            self(indent(f"{argument},", "    "))
        self(closing)

    @contextmanager
    def block(self, line: str) -> Iterator[None]:
        """Within it, lines belong to what ``line`` opens."""
        self(line)
        self._depth += 1
        yield
        self._depth -= 1

    def bind(self, name: str, value: Any) -> str:
        """``name``, which stands for ``value`` from now on."""
        self.names[name] = value
        return name

    def operation(self, step: Step) -> str:
        """The name of what a step calls."""
        indices = "_".join(map(str, dict.fromkeys((step.indices[0], step.indices[-1]))))
        name = f"op{indices}" if isinstance(step.op, BasicOperation) else f"fused{indices}"
        self.operations[name] = step
        return self.bind(name, step.op)

    def helper(self, function: Any) -> str:
        """The name of a function of the engine."""
        return self.bind(function.__name__, function)

    def text(self) -> Text:
        """All lines as one function."""
        source = "".join(line + "\n" for line, _ in self._lines)
        steps_of_lines = tuple(step for _, step in self._lines)
        return Text(source, self.names, self.operations, steps_of_lines)


def listed(parts: Iterable[str]) -> str:
    """A list, in rows if it is long."""
    rows = [""]
    for part in parts:
        fits = not rows[-1] or len(rows[-1]) + len(part) < _WIDTH - 20  # what stands around it
        rows = [*rows[:-1], f"{rows[-1]} {part},".lstrip()] if fits else [*rows, f"{part},"]
    if len(rows) == 1:
        return f"[{rows[0].removesuffix(',')}]"
    return "\n".join(["[", *[indent(row, "    ") for row in rows], "]"])


def tuple_text(parts: Sequence[str]) -> str:
    """A tuple."""
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
