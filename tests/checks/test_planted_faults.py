"""The faults of tests/planted_faults.toml can be planted into the source of now."""

from __future__ import annotations

from tests.planted_faults import ROOT, Fault, faults


def is_there(fault: Fault) -> bool:
    """Whether the tests that it names are: a file, a folder, or a function of a file."""
    place, _, function = fault.tests.partition("::")
    path = ROOT / "tests" / place
    return path.exists() and (not function or f"def {function}(" in path.read_text("utf-8"))


def test_every_fault_fits_the_source_and_names_tests() -> None:
    found = faults()
    assert len({fault.name for fault in found}) == len(found) >= 30
    assert not [fault.tests for fault in found if not is_there(fault)]
