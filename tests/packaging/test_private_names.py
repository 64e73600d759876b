"""Private names of the library that tests reach into: fewer as time goes by, never more."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
AT_MOST = 165
"""Places. Whoever takes some away lowers it; public views are in docs/reference/api."""

# Public in all but spelling: of namedtuples, torch's modules and tensors, notebooks, and TE.
PUBLIC = {
    "_asdict", "_backward_ops", "_basic_ops", "_buffers", "_call_impl", "_exit", "_fields",
    "_forward_ops", "_module_groups", "_modules", "_parameters", "_replace", "_repr_html_",
    "_repr_svg_", "_version",
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in {"_", *PUBLIC}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defined(path: Path) -> Iterator[str]:
    """The private names that a file gives to something, and its own."""
    yield path.stem
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def reached(path: Path, names: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each place: attributes, imports, and names that are patched."""
    own = set(defined(path))
    texts = {
        id(part)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(parsed(path)):
        found: list[str] = []
        if isinstance(node, ast.Attribute):
            found = [node.attr] if node.attr not in own else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("opfuser"):
            found = [*(node.module or "").split("."), *(name.name for name in node.names)]
        elif isinstance(node, ast.Constant) and type(node.value) is str and id(node) not in texts:
            found = node.value.split(".") if node.value not in own else []
        yield from ((getattr(node, "lineno", 0), name) for name in found if name in names)


def test_tests_reach_into_no_more_private_names() -> None:
    library = [*(ROOT / "opfuser").rglob("*.py")]
    names = {name for path in library for name in defined(path) if is_private(name)}
    tests = [*(ROOT / "tests").rglob("*.py")]
    places = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(tests)
        for line, name in reached(path, names)
    ]
    assert len(places) > 0, "the scan finds nothing"
    assert len(places) <= AT_MOST, "\n".join(places)
