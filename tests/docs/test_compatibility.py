"""The table of versions says what runs of the tests found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs import write_compatibility
from opfuser.deprecated import NAMES, Renamed
from tests import record_run

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
def test_is_skipped(): pytest.skip("no GPU")
@pytest.mark.xfail
def test_is_known_to_fail(): assert False

@pytest.fixture
def breaking():
    yield
    assert False

def test_passes_and_breaks(breaking): pass
"""


def report(folder: Path, name: str, tests: str, *args: str) -> Path:
    """The report of a run of its own."""
    (folder / "test_some.py").write_text(tests)
    path = folder / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.record_run"]
    command += [f"--junit-xml={path}", "test_some.py", *args]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True)
    return path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(tmp_path_factory.mktemp("first"), "first", TESTS)


def test_a_row_has_versions_and_counts(first: Path) -> None:
    row = record_run.row_of("some", [first])
    counts = {"passed": 1, "failed": 2, "skipped": 2, "what": "some"}
    assert row == {"date": row["date"], **record_run.environment(), **counts}
    assert len(row["date"].split("-")) == 3


def test_the_version_is_that_of_what_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triton-99.0.dist-info").mkdir()
    (tmp_path / "triton-99.0.dist-info" / "METADATA").write_text("Name: triton\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert record_run.environment()["triton"] == "99.0"


def test_what_ran_again_counts_as_it_ended(first: Path, tmp_path: Path) -> None:
    again = report(tmp_path, "again", "def test_fails(): pass\ndef test_other(): pass\n")
    row = record_run.row_of("some", [first, again])
    assert (row["passed"], row["failed"], row["skipped"]) == (3, 1, 2)


def test_processes_that_share_the_tests_report_versions(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    row = record_run.row_of("some", [report(tmp_path, "first", TESTS, "-n", "2")])
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 2, 2)


def test_reports_that_are_not_of_one_run_are_refused(first: Path, tmp_path: Path) -> None:
    text = first.read_text()
    other = tmp_path / "other.xml"
    version = f'name="torch" value="{record_run.environment()["torch"]}"'
    assert version in text
    other.write_text(text.replace(version, 'name="torch" value="2.99.0"'))
    with pytest.raises(ValueError, match=r"reports of one run have the same versions; .* 2\.99\.0"):
        record_run.row_of("some", [first, other])
    other.write_text(text.replace(f"<property {version} />", ""))
    with pytest.raises(ValueError, match=r"other\.xml has no versions"):
        record_run.row_of("some", [other])


def test_a_run_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    table = tmp_path / "compatibility.json"
    one: dict[str, Any] = {**record_run.environment(), "what": "some", "passed": 1}
    record_run.add(one, table)
    record_run.add({**one, "what": "others"}, table)
    record_run.add({**one, "passed": 2}, table)
    assert json.loads(table.read_text()) == [{**one, "what": "others"}, {**one, "passed": 2}]


def test_the_newest_torch_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"date": "2026-01-02", "python": "3.11.2", "triton": "", "transformers": "5.23.0"}
    row |= {"device": "CPU", "what": "all", "passed": 3, "failed": 0, "skipped": 1}
    runs = [row | {"torch": torch} for torch in ("2.9.1", "2.13.0+cpu", "2.11.0")]
    monkeypatch.setattr(write_compatibility, "RUNS", tmp_path / "runs.json")
    write_compatibility.RUNS.write_text(json.dumps(runs))
    table = write_compatibility.page().partition("\n## ")[0]
    lines = table.strip().splitlines()[-3:]
    rest = "none | 3.11.2 | 5.23.0 | CPU | all | 3 | 0 | 1 | 2026-01-02 |"
    assert lines == [f"| {torch} | {rest}" for torch in ("2.13.0+cpu", "2.11.0", "2.9.1")]


def test_names_that_change_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_compatibility.page().endswith("\nAt present there are none.\n") != bool(NAMES)
    monkeypatch.setitem(NAMES, "opfuser.use", Renamed("opfuser.apply", "0.2"))
    assert "| `opfuser.use` | `opfuser.apply` | 0.2 | 0.3 |\n" in write_compatibility.page()
