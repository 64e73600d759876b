"""Starts tests of kernels under Triton's interpreter: a few processes, each with some of the files.

What one test has interpreted, the next ones need not read again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(Path(__file__).parent.glob("numerics/test_*.py"), key=lambda p: p.stat().st_size)
ATTRIBUTES = ROOT / "tests" / "basic" / "test_attributes.py"
# What depends on kernels there.
OF_KERNELS = (
    "test_backward_uses_what_forward_used_and_a_value_set_later_counts",
    "test_in_a_fusion",
    "test_a_factor_that_a_neighbor_sets",
    "test_a_probability_that_a_neighbor_sets",
    "test_what_a_fusion_does_not_compute_set_by_a_neighbor",
)
TESTS = [*map(str, FILES), *(f"{ATTRIBUTES}::{name}" for name in OF_KERNELS)]
PARTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_under_the_interpreter(part: int) -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    result = subprocess.run(
        [*command, *TESTS[part::PARTS]],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
