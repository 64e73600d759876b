"""Runs on a GPU: what fails is known also where the run is cut off."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import gpu_run

ROOT = Path(__file__).parents[2]
TEXT = """
import os

def test_fails():
    assert 1 + 1 == 3, "counted wrongly"

def test_passes():
    pass

def test_cut_off():
    if {cut}:
        os._exit(9)
"""


def run(folder: Path, *args: str, cut: bool = False) -> tuple[str, str]:
    """What a run prints, and what its file holds."""
    (folder / "test_some.py").write_text(TEXT.format(cut=cut))
    failed = folder / "of_a_run" / "failed.txt"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.gpu_run",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    ended = subprocess.run(
        [*command, "--rootdir", str(folder), "--failed", str(failed), *args, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout, failed.read_text("utf-8")


def test_a_run_that_is_cut_off_has_told_what_failed(tmp_path: Path) -> None:
    printed, kept = run(tmp_path, cut=True)
    assert "1 failed" not in printed, "there is no summary"
    name = "FAILED test_some.py::test_fails (call)"
    assert name in printed
    assert kept.startswith(name)
    assert "counted wrongly" in kept
    assert kept.count("FAILED") == 1


@pytest.mark.parametrize("processes", [0, 2])
def test_each_failure_is_told_once(processes: int, tmp_path: Path) -> None:
    _, kept = run(tmp_path, "-n", str(processes))
    assert kept.count("FAILED test_some.py::test_fails") == 1
    (tmp_path / "test_wrong.py").write_text("import nothing_of_that_name")
    _, kept = run(tmp_path, "-n", str(processes))
    assert kept.count("FAILED test_wrong.py (collection)") == 1
    assert "nothing_of_that_name" in kept


def test_a_process_that_has_lost_the_device_ends(tmp_path: Path) -> None:
    lost = "def test_{}():\n    raise RuntimeError('CUDA error: device-side assert triggered')\n"
    fine = "def test_c():\n    pass\n"
    (tmp_path / "test_lost.py").write_text(lost.format("a") + lost.format("b") + fine)
    printed, kept = run(tmp_path, "-n", "1")
    assert kept.count("FAILED test_lost.py::test_a (call)") == 1
    assert "crashed while running" in kept
    assert "3 passed" in printed, "test_c, and two of test_some.py"


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    printed, kept = run(tmp_path, "--seconds", "0", "-rs")
    assert "3 skipped" in printed
    assert "no time was left" in printed
    assert not kept


def test_files_that_are_left_out_are_there_and_have_no_test_for_a_gpu() -> None:
    for name in gpu_run.NEEDED:
        text = (gpu_run.TESTS / name).read_text("utf-8")
        assert "mark.gpu" not in text
        assert "device:" not in text
