"""Keeps what a run of the tests found, for the table of versions in the documentation.

As a plugin of pytest it writes versions and device into the report of ``--junit-xml``. As a program
it adds the counts of reports to ``docs/compatibility.json``::

    pytest --junit-xml runs/basic.xml tests/basic
    pytest --junit-xml runs/fused.xml tests/fused
    python -m tests.record_run "basic and fused" runs/basic.xml runs/fused.xml
    python docs/write_compatibility.py

Several reports are parts of one run, and have to be of the same versions and device. What a later
one has again, such as a test that failed for want of memory, counts as it ended there.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

TABLE = Path(__file__).parents[1] / "docs" / "compatibility.json"
PACKAGES = "torch", "triton", "transformers"
# What tells one row from another: a later run of the same takes its place.
ENVIRONMENT = ("python", *PACKAGES, "device")
OUTCOMES = "passed", "skipped", "failed"  # from the best to the worst


def environment() -> dict[str, str]:
    """Versions, and the device, of this process; a package that is not installed has none."""
    installed: dict[str, str] = {}
    for found in metadata.distributions():
        installed.setdefault(found.name, found.version)  # the first on the path is imported
    has_gpu = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        **{name: installed.get(name, "") for name in PACKAGES},
        "device": torch.cuda.get_device_name() if has_gpu else "CPU",
    }


def pytest_sessionstart(session: pytest.Session) -> None:
    for plugin in session.config.pluginmanager.get_plugins():
        if hasattr(plugin, "add_global_property"):  # the report; workers have none
            for name, value in environment().items():
                plugin.add_global_property(name, value)


def row_of(what: str, reports: list[Path]) -> dict[str, Any]:
    """The row of a run whose parts have these reports.

    Raises:
        ValueError: a report does not say what ran, or another than the one before does.
    """
    outcomes: dict[str, str] = {}
    environments: dict[tuple[str, ...], Path] = {}
    dates = []
    for report in reports:
        found = ET.parse(report)
        said = {p.get("name", ""): p.get("value", "") for p in found.iter("property")}
        if not said.keys() >= set(ENVIRONMENT):
            raise ValueError(f"{report} has no versions: the report is one of tests/conftest.py")
        environments.setdefault(tuple(said[name] for name in ENVIRONMENT), report)
        dates += [suite.get("timestamp", "")[:10] for suite in found.iter("testsuite")]
        outcomes |= _outcomes(found)
    if len(environments) > 1:
        texts = (f"{report}: {', '.join(of)}" for of, report in environments.items())
        raise ValueError(f"reports of one run have the same versions; {'; '.join(texts)}")
    (of,) = environments
    ended = list(outcomes.values())
    counts = {outcome: ended.count(outcome) for outcome in ("passed", "failed", "skipped")}
    return {"date": max(dates), **dict(zip(ENVIRONMENT, of)), **counts, "what": what}


def _outcomes(report: ET.ElementTree[Any]) -> dict[str, str]:
    """How each test ended; one that passed, and failed when its fixtures ended, has two entries."""
    worst: dict[str, str] = {}
    for case in report.iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in kinds and outcome == "passed" else outcome
        worst[test] = max(outcome, worst.get(test, outcome), key=OUTCOMES.index)
    return worst


def add(row: dict[str, Any], table: Path) -> None:
    """Writes the row into the table, in place of an earlier one of the same run."""
    rows = json.loads(table.read_text("utf-8")) if table.exists() else []
    same = (*ENVIRONMENT, "what")
    rows = [other for other in rows if any(other[name] != row[name] for name in same)]
    rows.append(row)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    table.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main(args: list[str] | None = None) -> None:
    """Adds the run to the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", help="the tests that ran, in words")
    parser.add_argument("reports", nargs="+", type=Path, help="what pytest --junit-xml wrote")
    parser.add_argument("--table", type=Path, default=TABLE)
    given = parser.parse_args(args)
    try:
        row = row_of(given.what, given.reports)
    except ValueError as error:
        sys.exit(str(error))
    add(row, given.table)
    print(", ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
