"""PNG charts of what benchmarks/gpu/run.py wrote: ``python benchmarks/charts.py FOLDER``.

Writes ``<part>.png`` beside each ``<part>.json``; for blocks also ``memory.png``, for quantized and
distributed also ``<part>_memory.png``, and of what benchmarks/gpu/fp8_training.py wrote
``fp8_training.png``. Needs matplotlib, which the extra ``examples`` installs.
"""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Row = dict[str, Any]
Bars = dict[str, dict[str, float]]  # by group, then by contestant

COLORS = {"opfuser": "#c8102e", "torch": "#8a8d8f"}
OTHERS = (
    "#005eb8", "#43b02a", "#ffa300", "#6a3d9a", "#00a9ce", "#b58150", "#e377c2", "#17324d",
    "#bcbd22", "#7f3b08", "#8dd3c7",
)  # fmt: skip
RECIPES = ("delayed", "current", "block")

TRAINING = "fp8_training"


class Chart(NamedTuple):
    """One picture: the rows of a part that it shows, and which of their values.

    Attributes:
        every_size: else each case has its first one.
        contestants: empty for all.
        cases: patterns of the names of those that it shows.
    """

    name: str
    part: str
    key: str
    label: str
    factor: float = 1.0
    passes: tuple[str, ...] = ("forward", "backward", "step")
    every_size: bool = True
    contestants: tuple[str, ...] = ()
    cases: tuple[str, ...] = ("*",)

    def shows(self, row: Row) -> bool:
        if row.get(self.key) is None or row["pass"] not in self.passes:
            return False
        if self.contestants and row["contestant"] not in self.contestants:
            return False
        return any(fnmatchcase(row["case"], pattern) for pattern in self.cases)


QUANTIZED = Chart(
    "quantized",
    "quantized",
    "speedup",
    "times as fast as torch in bf16",
    every_size=False,
    contestants=(
        "torch",
        *(
            name
            for library in ("opfuser", "te.ops", "te.TransformerLayer")
            for name in (library, *(f"{library}, {recipe}" for recipe in RECIPES))
        ),
    ),
)
CHARTS = (
    Chart(
        "kernels",
        "kernels",
        "share_of_copy",
        "% of the bandwidth of a copy",
        100.0,
        every_size=False,
    ),
    Chart("blocks", "blocks", "speedup", "times as fast as torch"),
    Chart("memory", "blocks", "saved_bytes", "MB saved for backward", 1e-6),
    Chart("model", "model", "tokens_per_s", "thousand tokens per second", 1e-3),
    Chart("host", "host", "median_us", "µs of the host's time", passes=("step", "launch")),
    QUANTIZED,
    QUANTIZED._replace(
        name="quantized_memory",
        key="saved_bytes",
        label="MB saved for backward",
        factor=1e-6,
        cases=("*block", "*layer"),
    ),
    Chart(
        "experts",
        "experts",
        "tflops",
        "TFLOP/s of a step, of the experts' GEMMs",
        passes=("step",),
        contestants=(
            "torch",
            "opfuser",
            *(f"opfuser, {recipe}" for recipe in ("delayed, E4M3", "delayed", "rows", "block")),
            "GEMMs alone",
            "GEMMs alone, FP8 rows",
        ),
        cases=("experts*",),
    ),
    Chart("distributed", "distributed", "median_us", "ms of a step", 1e-3),
    Chart("distributed_memory", "distributed", "peak_bytes", "GiB of a GPU at the peak", 2**-30),
    Chart("expert_parallel", "expert_parallel", "median_us", "ms of a step", 1e-3, ("step",)),
)


def bars(rows: list[Row], chart: Chart) -> Bars:
    """The bars of a chart; if it does not show every size, each case has its first one."""
    groups: Bars = {}
    first: dict[str, Row] = {}
    for row in rows:
        if not chart.shows(row) or row["contestant"].startswith("copy"):
            continue
        size = first.setdefault(row["case"], row["size"])
        if not chart.every_size and row["size"] != size:
            continue
        sizes = ", ".join(f"{key} {value}" for key, value in row["size"].items())
        passed = "" if row["pass"] == "step" else f", {row['pass']}"
        group = groups.setdefault(f"{row['case']}{passed}\n{sizes}", {})
        group[row["contestant"]] = row[chart.key] * chart.factor
    return groups


def draw(groups: Bars, chart: Chart, machine: dict[str, Any]) -> Figure:
    """Horizontal bars, the groups from top to bottom."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    others = [name for name in names if name not in COLORS]
    colors = {**COLORS, **{name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)}}
    count = sum(len(group) + 1 for group in groups.values())
    figure = Figure(figsize=(9, 1.2 + 0.15 * count), layout="constrained")
    FigureCanvasAgg(figure)
    device = machine.get("device", machine["processor"])
    axes = figure.add_subplot(xlabel=f"{chart.label}; {device}, torch {machine['torch']}")
    ticks, place, seen = [], 0.0, set()
    for group in groups.values():
        ticks.append(place + (len(group) - 1) / 2)
        for name, value in group.items():
            label = name if name not in seen else None
            seen.add(name)
            bar = axes.barh(place, value, color=colors[name], label=label, height=0.9)
            axes.bar_label(bar, [f"{value:.{3 if value < 1000 else 4}g}"], fontsize=6, padding=2)
            place += 1
        place += 1
    axes.set_yticks(ticks, list(groups), fontsize=7)
    axes.set_ylim(place - 0.5, -1)
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8)
    return figure


def draw_training(document: dict[str, Any]) -> Figure:
    """Losses by step, above the difference of each contestant to the first one."""
    rows = [row for row in document["rows"] if row["steps"]]
    reference = rows[0]
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, sharex=True)
    machine = document["machine"]
    device = machine.get("device", machine["processor"])
    for row, color in zip(rows, (COLORS["torch"], "#4d4d4d", COLORS["opfuser"], *OTHERS)):
        width = row["smoothed"]
        steps = [min((n + 1) * width, row["steps"]) for n in range(len(row["losses"]))]
        label = f"{row['contestant']}, {row['median_ms']:.1f} ms"
        above.plot(steps, row["losses"], color=color, label=label, linewidth=1)
        if row is not reference:
            differences = [
                100 * (own / other - 1) for own, other in zip(row["losses"], reference["losses"])
            ]
            below.plot(steps[: len(differences)], differences, color=color, linewidth=1)
    above.set_ylabel("nats per byte")
    below.set_ylabel(f"% above {reference['contestant']}")
    below.set_xlabel(f"step; {device}, torch {machine['torch']}")
    below.axhline(0, color=COLORS["torch"], linewidth=1)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure


def make_charts(folder: Path) -> list[Path]:
    """Draws every chart with figures; returns the paths of the pictures."""
    made = []
    for chart in CHARTS:
        source = folder / f"{chart.part}.json"
        if not source.exists():
            continue
        document = json.loads(source.read_text())
        groups = bars(document["rows"], chart)
        if not groups:
            continue
        path = folder / f"{chart.name}.png"
        draw(groups, chart, document["machine"]).savefig(path, dpi=120)
        made.append(path)
    source = folder / f"{TRAINING}.json"
    if source.exists():
        document = json.loads(source.read_text())
        if any(row["steps"] for row in document["rows"]):
            draw_training(document).savefig(source.with_suffix(".png"), dpi=120)
            made.append(source.with_suffix(".png"))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the JSON files are")
    for path in make_charts(parser.parse_args().folder):
        print(path)


if __name__ == "__main__":
    main()
