"""The benchmark of host overhead: both sides of a case compute the same, and it runs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> tuple:
    monkeypatch.syspath_prepend(str(FOLDER))
    host_models = importlib.import_module("host_models")
    return host_models.CASES


def test_both_sides_compute_the_same(cases: tuple) -> None:
    for case in cases:
        ours, theirs, inputs = case.build(torch.device("cpu"))
        torch.testing.assert_close(ours(*inputs), theirs(*inputs), atol=1e-5, rtol=1e-5)


def test_the_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    command = [sys.executable, str(FOLDER / "host_overhead.py"), "--rounds", "1"]
    subprocess.run([*command, "--only", "LayerNorm", "--json", str(out)], check=True)
    rows = json.loads(out.read_text())["rows"]
    assert {row["pass"] for row in rows} == {"forward, no grad", "forward + backward"}
    assert all(row["case"] == "LayerNorm" and row["ratio"] > 0 for row in rows)


def test_the_benchmark_of_recipes_runs() -> None:
    command = [sys.executable, str(FOLDER / "host_recipes.py"), "--rounds", "2"]
    sizes = ["--features", "128", "--tokens", "8"]
    run = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True)
    names = [line.split()[0] for line in run.stdout.splitlines()]
    assert names == ["recipe", "without", "delayed", "predicted", "current", "blocks"]
