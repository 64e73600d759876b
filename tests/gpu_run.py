"""pytest plugin for a run on a GPU that may be cut off: ``make test-gpu``.

What fails is printed at once and added to a file, with its traceback, by the process that collects
the results, so that no name is lost with the summary. What has shown most faults on a GPU runs
first, and nothing begins when the time is over: such tests are skipped, and say so. A process in
which an assertion or an access failed on the device can compute no more: it ends, another takes its
place, and the test that was to be next there counts as failed. Files whose packages belong to the
documentation or to a browser are left out; the header names them.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

# Folders below tests/ by how often a GPU alone has found something there; the others follow.
ORDER = ("basic", "replay", "quantization", "engine", "applying", "integrations", "fused", "models")
# Modules that files below tests/ import and that machines with a GPU may lack.
NEEDED = {
    "docs/test_docstrings.py": "griffe",
    "docs/test_site.py": "playwright",
    "report/test_page_in_browser.py": "playwright",
}
TESTS = Path(__file__).parent
# What torch says of a device that this process has lost.
LOST = "device-side assert triggered", "an illegal memory access was encountered"
_BEGAN = time.monotonic()
_lost: list[str] = []  # tests that lost the device


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("GPU")
    group.addoption("--failed", type=Path, default=Path("runs/gpu/failed.txt"), metavar="FILE",
                    help="where the tests that fail are written, as they do")  # fmt: skip
    group.addoption("--seconds", type=float, default=float("inf"),
                    help="after which no test begins")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config))


def _left_out() -> dict[str, str]:
    return {f: m for f, m in NEEDED.items() if importlib.util.find_spec(m) is None}


def pytest_report_header() -> str:
    return "not collected: " + (", ".join(f"{f} (no {m})" for f, m in _left_out().items()) or "-")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path in {TESTS / name for name in _left_out()} else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        parts = item.path.relative_to(TESTS).parts if item.path.is_relative_to(TESTS) else ("",)
        return ORDER.index(parts[0]) if parts[0] in ORDER else len(ORDER)

    items.sort(key=place)  # what takes long stays first in its folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - _BEGAN > item.config.getoption("seconds"):
        pytest.skip("no time was left")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    done = yield
    if _lost and hasattr(item.config, "workerinput"):
        os._exit(1)
    return done


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and any(message in report.longreprtext for message in LOST):
        _lost.append(report.nodeid)


class _Failures:
    """Prints and keeps what fails, in the process that all results come to."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, file = config, config.getoption("failed")
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="utf-8")

    def _note(self, report: pytest.TestReport | pytest.CollectReport, when: str) -> None:
        if report.failed:
            line = f"FAILED {report.nodeid} ({when})"
            self.config.get_terminal_writer().line(f"\n{line}")
            self.config.get_terminal_writer().flush()
            with self.file.open("a", encoding="utf-8") as out:
                out.write(f"{line}\n{report.longreprtext}\n\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report, report.when or "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report, "collection")
