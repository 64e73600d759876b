"""The source as a whole: who fills whose names, and how long a file is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import opfuser

PACKAGE = Path(opfuser.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 500
# Begins the comment that says why a file is longer, within its first lines.
REASON = "# Longer than 500 lines: "


def imported_from_the_package(tree: ast.Module) -> Iterator[str]:
    """Names at module level that other modules of the package have made."""
    for node in tree.body:
        ours = isinstance(node, ast.ImportFrom) and (
            node.level > 0 or (node.module or "").split(".")[0] == "opfuser"
        )
        if isinstance(node, ast.ImportFrom) and ours:
            yield from (alias.asname or alias.name for alias in node.names)


def filled(tree: ast.Module) -> Iterator[str]:
    """What a module sets, when it is imported, in an object that another module has made."""
    theirs = set(imported_from_the_package(tree))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            root: ast.expr = target
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in theirs:
                yield ast.unparse(target)


def test_no_module_fills_what_another_has_left_open() -> None:
    trees = {path: ast.parse(path.read_text("utf-8")) for path in FILES}
    found = {str(path.relative_to(PACKAGE)): [*filled(tree)] for path, tree in trees.items()}
    assert {path: targets for path, targets in found.items() if targets} == {}


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("from .low import Slot\nSlot.run = print", ["Slot.run"]),
        ("from opfuser.low import TABLE\nTABLE['a'] = 1", ["TABLE['a']"]),
        ("from .low import slot\nslot.of.all[0] = 1", ["slot.of.all[0]"]),
        ("import torch\ntorch.slot = 1\nown = {}\nown['a'] = 1", []),
        ("from .low import slot\ndef f():\n    slot.a = 1", []),
    ],
)
def test_filled_names_are_found(text: str, targets: list[str]) -> None:
    assert [*filled(ast.parse(text))] == targets


def test_long_files_say_why() -> None:
    silent = []
    for path in FILES:
        lines = path.read_text("utf-8").splitlines()
        if len(lines) > MOST_LINES and not any(line.startswith(REASON) for line in lines[:40]):
            silent.append(f"{path.relative_to(PACKAGE)}: {len(lines)}")
    assert silent == []
