"""Every configuration that is shipped assembles, and keeps to registers; none moves too much."""

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

SHIPPED = Path(__file__).parent / "shipped"
FAMILIES = {
    path.stem: importlib.import_module(f"tests.kernels.shipped.{path.stem}")
    for path in sorted(SHIPPED.glob("*.py"))
}
# KiB that a program may be lent, of an A100 and of later ones.
SHARED = {80: 163, 90: 227, 100: 227}


def launches(call: Callable[[], object]) -> list[Recorded]:
    with recorded() as noted:
        call()
    return noted


def distinct(family: str) -> dict[str, Recorded]:
    calls = FAMILIES[family].LAUNCHES.values()
    return {identity(noted): noted for call in calls for noted in launches(call)}


def check(noted: Recorded, capability: int) -> Report:
    report = compiled(noted, capability)
    text = f"sm_{capability} {report}  {noted.launch}"
    print(text)  # noqa: T201  # a table where pytest shows output (-s)
    assert not report.stack, f"spilled: {text}"
    assert report.widest_access >= 16, f"accesses less than 16 bytes at a time: {text}"
    assert report.shared <= SHARED[capability] * 1024, f"does not fit: {text}"
    return report


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_shipped_compiles_and_spills_nothing(family: str) -> None:
    """All for sm_90; for sm_80 and sm_100 what comes closest to a limit there.

    Of each function those are the launches with the most registers, per size of an element, and
    that with the most shared memory.
    """
    reports = [(noted, check(noted, 90)) for noted in distinct(family).values()]
    closest: dict[object, Recorded] = {}  # of those with the same key the last stays
    for noted, _ in sorted(reports, key=lambda pair: pair[1].registers):
        assert noted.tensors[0] is not None
        closest[noted.launch.name, noted.tensors[0].itemsize] = noted
    for noted, _ in sorted(reports, key=lambda pair: pair[1].shared):
        closest[noted.launch.name] = noted
    for noted in {identity(noted): noted for noted in closest.values()}.values():
        for capability in (80, 100):
            check(noted, capability)


@pytest.mark.parametrize("family", FAMILIES)
def test_launchers_move_no_more_than_they_must(family: str) -> None:
    """Per-row statistics and partial sums are what the two percent are for."""
    module = FAMILIES[family]
    assert set(module.TRAFFIC) == set(module.LAUNCHES)
    for name, call in module.LAUNCHES.items():
        noted = launches(call)
        assert noted, f"{name} launches nothing"
        moved = sum(one.traffic for one in noted)
        assert moved <= 1.02 * module.TRAFFIC[name], f"{name}: {moved} bytes"
