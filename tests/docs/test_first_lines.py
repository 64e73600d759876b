"""First lines of docstrings, which editors show alone: each needs no other sentence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import opfuser

ROOT = Path(opfuser.__file__).parent
# Words that refer to a name which such a line does not hold.
DEPENDENT = {"Of", "That", "Those", "Told", "Who", "Likewise", "Likewise."}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def first_words(text: str) -> Iterator[tuple[int, str]]:
    """Line and first word of each docstring of a file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring.split(maxsplit=1)[0]


def test_first_lines_stand_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word} …"
        for path in sorted(ROOT.rglob("*.py"))
        for line, word in first_words(path.read_text("utf-8"))
        if word in DEPENDENT
    ]
    assert not found


def test_the_scan_sees_dependent_lines() -> None:
    text = 'class A:\n    """Likewise."""\n    def b(self):\n        """Of a call."""\n'
    assert [word in DEPENDENT for _, word in first_words(text)] == [True, True]
