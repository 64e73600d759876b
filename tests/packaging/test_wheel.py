"""The wheel: pure Python, typed, complete, of the version that the package states."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import opfuser
from opfuser.torch_internals import TESTED

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def read(wheel: Path) -> Callable[[str], str]:
    def read_dist_info(name: str) -> str:
        with ZipFile(wheel) as archive:
            info = f"opfuser-{opfuser.__version__}.dist-info/{name}"
            return archive.read(info).decode()

    return read_dist_info


@pytest.fixture(scope="module")
def metadata(read: Callable[[str], str]) -> Message:
    return Parser().parsestr(read("METADATA"))


def test_name_carries_version_and_no_platform(wheel: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([abc.]\w+)?", opfuser.__version__)
    assert wheel.name == f"opfuser-{opfuser.__version__}-py3-none-any.whl"


def test_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "opfuser").rglob("*.py")}
    data = {
        path.relative_to(ROOT).as_posix()
        for kind in ("*.yaml", "*.html")
        for path in (ROOT / "opfuser").rglob(kind)
    }
    assert names == sources | data | {"opfuser/py.typed"}


def test_license_is_stated_and_included(metadata: Message, read: Callable[[str], str]) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert read("licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_requirements_at_run_time(metadata: Message) -> None:
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    plain = {r.name: r for r in required if not (r.marker and "extra" in str(r.marker))}
    assert set(plain) == {"torch", "triton", "typing-extensions", "numpy"}
    assert metadata["Requires-Python"] == ">=3.10"
    marker = plain["triton"].marker
    assert marker is not None
    assert marker.evaluate({"platform_system": "Linux"})
    assert not marker.evaluate({"platform_system": "Darwin"})


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_oldest_is_required_and_no_release_is_too_new(metadata: Message, name: str) -> None:
    """What pip would replace is taken from those who have it; ``opfuser doctor`` says what is newer
    than what was tested. All that is supported is tested by ``make test-versions``."""
    required = map(Requirement, metadata.get_all("Requires-Dist", []))
    (allowed,) = [r.specifier for r in required if r.name == name]
    (bound,) = allowed
    assert bound.operator == ">="
    assert TESTED[name].split(" to ")[0] == bound.version


def test_constraints_pin_what_the_checks_install(metadata: Message) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    pinned = {canonicalize_name(pin.name) for pin in pins}

    not_installed = {"te"}
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        extras = set(re.findall(r"extra == ['\"](\w+)['\"]", line))
        if requirement.name != "opfuser" and not extras & not_installed:
            assert canonicalize_name(requirement.name) in pinned, line
