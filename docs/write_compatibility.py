"""Writes ``docs/compatibility.md``, the versions with which the tests ran.

``python docs/write_compatibility.py`` writes the page from ``compatibility.json``, to which
``python -m tests.record_run`` adds; with ``--check`` it only says whether the page differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("compatibility.md")
RUNS = PAGE.with_suffix(".json")

INTRODUCTION = """\
# Versions

<!-- Written by docs/write_compatibility.py from compatibility.json. -->

What the tests of this repository ran with, the newest torch first. A row is one run, and none is
written by hand: `python -m tests.record_run` takes the counts from the reports of pytest. Skipped
are tests that need a device, a number of GPUs or a package that was not there. What opfuser does
with other versions, and what runs on which device, is in [Limits](limits.md#where-it-runs).

"""
COLUMNS = "torch", "triton", "Python", "transformers", "device", "tests"
COLUMNS += "passed", "failed", "skipped", "date"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def page() -> str:
    """The text of the page."""
    runs = json.loads(RUNS.read_text("utf-8"))
    runs.sort(key=lambda run: run["what"])
    runs.sort(key=lambda run: (_numbers(run["torch"]), _numbers(run["python"])), reverse=True)
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for run in runs:
        cells = run | {"Python": run["python"], "tests": run["what"]}
        lines.append(f"| {' | '.join(str(cells[column]) or 'none' for column in COLUMNS)} |")
    return INTRODUCTION + "\n".join(lines) + "\n"


def main(args: list[str] | None = None) -> None:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page differs")
    if not parser.parse_args(args).check:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text("utf-8") != page():
        sys.exit(f"{PAGE.name} shows other runs: run python docs/write_compatibility.py")


if __name__ == "__main__":
    main()
