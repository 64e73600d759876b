"""``opfuser bench``: who runs how often, what is measured, and what is printed; not how fast."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.report.bench import bench
from opfuser.report.target import Target

MODELS = "tests.cli.models"
Command = Callable[..., Any]


class Noting(nn.Module):
    """Notes for each call whether fusions are on, and whether gradients are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = opfuser.Sequential(opfuser.RMSNorm(16), opfuser.Linear(16, 16))
        self.calls: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        fused = "norm_linear" in self.inner.last_plan.fused("forward")
        self.calls.append((fused, torch.is_grad_enabled()))
        return y


def test_contestants_take_turns() -> None:
    model, before = Noting(), opfuser.fusions()
    found = bench(Target("noting", model, (torch.randn(2, 16),)), samples=3)
    assert [c.name for c in found.contestants] == ["fused", "unfused"]
    assert found.backward
    each = found.steps + 1  # and one that is not timed
    turns = [fused for fused, _ in model.calls[-4 * each :]]
    assert turns == ([True] * each + [False] * each) * 2
    assert all(recorded for _, recorded in model.calls)
    assert all(t.grad is not None for t in model.parameters())
    assert opfuser.fusions() == before


def test_forward_alone_records_nothing() -> None:
    model = Noting()
    found = bench(Target("noting", model, (torch.randn(2, 16),)), samples=1, forward_only=True)
    assert not found.backward
    assert {recorded for _, recorded in model.calls} == {False}
    assert [c.saved for c in found.contestants] == [0, 0]
    assert all(t.grad is None for t in model.parameters())


def test_saved_bytes_are_measured() -> None:
    x = torch.randn(2, 16, requires_grad=True)
    fused, unfused = bench(Target("noting", Noting(), (x,)), samples=1).contestants
    rows, rstd = 2 * 16 * 4, 2 * 4
    assert (fused.saved, unfused.saved) == (rows + rstd, 2 * rows + rstd)
    assert fused.peak is None or fused.peak > 0


def test_a_contestant_that_fails_ends_nothing(
    opfuser_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: nn.Module) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            raise RuntimeError("there is no compiler")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    argv = "bench", f"{MODELS}:mlp", "--steps", "2", "--compile", "--device", "cpu"
    done = opfuser_command(*argv)
    assert done.status == 1  # a call that fails is a command that fails
    head, *lines = done.out.splitlines()
    assert head == "tests.cli.models:mlp, inputs 2x3x16:float32"
    assert f"torch {torch.__version__}" in lines[0]
    assert lines[1].startswith("forward and backward, 2 samples of ")
    names = [line.split("  ")[0] for line in lines[3:]]
    assert names[1:3] == ["fused", "unfused"]
    assert lines[-1] == "torch.compile failed: RuntimeError: there is no compiler"


def test_where_nothing_is_fused_nothing_is_compared(opfuser_command: Command) -> None:
    argv = "bench", f"{MODELS}:mlp", "--steps", "2", "--device", "cpu"
    with opfuser.disable("*"):
        done = opfuser_command(*argv)
        found = json.loads(opfuser_command(*argv, "--format", "json").out)
    assert done.status == 0
    *_, row, last = done.out.splitlines()
    assert (row.split()[0], last) == (
        "unfused",
        "Nothing is fused, so that there is nothing to compare.",
    )
    assert "\nfused " not in done.out
    assert (found["fused_steps"], [c["name"] for c in found["contestants"]]) == (0, ["unfused"])


def test_fused_steps_are_those_of_the_calls_that_are_timed() -> None:
    x = torch.randn(2, 16, requires_grad=True)
    both = bench(Target("noting", Noting(), (x,)), samples=1)
    forward = bench(Target("noting", Noting(), (x,)), samples=1, forward_only=True)
    assert (both.fused_steps, forward.fused_steps) == (2, 1)


def test_json(opfuser_command: Command) -> None:
    argv = "bench", f"{MODELS}:mlp", "--steps", "1", "--device", "cpu", "--format", "json"
    found = json.loads(opfuser_command(*argv).out)
    assert found["schema"] == "opfuser.bench/1"
    assert found["machine"]["torch"] == torch.__version__
    low, median, high = (found["contestants"][0]["seconds"][n] for n in ("low", "median", "high"))
    assert 0 < low == median == high


@pytest.mark.gpu
def test_peak_memory_on_a_gpu(opfuser_command: Command) -> None:
    argv = "bench", f"{MODELS}:mlp", "--steps", "2", "--format", "json"
    found = json.loads(opfuser_command(*argv).out)
    assert found["machine"]["device"] == torch.cuda.get_device_name()
    assert all(c["peak"] > 0 and c["saved"] > 0 for c in found["contestants"])
