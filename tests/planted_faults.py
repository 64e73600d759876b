"""Plants faults into the library, one at a time, each of which the tests must find.

``python -m tests.planted_faults [word ...]`` takes the faults of ``planted_faults.toml`` whose name
contains one of the words, or all. For each it copies the project, plants the fault in the copy, and
runs tests there until the first one fails: those where the fault is expected to show, then all.
Prints which test found it; exits with 1 if a fault was found by none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
# The test that reads the faults finds that the source has changed.
WITHOUT = ("-p", "no:cacheprovider", "--ignore=tests/checks/test_planted_faults.py")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "site")


class Fault(NamedTuple):
    """What goes wrong, the text in a source file and what takes its place, and where to look."""

    name: str
    file: str
    old: str
    new: str
    tests: str


def faults() -> list[Fault]:
    """All faults, each of which fits the source of now."""
    text = (ROOT / "tests" / "planted_faults.toml").read_text(encoding="utf-8")
    found = [Fault(**fault) for fault in tomllib.loads(text)["fault"]]
    for fault in found:
        count = (ROOT / "opfuser" / fault.file).read_text(encoding="utf-8").count(fault.old)
        if count != 1:
            raise ValueError(f"{fault.name}: its text occurs {count} times in {fault.file}")
    return found


def found_by(fault: Fault) -> str:
    """The first test that fails with the fault; empty if none does."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "project"
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
        source = copy / "opfuser" / fault.file
        text = source.read_text(encoding="utf-8").replace(fault.old, fault.new)
        source.write_text(text, encoding="utf-8")
        for tests in (f"tests/{fault.tests}", "tests"):
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", *WITHOUT, tests],
                cwd=copy,
                env={**os.environ, "PYTHONPATH": str(copy)},
                capture_output=True,
                text=True,
                check=False,
            )
            for line in done.stdout.splitlines():
                if line.startswith(("FAILED", "ERROR")):
                    return line.split(" - ")[0]
    return ""


def main(words: list[str]) -> int:
    """Plants the faults whose names contain one of the words, or all."""
    missed = 0
    for fault in faults():
        if not words or any(word in fault.name for word in words):
            test = found_by(fault)
            missed += not test
            print(f"{fault.name}: {test or 'found by no test'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
