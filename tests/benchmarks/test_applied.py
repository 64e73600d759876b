"""The benchmark of what ``opfuser.hf.apply`` costs runs, and finds every layer computed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_benchmark_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "applied.json"
    command = [sys.executable, str(FOLDER / "applied.py"), "--layers", "2", "--repeats", "1"]
    subprocess.run([*command, "--json", str(out)], check=True)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["model"], row["layers"]) for row in rows] == [
        ("Llama", 2),
        ("GPT-2", 2),
        ("ViT", 2),
    ]
    assert all(row["apply_s"] > 0 and row["check_us"] > 0 for row in rows)
