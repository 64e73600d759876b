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
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("comparison", "foreign-kernels")]

# A table below a comment that names the file, the field and the unit of its cells.
TABLE = re.compile(r"^<!-- figures: (\S+) (\S+) (\S+) -->\n((?:\|.*\n)+)", re.M)
# What the numbers of a field are divided by.
UNITS = {
    ("median_us", "us"): 1.0,
    ("median_us", "ms"): 1e3,
    ("saved_bytes", "GiB"): 2.0**30,
    ("first_ten_steps", "s"): 1e3,  # in ms; the first of them
}


class Cell(NamedTuple):
    """A figure on a page, and where it is from."""

    file: str
    field: str
    unit: str
    key: tuple[str, ...]  # case, size, pass, contestant
    text: str


def cells(page: Path) -> list[Cell]:
    found = []
    for file, field, unit, table in TABLE.findall(page.read_text("utf-8")):
        head, _, *rows = (
            [c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()
        )
        assert head[:3] == ["case", "size", "pass"]
        for row in rows:
            for contestant, text in zip(head[3:], row[3:], strict=True):
                found.append(Cell(file, field, unit, (*row[:3], contestant), text))
    return found


@cache
def measured(file: str) -> dict[tuple[str, ...], dict[str, Any]]:
    rows = json.loads((RESULTS / file).read_text("utf-8"))["rows"]
    named = {}
    for row in rows:
        size = " ".join(f"{name}={value}" for name, value in row["size"].items())
        named[row["case"], size, row["pass"], row["contestant"]] = row
    assert len(named) == len(rows)
    return named


def shown(cell: Cell) -> str:
    """The text of the cell that the file gives, with as many digits as it has on the page."""
    row = measured(cell.file).get(cell.key)
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
    known = {(cell.file, *cell.key[:3]) for cell in cells(page) if cell.text}
    named = {(cell.file, cell.key[3]) for cell in cells(page) if re.match(r"\d|failed", cell.text)}
    assert {(cell.file, *cell.key[:3]) for cell in cells(page)} == known
    assert {(cell.file, cell.key[3]) for cell in cells(page)} == named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_figure_stands_outside_of_these_tables(page: Path) -> None:
    text = TABLE.sub("", page.read_text("utf-8"))
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    units = r"ms|us|µs|s|[KMG]i?B|%|x|times|(?:micro|milli)?seconds?|per cent|percent|hundredths"
    assert re.findall(rf"\b\d[\d.,]*\s*(?:{units})\b|\d%", text) == []
    assert re.findall(r"\b\d+\.\d+\b", text.replace("0.8.5", "").replace("torch 2.11", "")) == []


def test_page_compares_with_each_of_the_others_and_tells_of_rows_that_are_lost() -> None:
    found = cells(PAGES[0])
    lost = set()
    for cell in found:
        ours = [c for c in found if c[:3] == cell[:3] and c.key == (*cell.key[:3], "opfuser")]
        if re.match(r"\d", cell.text) and ours and float(cell.text) < float(ours[0].text):
            lost.add(cell.key[3])
    peers = {"torch", "torch.compile", "Liger-Kernel", "quack", "te.ops, delayed"}
    assert {cell.key[3] for cell in found} >= peers
    assert lost >= {"torch", "torch.compile", "Liger-Kernel", "quack", "te.LayerNormMLP"}


def test_comparison_says_how_the_untouched_model_was_timed() -> None:
    text = " ".join(PAGES[0].read_text("utf-8").split())
    assert "timed with Liger-Kernel's rotary embedding in place" in text
