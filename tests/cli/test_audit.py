"""opfuser audit: findings as YAML, and nothing at all where there is nothing to fuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

MODELS = "tests.audit.ground_truth"
Command = Callable[..., Any]


def test_findings_are_printed_and_status_3(opfuser_command: Command) -> None:
    done = opfuser_command("audit", f"{MODELS}:WrittenNorms", "--input", "2x8x32")
    assert (done.status, done.err) == (3, "")
    read = yaml.safe_load(done.out)
    assert read["input"]["model"] == f"{MODELS}:WrittenNorms"
    assert {m["fused_op"] for m in read["missed_fusions"]} == {"rms_norm", "layer_norm"}


def test_findings_are_written(opfuser_command: Command, tmp_path: Path) -> None:
    file = tmp_path / "fusion_todo.yml"
    argv = "audit", f"{MODELS}:ResidualNorms", "--input", "2x8x32", "--write", str(file)
    done = opfuser_command(*argv)
    assert (done.status, done.out) == (3, f"{file}: 2 fused operations, 5 sites\n")
    assert len(yaml.safe_load(file.read_text(encoding="utf-8"))["missed_fusions"]) == 2


@pytest.mark.parametrize(("name", "shape"), [("fused", "2x8x32"), ("plain", "2x3x8x8")])
def test_nothing_to_fuse(opfuser_command: Command, tmp_path: Path, name: str, shape: str) -> None:
    file = tmp_path / "fusion_todo.yml"
    argv = "audit", f"{MODELS}:{name}", "--input", shape, "--write", str(file)
    assert opfuser_command(*argv) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_fails(opfuser_command: Command) -> None:
    done = opfuser_command("audit", f"{MODELS}:plain", "--input", "2x8x32")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("opfuser: The model has to run with inputs (2, 8, 32)")
    assert done.err.count("\n") == 1
