"""The code that the documentation shows runs as it stands, without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPETS = sorted((ROOT / "docs" / "snippets").rglob("*.py"))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda path: path.stem)
def test_snippet_runs(snippet: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(snippet)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
