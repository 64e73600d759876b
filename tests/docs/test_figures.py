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
README = ROOT / "README.md"  # whose beginning the site's first page has too
NAMES = "comparison", "distributed", "foreign-kernels", "from-liger"
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]

# A table below a comment that names the file, the field and the unit of its cells.
TABLE = re.compile(r"^<!-- figures: (\S+) (\S+) (\S+) -->\n((?:\|.*\n)+)", re.M)
# One of a single case, which the comment names, with a row for each contestant.
TABLE_OF_CASE = re.compile(r'^<!-- figures of: (\S+) "([^"]+)" -->\n((?:\|.*\n)+)', re.M)
COLUMNS = {
    "kept for backward, GiB": ("saved_bytes", "GiB"),
    "time, ms": ("median_us", "ms"),
}
# What the numbers of a field are divided by.
UNITS = {
    ("median_us", "us"): 1.0,
    ("median_us", "ms"): 1e3,
    ("device_us", "ms"): 1e3,
    ("host_us", "ms"): 1e3,
    ("saved_bytes", "GiB"): 2.0**30,
    ("extra_bytes", "GiB"): 2.0**30,
    ("peak_bytes", "GiB"): 2.0**30,
    ("tflops", "TFLOP/s"): 1.0,
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


def parts(table: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The heads of the columns, and the rows by their first cell."""
    lines = (line.strip("|").split("|") for line in table.splitlines())
    (_, *heads), _, *rows = ([text.strip() for text in line] for line in lines)
    return heads, [(first, texts) for first, *texts in rows]


def cells(page: Path) -> list[Cell]:
    found = []
    page_text = page.read_text("utf-8")
    for file, field, unit, table in TABLE.findall(page_text):
        contestants, rows = parts(table)
        for case, texts in rows:
            for contestant, text in zip(contestants, texts, strict=True):
                found.append(Cell(file, field, unit, case, contestant, text))
    for file, case, table in TABLE_OF_CASE.findall(page_text):
        heads, rows = parts(table)
        for contestant, texts in rows:
            for head, text in zip(heads, texts, strict=True):
                found.append(Cell(file, *COLUMNS[head], case, contestant, text))
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


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_every_cell_is_measured(page: Path) -> None:
    assert cells(page)
    assert [(cell, shown(cell)) for cell in cells(page) if cell.text != shown(cell)] == []


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_rows_hold_a_figure_and_columns_too(page: Path) -> None:
    """A misspelled name would be an empty cell."""
    found = cells(page)
    filled = [cell for cell in found if cell.text]
    assert {(c.file, c.case) for c in found} == {(c.file, c.case) for c in filled}
    assert {(c.file, c.contestant) for c in found} == {(c.file, c.contestant) for c in filled}


def in_prose(page: Path) -> list[str]:
    """The figures with a unit that stand outside of tables and code."""
    units = r"ms|us|µs|s|[KMG]i?B|%|x|times|(?:micro|milli)?seconds?|per cent|percent|hundredths"
    return re.findall(rf"\b\d[\d.,]*\s*(?:{units})\b|\d%", prose(page))


def prose(page: Path) -> str:
    text = TABLE_OF_CASE.sub("", TABLE.sub("", page.read_text("utf-8")))
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_figure_stands_outside_of_these_tables(page: Path) -> None:
    assert in_prose(page) == []
    versions = r"torch\s2\.11|Liger-Kernel\s0\.8\.5|offset=1\.0|label_smoothing=0\.1"
    assert re.findall(r"\b\d+\.\d+\b", re.sub(versions, "", prose(page))) == []


def test_readme_leads_with_the_memory_that_is_measured() -> None:
    case = "Llama 1B, layers=16 batch=2 length=4096 adamw=0"
    rows = measured("model.json")
    leaders = "opfuser", "Liger-Kernel", "torch.compile", "torch"
    saved = [rows[case, name]["saved_bytes"] / 2**30 for name in leaders]
    assert in_prose(README) == [f"{gibibytes:.1f} GiB" for gibibytes in saved]
    named = zip(saved[1:], ("Liger-Kernel", "`torch.compile`", "plain PyTorch"))
    for gibibytes, name in named:
        assert re.search(rf"{gibibytes:.1f} GiB (with|in)\s{name}", README.read_text("utf-8"))
    assert saved[0] < min(saved[1:])


def test_comparison_names_all_others_and_shows_where_they_are_faster() -> None:
    found = [cell for cell in cells(PAGES[0]) if cell.field == "median_us"]
    ours = {cell[:4]: float(cell.text) for cell in found if cell.contestant == "opfuser"}
    timed = [cell for cell in found if cell[:4] in ours and re.match(r"\d", cell.text)]
    faster = {cell.contestant for cell in timed if float(cell.text) < ours[cell[:4]]}
    assert faster >= {"torch", "torch.compile", "Liger-Kernel", "quack", "te.LayerNormMLP"}
    assert {cell.contestant for cell in found} >= {"te.ops, delayed", "Transformer Engine"}
