"""The benchmark of what FSDP2 adds to host time: all models compute the same, and it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"

COMPARE = """
import host_sharded
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for case in host_sharded.CASES[:1] + host_sharded.CASES[-1:]:
    steps = host_sharded.steps_of(case)
    bound = 0.05 if case.bf16 else 1e-5
    values = {name: step().float() for name, step in steps.items()}
    for name, value in values.items():
        torch.testing.assert_close(value, values["torch"], rtol=bound, atol=bound, msg=name)
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_all_models_compute_the_same() -> None:
    subprocess.run([sys.executable, "-c", COMPARE], check=True, cwd=FOLDER)


@pytest.mark.distributed
def test_the_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    command = [sys.executable, str(FOLDER / "host_sharded.py"), "--rounds", "1"]
    subprocess.run([*command, "--json", str(out)], check=True)
    rows = json.loads(out.read_text())["rows"]
    assert {(row["unit"], row["policy"], row["units"]) for row in rows} == {
        ("layer", "none", 6),
        ("block", "none", 12),
        ("layer", "bf16", 6),
        ("block", "bf16", 12),
    }
    assert all(row["opfuser_sharded_step_us"] > 0 for row in rows)
