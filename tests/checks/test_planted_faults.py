"""The faults of tests/planted_faults.toml can be planted into the source of now."""

from __future__ import annotations

from tests.planted_faults import ROOT, faults


def test_every_fault_fits_the_source_and_names_tests() -> None:
    found = faults()
    assert len({fault.name for fault in found}) == len(found) >= 30
    missing = [fault.tests for fault in found if not (ROOT / "tests" / fault.tests).exists()]
    assert not missing
