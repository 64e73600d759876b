"""Every configuration that is shipped assembles for every architecture, and keeps to registers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from opfuser.kernels.launch import INTERPRETED, Recorded, recorded

pytest.importorskip("triton", reason="Triton exists for Linux only")
if INTERPRETED:
    pytest.skip("the interpreter's process compiles nothing", allow_module_level=True)

from tests.kernels.compiling import Report, compiled, identity

CAPABILITIES = (80, 90, 100)
SHIPPED = Path(__file__).parent / "shipped"
FAMILIES = {
    path.stem: importlib.import_module(f"tests.kernels.shipped.{path.stem}")
    for path in sorted(SHIPPED.glob("*.py"))
}
CALLS: dict[str, Callable[[], object]] = {
    f"{family}: {name}": call
    for family, module in FAMILIES.items()
    for name, call in module.LAUNCHES.items()
}
TRAFFIC = {
    f"{family}: {name}": limit
    for family, module in FAMILIES.items()
    for name, limit in module.TRAFFIC.items()
}


def launches(call: str) -> list[Recorded]:
    with recorded() as noted:
        CALLS[call]()
    assert noted, f"{call} launches nothing"
    return noted


def distinct() -> dict[str, Recorded]:
    return {identity(noted): noted for call in CALLS for noted in launches(call)}


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, int], Report]:
    """All of them, printed as a table where pytest shows output (-s)."""
    found = {}
    for name, noted in distinct().items():
        for capability in CAPABILITIES:
            report = compiled(noted, capability)
            found[name, capability] = report
            print(f"sm_{capability} {report}  {noted.launch}")  # noqa: T201  # shown by -s
    return found


@pytest.mark.slow
def test_nothing_is_spilled(reports: dict[tuple[str, int], Report]) -> None:
    spilled = {key: report for key, report in reports.items() if report.spilled or report.stack}
    assert not spilled


@pytest.mark.slow
def test_row_kernels_access_16_bytes_at_a_time(reports: dict[tuple[str, int], Report]) -> None:
    narrow = {key: report for key, report in reports.items() if report.widest_access < 16}
    assert not narrow


@pytest.mark.slow
def test_shared_memory_fits(reports: dict[tuple[str, int], Report]) -> None:
    """An A100 lends 163 KiB to a program, later ones 227 KiB."""
    room = {80: 163, 90: 227, 100: 227}
    assert all(report.shared <= room[key[1]] * 1024 for key, report in reports.items())


@pytest.mark.parametrize("call", TRAFFIC)
def test_launchers_move_no_more_than_they_must(call: str) -> None:
    """Per-row statistics and partial sums are what the two percent are for."""
    assert sum(noted.traffic for noted in launches(call)) <= 1.02 * TRAFFIC[call]


def test_every_call_has_its_traffic_stated() -> None:
    assert set(TRAFFIC) == set(CALLS)
