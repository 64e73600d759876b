"""Private names of the library that tests reach into: fewer as time goes by, never more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
AT_MOST = 29
"""Lines and names in them. Whoever takes some away lowers it."""

GIVEN = re.compile(r"(?:def |class |self\.|^ *)(_[A-Za-z]\w*)(?=\(|\[| *[:=])", re.M)
REACHED = re.compile(r"""(?:[.'"]|import )(_[A-Za-z]\w*)""")
# Public in all but spelling: of namedtuples, torch's modules and tensors, notebooks, and TE.
PUBLIC = {
    "_asdict", "_backward_ops", "_basic_op_extra_input_sources", "_basic_ops", "_buffers",
    "_call_impl", "_exit", "_fields", "_forward_ops", "_module_groups", "_modules", "_parameters",
    "_replace", "_repr_html_", "_repr_svg_", "_version",
}  # fmt: skip


def given(path: Path) -> set[str]:
    """The private names that a file gives to something, and its own."""
    return {path.stem, *GIVEN.findall(path.read_text(encoding="utf-8"))}


def reached(names: set[str]) -> Iterator[str]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        theirs = names - given(path)
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for name in REACHED.findall(line):
                if name in theirs:
                    yield f"{path.relative_to(ROOT)}:{n}: {name}"


def test_tests_reach_into_no_more_private_names() -> None:
    library = {name for path in (ROOT / "opfuser").rglob("*.py") for name in given(path)}
    places = list(reached({name for name in library if name.startswith("_")} - PUBLIC))
    assert places, "the scan finds nothing"
    assert len(places) <= AT_MOST, "\n".join(places)
