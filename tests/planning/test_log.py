"""The lines of the log (hazard 18)."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import opfuser
from opfuser.core.fusion import Refusal, Requires
from opfuser.engine import plan_report
from opfuser.events import AttentionKernelTaken, Subscription, subscribe
from opfuser.recipe import Float8CurrentScaling
from tests.planning.toys import REGISTER, planned, rule

ROOT = Path(__file__).parents[2]
Lines = Callable[[], list[str]]


@pytest.fixture
def plan_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[plan_report.PlanLog]:
    """A log that knows of no plan yet."""
    own = plan_report.PlanLog()
    monkeypatch.setattr(plan_report, "log", own)
    caplog.set_level(logging.INFO, logger="opfuser")
    yield own
    own.close()


@pytest.fixture
def every_line(plan_log: plan_report.PlanLog, caplog: pytest.LogCaptureFixture) -> Lines:
    def lines() -> list[str]:
        mine = [r for r in caplog.records if r.name == "opfuser" and r.levelno == logging.INFO]
        caplog.clear()
        return [r.getMessage() for r in mine]

    return lines


@pytest.fixture
def log(every_line: Lines) -> Lines:
    """The lines about fusions of the tests."""
    return lambda: [line for line in every_line() if "fusion=test_" in line]


def test_every_fusion_is_logged_once_per_distinct_plan(log: Lines) -> None:
    no = Refusal("SHAPE", "odd")
    with (
        REGISTER["forward"](rule("A B", name="test_matched")),
        REGISTER["forward"](rule("C B", name="test_refused", refuses=lambda c, b, env: no)),
        REGISTER["forward"](rule("A C", name="test_skipped", requires=Requires(device="cuda"))),
        REGISTER["backward"](rule("A C", "backward", name="test_disabled", enabled=False)),
    ):
        planned("ABCB")
        assert log() == [
            "[stage=forward, fusion=test_matched] [SUMMARY] matches=1 refused=0",
            "[stage=forward, fusion=test_refused] [SUMMARY] matches=0 refused=1",
            "[stage=forward, fusion=test_refused] refused at 2: SHAPE: odd",
            "[stage=forward, fusion=test_skipped] skipped (needs cuda, have cpu)",
            "[stage=backward, fusion=test_disabled] disabled (default)",
        ]
        planned("ABCB")
        assert log() == [], "the same plan of another sequence is logged once"
        planned("ABAB")
        assert len(log()) == 4, "another plan is logged"


def test_equal_refusals_are_one_line(log: Lines) -> None:
    def refuses(b: object, *, env: opfuser.Env, behind: list[object]) -> Refusal:
        return Refusal("SHAPE", "odd") if len(behind) % 2 else Refusal("DTYPE", "wide")

    with REGISTER["forward"](rule("B", name="test_refused", refuses=refuses)):
        planned("B" * 20 + "A")
        head = "[stage=forward, fusion=test_refused]"
        assert log() == [
            f"{head} [SUMMARY] matches=0 refused=20",
            f"{head} refused at 0, 2, 4, 6, 8, 10, 12, 14 and 2 more: DTYPE: wide",
            f"{head} refused at 1, 3, 5, 7, 9, 11, 13, 15 and 2 more: SHAPE: odd",
        ]


def test_a_plan_begins_with_what_it_is_of(every_line: Lines) -> None:
    seq = opfuser.Sequential(opfuser.Identity(), opfuser.GELU())
    for x in (torch.ones(2), torch.ones(2, dtype=torch.float64)):
        seq(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        opfuser.Sequential(opfuser.Identity())(torch.ones(2))
    one, two = seq.plan(torch.ones(2)).numbers[0], seq.plan(torch.ones(2).double()).numbers[0]
    alone = "Identity (torch.float32, cpu, autocast torch.bfloat16, grad off)"
    assert [line for line in every_line() if "(torch.float" in line] == [
        f"[plan {one}] 2 operations, Identity to GELU (torch.float32, cpu, autocast off, grad on)",
        f"[plan {two}] 2 operations, Identity to GELU (torch.float64, cpu, autocast off, grad on)",
        f"[plan {two + 1}] 1 operation, {alone}",
    ]


def test_how_many_sequences_share_a_plan_is_logged_with_the_next_one(
    every_line: Lines, plan_log: plan_report.PlanLog
) -> None:
    def told() -> list[str]:
        return [line for line in every_line() if line.startswith("[plan ")]

    same = [opfuser.Sequential(opfuser.Identity()) for _ in range(4)]
    for seq in (*same, *same):
        seq(torch.ones(2))
    (first,) = told()
    number = first.split("]")[0]
    other = opfuser.Sequential(opfuser.Identity(), opfuser.Identity())
    other(torch.ones(2))
    counted, following = told()
    assert counted == f"{number}] 4 instances"
    assert "2 operations" in following
    same[0].eval()(torch.ones(2))
    plan_log.flush()
    assert told() == [], "another plan of the same sequence is no instance"
    opfuser.Sequential(opfuser.Identity())(torch.ones(2))
    plan_log.flush()  # as when the program ends
    assert told() == [f"{number}] 5 instances"]


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
def test_what_is_computed_otherwise_than_asked_is_logged_once_for_equal_reasons(
    every_line: Lines,
) -> None:
    seq = opfuser.Sequential(*(opfuser.Linear(32, 32) for _ in range(3)))
    with opfuser.autocast(recipe=Float8CurrentScaling(min_features=64)):
        seq(torch.ones(16, 32))
    (line,) = [line for line in every_line() if "high precision" in line]
    assert line.startswith(
        "op 0 (BasicLinear), op 2 (BasicLinear), op 4 (BasicLinear): high precision instead of "
        "Float8CurrentScaling; SHAPE: "
    )


def test_the_kernel_that_attention_took_is_logged_once(
    every_line: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    def taken() -> list[str]:
        return [line for line in every_line() if line.startswith("[attention]")]

    for _ in range(2):
        seq = opfuser.Sequential(opfuser.DotProductAttention(2, softcap=3.0))
        for length in (3, 4):
            seq(torch.ones(1, length, 12))
    (line,) = taken()
    assert line.startswith("[attention] DotProductAttention(2, 2, causal=True, ")
    assert "; cpu: it has no soft-capping; " in line
    assert "softcap=3.0): blockwise (not cudnn: " in line
    with caplog.at_level(logging.WARNING, logger="opfuser"):
        opfuser.Sequential(opfuser.DotProductAttention(1))(torch.ones(1, 4, 12))
        assert not AttentionKernelTaken.wanted, "who does not log, asks for nothing"
    assert taken() == []


def test_threads_that_plan_at_once_ask_for_events_once(
    plan_log: plan_report.PlanLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def slow(*args: Any, **kwargs: Any) -> Subscription:
        time.sleep(0.05)
        asked.append(subscribe(*args, **kwargs))
        return asked[-1]

    monkeypatch.setattr(plan_report, "subscribe", slow)
    threads = [Thread(target=plan_log.add, args=(planned(),)) for _ in range(4)]
    plan_log.close()
    asked.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1
    plan_log.close()
    assert not AttentionKernelTaken.wanted


def test_counts_are_logged_when_the_program_ends() -> None:
    code = """
import logging, sys, torch, opfuser
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
for _ in range(3):
    opfuser.Sequential(opfuser.Identity())(torch.ones(2))
"""
    command = [sys.executable, "-c", code]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert lines.splitlines()[-1] == "[plan 1] 3 instances"


def test_nothing_is_logged_without_the_level(log: Lines, caplog: pytest.LogCaptureFixture) -> None:
    with REGISTER["forward"](rule("A B", name="test_one")):
        with caplog.at_level(logging.WARNING, logger="opfuser"):
            planned()
            assert log() == []
        planned()
        assert len(log()) == 1, "a plan made before logging was on is still distinct"
