"""The sdist: the tests are in it, and all that they import, read or run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import opfuser

ROOT = Path(__file__).parents[2]

# Without the paths of an editable installation, from which a missing file would be read.
COLLECT = """
import sys
from pathlib import Path
sys.path = [path for path in sys.path if not (Path(path or ".") / "opfuser").is_dir()]
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-rs", "-pno:cacheprovider", "-n0", *FILES]))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    name = f"opfuser-{opfuser.__version__}"
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def files(root: Path) -> set[str]:
    """What a checkout and an sdist have in common; not what was built or is hidden."""
    found = [path for path in root.iterdir() if path.is_file()]
    for folder in ("opfuser", "tests", "benchmarks", "docs", "examples"):
        found += [path for path in (root / folder).rglob("*") if path.is_file()]
    names = {path.relative_to(root).as_posix() for path in found if path.name != "PKG-INFO"}
    return {name for name in names if "__pycache__" not in name and not name.startswith(".")}


def test_nothing_of_the_checkout_is_missing(unpacked: Path) -> None:
    assert files(ROOT) - files(unpacked) == set()
    assert files(unpacked) - files(ROOT) == set()


# What reads files of the checkout, or imports what does so. Others import what is installed, and
# files of which none is missing.
READS = re.compile(r"__file__|planted_faults|^ *(?:from|import) (?:benchmarks|docs|examples)", re.M)


@pytest.mark.slow
def test_tests_that_read_files_can_be_collected(unpacked: Path) -> None:
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    reading = [p.relative_to(ROOT).as_posix() for p in tests if READS.search(p.read_text("utf-8"))]
    assert len(reading) > 40
    done = subprocess.run(
        [sys.executable, "-c", f"FILES = {reading}\n{COLLECT}"],
        cwd=unpacked,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    # A file whose library is missing says so in place of its tests: "SKIPPED [1] file:line: why".
    lines = [line.removeprefix("SKIPPED [1] ") for line in done.stdout.splitlines()]
    collected = {line.partition(":")[0] for line in lines}
    assert set(reading) <= collected
