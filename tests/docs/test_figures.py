"""Figures on pages are those of the result files, cell by cell."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
NAMES = "comparison", "distributed", "foreign-kernels", "overlap"
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]

# A table below a comment that names the file, the field and the unit of its cells.
TABLE = re.compile(r"^<!-- figures: (\S+) (\S+) (\S+) -->\n((?:\|.*\n)+)", re.M)
# What the numbers of a field are divided by.
UNITS = {
    ("median_us", "us"): 1.0,
    ("median_us", "ms"): 1e3,
    ("device_us", "ms"): 1e3,
    ("host_us", "ms"): 1e3,
    ("saved_bytes", "GiB"): 2.0**30,
    ("peak_bytes", "GiB"): 2.0**30,
    ("first_ten_steps", "s"): 1e3,  # in ms; the first of them
}


class Cell(NamedTuple):
    """A figure on a page, and where it is from."""

    file: str
    field: str
    unit: str
    case: str  # with size, and with the pass if that is not a whole step
    contestant: str
    text: str


def cells(page: Path) -> list[Cell]:
    found = []
    for file, field, unit, table in TABLE.findall(page.read_text("utf-8")):
        lines = (line.strip("|").split("|") for line in table.splitlines())
        (_, *contestants), _, *rows = ([text.strip() for text in line] for line in lines)
        for case, *texts in rows:
            for contestant, text in zip(contestants, texts, strict=True):
                found.append(Cell(file, field, unit, case, contestant, text))
    return found


@cache
def measured(file: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a file by case and contestant, as pages name them."""
    rows = json.loads((RESULTS / file).read_text("utf-8"))["rows"]
    named = {}
    for row in rows:
        size = " ".join(f"{name}={value}" for name, value in row["size"].items())
        case = ", ".join([row["case"], size] + [row["pass"]] * (row["pass"] != "step"))
        named[case, row["contestant"]] = row
    assert len(named) == len(rows)
    return named


def shown(cell: Cell) -> str:
    """The text of the cell that the file gives, with as many digits as it has on the page."""
    row = measured(cell.file).get((cell.case, cell.contestant))
    if row is None:
        return ""
    if "failure" in row:
        return "failed"
    value = row[cell.field]
    value = value[0] if isinstance(value, list) else value
    digits = len(cell.text.partition(".")[2])
    return f"{value / UNITS[cell.field, cell.unit]:.{digits}f}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_cell_is_measured(page: Path) -> None:
    assert cells(page)
    assert [(cell, shown(cell)) for cell in cells(page) if cell.text != shown(cell)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_rows_hold_a_figure_and_columns_too(page: Path) -> None:
    """A misspelt name would be an empty cell."""
    found = cells(page)
    filled = [cell for cell in found if cell.text]
    assert {(c.file, c.case) for c in found} == {(c.file, c.case) for c in filled}
    assert {(c.file, c.contestant) for c in found} == {(c.file, c.contestant) for c in filled}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_figure_stands_outside_of_these_tables(page: Path) -> None:
    text = TABLE.sub("", page.read_text("utf-8"))
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"torch\s2\.11|Liger-Kernel\s0\.8\.5", "", text)  # versions
    units = r"ms|us|µs|s|[KMG]i?B|%|x|times|(?:micro|milli)?seconds?|per cent|percent|hundredths"
    assert re.findall(rf"\b\d[\d.,]*\s*(?:{units})\b|\d%", text) == []
    assert re.findall(r"\b\d+\.\d+\b", text) == []


def test_comparison_names_all_others_and_shows_where_they_are_faster() -> None:
    found = [cell for cell in cells(PAGES[0]) if cell.field == "median_us"]
    ours = {cell[:4]: float(cell.text) for cell in found if cell.contestant == "opfuser"}
    timed = [cell for cell in found if cell[:4] in ours and re.match(r"\d", cell.text)]
    faster = {cell.contestant for cell in timed if float(cell.text) < ours[cell[:4]]}
    assert faster >= {"torch", "torch.compile", "Liger-Kernel", "quack", "te.LayerNormMLP"}
    assert {cell.contestant for cell in found} >= {"te.ops, delayed", "Transformer Engine"}
