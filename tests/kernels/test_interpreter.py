"""Starts tests of kernels under Triton's interpreter, in a process per file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [*sorted(Path(__file__).parent.glob("numerics/test_*.py"))]
ATTRIBUTES = ROOT / "tests" / "basic" / "test_attributes.py"
FILES.append(ATTRIBUTES)
# What depends on kernels there.
SOME = ["-k", "later_counts or in_a_fusion or neighbor"]


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_under_the_interpreter(path: Path) -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    result = subprocess.run(
        [*command, str(path), *(SOME if path == ATTRIBUTES else [])],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
