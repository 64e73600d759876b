"""The chart of the README says what the result files say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks import overview

CHARTS = overview.charts()
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("path", CHARTS, ids=lambda path: path.stem)
def test_chart_is_drawn_from_the_results(path: Path) -> None:
    assert path.read_text("utf-8") == CHARTS[path], "run python -m benchmarks.overview"


def test_readme_shows_the_charts() -> None:
    root = overview.RESULTS.parents[1]
    text = (root / "README.md").read_text("utf-8")
    assert [p for p in CHARTS if f'="{p.relative_to(root).as_posix()}"' not in text] == []


def drawn(chart: str) -> dict[str, list[tuple[str, float]]]:
    """By group and contestant: the labels of time and memory, and the lengths of the bars."""
    found: dict[str, list[tuple[str, float]]] = {}
    for rect in ET.fromstring(chart).iter(f"{SVG}rect"):
        who, label = (rect.findtext(f"{SVG}title") or "").rsplit(": ", 1)
        found.setdefault(who, []).append((label, float(rect.attrib["width"])))
    return found


@pytest.mark.parametrize("group", overview.GROUPS, ids=lambda group: group.case)
def test_bars_are_as_long_as_the_measured_figures(group: overview.Group) -> None:
    rows = json.loads((overview.RESULTS / "h200" / f"{group.file}.json").read_text())["rows"]
    rows = [row for row in rows if row["case"] == group.case and row["size"] == group.size]
    own = {row["contestant"]: row for row in rows if row["pass"] == "step"}
    assert {"torch", "opfuser"} <= set(group.contestants)
    for chart in CHARTS.values():
        bars = {name: drawn(chart)[f"{group.title}, {name}"] for name in group.contestants}
        for column, (key, unit, scale) in enumerate(
            [("median_us", "ms", 1e3), ("saved_bytes", "GiB", 2**30)]
        ):
            longest = max(own[name][key] for name in group.contestants)
            for name in group.contestants:
                label, length = bars[name][column]
                number = re.fullmatch(rf"(\d+\.\d+) {unit}", label)
                assert number is not None
                digits = len(number[1].partition(".")[2])
                assert number[1] == f"{own[name][key] / scale:.{digits}f}"
                assert length / overview.BAR == pytest.approx(own[name][key] / longest, abs=1e-4)


def test_each_peer_takes_part_in_a_group() -> None:
    names = {name for group in overview.GROUPS for name in group.contestants}
    assert {"torch", "torch.compile", "Liger-Kernel", "te.ops", "opfuser"} <= names


def test_contestant_that_was_not_timed_is_not_left_out_in_silence() -> None:
    group = overview.GROUPS[0]._replace(contestants=("torch", "nobody"))
    with pytest.raises(KeyError, match="nobody"):
        overview.bars(group, overview.RESULTS / "h200")
