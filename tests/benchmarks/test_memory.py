"""The bytes that blocks save, and the benchmark that counts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import memory

SWIGLU, LAYER, GPT = memory.BLOCKS


def units(block: str, size: memory.Size) -> dict[str, float]:
    found = memory.contest(block, size, compile_too=False)
    return {name: memory.units(own, size) for name, own in found.items()}


SIZES = [memory.small("fp32", length=16), memory.small("bf16", length=16), memory.LARGE]
each_size = pytest.mark.parametrize("size", SIZES, ids=str)


@each_size
def test_swiglu_block(size: memory.Size) -> None:
    got = units(SWIGLU, size)
    assert 8.0 <= got[memory.OURS] <= 8.1
    assert 1.0 <= got[memory.RECOMPUTED] <= 1.2
    assert round(got[memory.TORCH]) == (17 if size.dtype == "fp32" else 19)


@each_size
def test_gpt_block(size: memory.Size) -> None:
    """Input and statistics of the norm, and the input of GELU without its bias."""
    got = units(GPT, size)
    assert 5.0 <= got[memory.OURS] <= 5.1
    assert 1.0 <= got[memory.RECOMPUTED] <= 1.2
    assert 10.0 <= got[memory.TORCH] <= 10.1


@pytest.mark.parametrize("size", SIZES[:2], ids=str)
def test_attention_and_swiglu_block(size: memory.Size) -> None:
    """On top of the SwiGLU block: input of the norm; q, k, v; attention's output and statistics."""
    attention = 1 + 1.5 + 1 + 4 / torch.finfo(memory.DTYPES[size.dtype]).bits * 8 * 8 / size.dim
    got = units(LAYER, size)
    assert got[memory.OURS] == pytest.approx(8 + attention, abs=0.05)
    assert got[memory.RECOMPUTED] == pytest.approx(1 + attention, abs=0.05)


def test_what_is_left_out_and_what_counts_once() -> None:
    size = memory.small("fp32", dim=16, length=4)
    weight = torch.nn.Parameter(torch.ones(16, 16))

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.weight  # saves x and the weight
            return y.view(-1) * y.view(-1)  # saves y twice

    found = memory.items(Twice(), size)
    assert [(item.made_by, item.bytes) for item in found] == [("input", 512), ("mm", 512)]
    assert memory.units(found, size) == 2.0


def test_the_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "memory.json", tmp_path / "memory.md"
    sizes = ["--dim", "64", "--length", "8", "--no-compile"]
    memory.main([*sizes, "--json", str(files[0]), "--markdown", str(files[1])])
    printed = capsys.readouterr().out
    assert printed == files[1].read_text()
    rows = json.loads(files[0].read_text())["rows"]
    assert [(row["block"], row["device"]) for row in rows] == [
        *[(block, "cpu") for _ in range(2) for block in memory.BLOCKS],
        (SWIGLU, "meta"),
        (GPT, "meta"),
    ]
    for row in rows:
        for name, value in row["units"].items():
            saved = sum(item["bytes"] for item in row["saved"][name])
            assert value == saved / row["unit_bytes"]
            assert f"| {value:.2f} |" in printed
