"""The benchmark of torch.compile runs, and both sides are traced equally often."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compiled_cpu.py"


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "compiled.json"
    command = [sys.executable, str(SCRIPT), "--rounds", "0", "--traces", "1", "--only", "GPT block"]
    subprocess.run([*command, "--json", str(out)], check=True)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["opfuser_trace_s"] > 0
    assert row["opfuser_graphs"] == row["torch_nn_graphs"]
