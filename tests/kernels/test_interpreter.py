"""Starts the numerics tests of the kernels under Triton's interpreter, in a process per file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NUMERICS = Path(__file__).parent / "numerics"
ROOT = NUMERICS.parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in NUMERICS.glob("test_*.py")))
def test_kernels_under_the_interpreter(name: str) -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, str(NUMERICS / f"{name}.py")],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
