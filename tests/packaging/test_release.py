"""What a release consists of says the same: versions, and the commands of the workflows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import opfuser

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))  # none in an unpacked sdist


def test_citation_has_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == opfuser.__version__
    assert citation["license"] == "Apache-2.0"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_is_there(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    versions = {path.stem.removeprefix("torch-") for path in ROOT.glob("constraints/torch-*.txt")}
    for command in commands:
        if command.startswith("make "):
            name = command.removeprefix("make ")
            stem = name.removesuffix("${{ matrix.torch }}")
            assert name in targets or stem == "test-", command
        elif command.startswith("."):
            assert (ROOT / command).stat().st_mode & 0o100, command
    tested = [
        set(job["strategy"]["matrix"].get("torch", versions))
        for job in jobs.values()
        if "strategy" in job
    ]
    assert versions
    assert all(found == versions for found in tested)


def test_version_is_found_as_the_release_looks_for_it() -> None:
    source = (ROOT / "opfuser" / "__init__.py").read_text()
    assert re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE) == [opfuser.__version__]
