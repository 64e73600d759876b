"""Writes ``docs/compatibility.md``: the versions with which the tests ran, names that change.

``python docs/write_compatibility.py`` writes the page from ``compatibility.json``, to which
``python -m tests.record_run`` adds; with ``--check`` it only says whether the page differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

# As docs/write_snippets.py may be run from any folder, so may this.
sys.path.insert(0, str(Path(__file__).parents[1]))

from opfuser.deprecated import NAMES

PAGE = Path(__file__).with_name("compatibility.md")
RUNS = PAGE.with_suffix(".json")

INTRODUCTION = """\
# Versions

<!-- Written by docs/write_compatibility.py from compatibility.json. -->

This page lists the versions that the tests ran with, the newest torch first. Each row is one run.
`python -m tests.record_run` takes the counts from pytest's reports; none is written by hand. Tests
are skipped if they need a device, more GPUs or a package that was not available. What opfuser does
with other versions, and where it runs, is in [Limits](limits.md#where-it-runs).

"""
NAMES_THAT_CHANGE = """
## Names that change

Versions follow [Semantic Versioning](https://semver.org/spec/v2.0.0.html): before 1.0, a minor
version may break things, and the changelog says what. A renamed public name works under its old
name until the next minor version; every use warns with a `FutureWarning`, an
`opfuser.deprecated.DeprecatedNameWarning`. To find these uses, run your tests with
`-W error::FutureWarning`. Public names are those that the [API](reference/api/sequences.md) lists.

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
    return INTRODUCTION + "\n".join(lines) + "\n" + NAMES_THAT_CHANGE + _names()


def _names() -> str:
    rows = [
        f"| `{path}` | `{renamed.to}` | {renamed.since} | {renamed.removed_in} |\n"
        for path, renamed in NAMES.items()
    ]
    head = "| old | new | since | removed in |\n|---|---|---|---|\n"
    return head + "".join(rows) if rows else "At present there are none.\n"


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
