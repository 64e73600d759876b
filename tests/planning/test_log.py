"""The lines of the log (hazard 18)."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

import opfuser
from opfuser.engine import planning as plan_module
from opfuser.fusion import Fusion, Refusal, Requires
from tests.planning.toys import REGISTER, FusedForward, planned, rule


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    monkeypatch.setattr(plan_module, "_logged", set())
    caplog.set_level(logging.INFO, logger="opfuser")

    def lines() -> list[str]:
        mine = [r for r in caplog.records if r.name == "opfuser" and r.levelno == logging.INFO]
        caplog.clear()
        return [r.getMessage() for r in mine if "fusion=test_" in r.getMessage()]

    return lines


def test_every_fusion_is_logged_once_per_distinct_plan(log: Callable[[], list[str]]) -> None:
    no = Refusal("SHAPE", "odd")
    with (
        REGISTER["forward"](rule("A B", name="test_matched")),
        REGISTER["forward"](rule("C B", name="test_refused", refuses=lambda c, b, env: no)),
        REGISTER["forward"](rule("A C", name="test_skipped", requires=Requires(device="cuda"))),
        REGISTER["backward"](rule("A C", "backward", name="test_disabled", enabled=False)),
    ):
        planned("ABCB")
        lines = log()
        for line, name, counts in zip(
            lines, ("matched", "refused"), ("matches=1 refused=0", "matches=0 refused=1")
        ):
            assert line == f"[stage=forward, fusion=test_{name}] [SUMMARY] {counts}"
        assert lines[2:] == [
            "[stage=forward, fusion=test_skipped] skipped (needs cuda, have cpu)",
            "[stage=backward, fusion=test_disabled] disabled (default)",
        ]
        planned("ABCB")
        assert log() == [], "the same plan of another sequence is logged once"
        planned("ABAB")
        assert len(log()) == 4, "another plan is logged"


def test_nothing_is_logged_without_the_level(
    log: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    with REGISTER["forward"](rule("A B", name="test_one")):
        with caplog.at_level(logging.WARNING, logger="opfuser"):
            planned()
            assert log() == []
        planned()
        assert len(log()) == 1, "a plan made before logging was on is still distinct"


def test_a_call_logs_its_plan(log: Callable[[], list[str]]) -> None:
    one, two = (opfuser.Sequential(opfuser.Identity(), opfuser.Identity()) for _ in range(2))
    fusion = Fusion("test_identity", "forward", (opfuser.Identity, opfuser.Bias), FusedForward)
    with REGISTER["forward"](fusion):
        for seq in (one, two, one):
            seq(torch.ones(2))
        assert len(log()) == 1
