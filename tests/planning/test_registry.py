"""Registering, removing and switching fusions, and the lines of the log."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import opfuser
from opfuser import plan as plan_module
from opfuser.errors import FusionError, UnknownFusionError
from opfuser.fusion import Fusion, Refusal, Requires
from opfuser.plan import Plan
from opfuser.registry import FusionHandle, registry
from tests.planning.toys import BUILD, NEEDED, A, B, Fused, env, make_plan, ops, rule

ROOT = Path(__file__).parents[2]

REGISTER: dict[str, Callable[..., FusionHandle]] = {
    "forward": opfuser.register_forward_fusion,
    "backward": opfuser.register_backward_fusion,
    "joint": opfuser.register_forward_backward_fusion,
}


def planned(letters: str = "AB") -> Plan:
    count = len(letters)
    return make_plan(ops(letters), env(count), (NEEDED,) * count, registry)


def names() -> list[str]:
    return [info.name for info in opfuser.fusions() if info.origin == "user"]


@pytest.mark.parametrize("stage", REGISTER)
def test_a_handle_removes_its_fusion(stage: Any) -> None:
    handle = REGISTER[stage](rule("A B", stage))
    assert names() == ["rule"]
    assert planned().record("rule").status == "matched"
    handle.remove()
    handle.remove()
    assert names() == []
    with pytest.raises(KeyError):
        planned().record("rule")


def test_a_handle_is_a_context_manager() -> None:
    with REGISTER["forward"](rule("A B")) as handle:
        assert isinstance(handle, FusionHandle)
        assert repr(handle) == "FusionHandle('rule', stage='forward', enabled=True)"
        assert names() == ["rule"]
    assert names() == []
    with pytest.raises(ZeroDivisionError), REGISTER["forward"](rule("A B")):
        raise ZeroDivisionError
    assert names() == []


def test_a_handle_switches_its_fusion() -> None:
    with REGISTER["forward"](rule("A B")) as handle:
        version = registry.version
        handle.enabled = False
        assert registry.version != version
        record = planned().record("rule")
        assert (record.status, record.detail) == ("disabled", "handle")
        handle.enabled = True
        assert planned().record("rule").status == "matched"


@pytest.mark.parametrize("stage", REGISTER)
def test_prepend(stage: Any) -> None:
    with (
        REGISTER[stage](rule("A B", stage, name="first")),
        REGISTER[stage](rule("A B", stage, name="second")),
        REGISTER[stage](rule("A B", stage, name="third"), prepend=True),
    ):
        assert names() == ["third", "first", "second"]
        assert [(r.name, r.status) for r in planned().history if r.name in names()] == [
            ("third", "matched"),
            ("first", "unmatched"),
            ("second", "unmatched"),
        ]


def test_prepended_fusions_come_before_the_built_in_ones() -> None:
    with REGISTER["forward"](rule("A B"), prepend=True):
        forward = [info.name for info in opfuser.fusions() if info.stage == "forward"]
        assert forward[0] == "rule"


def test_fusions_lists_stages_in_the_order_in_which_they_run() -> None:
    with (
        REGISTER["backward"](rule("A", "backward", name="c")),
        REGISTER["forward"](rule("A", name="b", requires=Requires(device="cuda"))),
        REGISTER["joint"](rule("A", "joint", name="a", enabled=False)),
    ):
        mine = [info for info in opfuser.fusions() if info.origin == "user"]
        assert [(i.name, i.stage, i.enabled, bool(i.disabled_by)) for i in mine] == [
            ("a", "joint", False, True),
            ("b", "forward", True, False),
            ("c", "backward", True, False),
        ]
        assert mine[1].requires == Requires(device="cuda")


# ---------------------------------------------------------------------- names


def _pairs(ops: Sequence[Any]) -> list[Any]:
    return list(ops)


def test_default_names() -> None:
    with REGISTER["forward"](_pairs) as one, REGISTER["backward"](_pairs) as two:
        assert one.name == f"{__name__}:_pairs"
        assert two.name == f"{__name__}:_pairs#2"
    with REGISTER["forward"](_pairs, name="mine") as handle:
        assert handle.name == "mine"


@pytest.mark.parametrize("stage", REGISTER)
def test_a_name_is_taken_once_over_all_stages(stage: Any) -> None:
    with (
        REGISTER["forward"](rule("A B")),
        pytest.raises(FusionError, match=r"a second fusion named 'rule'.*choose another name"),
    ):
        REGISTER[stage](_pairs, name="rule")
    assert names() == []


def test_a_fusion_registered_for_another_stage_is_an_error() -> None:
    with pytest.raises(FusionError) as error:
        REGISTER["backward"](rule("A B"))
    assert "fusion 'rule'" in str(error.value)
    assert "Received: stage 'forward', registered as 'backward'" in str(error.value)
    assert "Use the register function of the forward stage" in str(error.value)


def test_something_that_cannot_be_called_is_an_error() -> None:
    with pytest.raises(FusionError, match=r"a function of a list of operations. Received: 3"):
        REGISTER["forward"](3)


def test_the_decorator_registers_the_class() -> None:
    refusal = Refusal("SHAPE", "odd")

    @opfuser.fusion(stage="joint", pattern=(A, B))
    class Mine(Fused):
        pass

    @opfuser.fusion(
        stage="forward", pattern=(A,), name="theirs", refuses=lambda a, env: refusal, prepend=True
    )
    class Theirs(Fused):
        pass

    with Mine.handle, Theirs.handle:
        assert Mine.handle.name == f"{__name__}:{Mine.__qualname__}"
        made = planned("ABA")
        assert type(made.forward[0].op) is Mine
        assert made.record("theirs").refusals == ((2, refusal),)
    assert names() == []


# ---------------------------------------------------------------------- switching


def test_disable_ends_with_its_block() -> None:
    with REGISTER["forward"](rule("A B")):
        with opfuser.disable("rule"):
            record = planned().record("rule")
            assert (record.status, record.detail) == ("disabled", "opfuser.disable")
            with opfuser.enable("rule"):
                assert planned().record("rule").status == "matched"
            assert planned().record("rule").status == "disabled"
        assert planned().record("rule").status == "matched"


def test_disable_without_a_block_stays() -> None:
    with REGISTER["forward"](rule("A B")):
        switch = opfuser.disable("rule")
        assert planned().record("rule").status == "disabled"
        switch.__exit__()
        assert planned().record("rule").status == "matched"


def test_enable_overrides_the_default_and_the_handle() -> None:
    with REGISTER["forward"](rule("A B", enabled=False)) as handle:
        assert planned().record("rule").status == "disabled"
        with opfuser.enable("rule"):
            assert planned().record("rule").status == "matched"
        handle.enabled = True
        assert planned().record("rule").status == "matched"


def test_all_off_but_one() -> None:
    with (
        REGISTER["forward"](rule("A B", name="one")),
        REGISTER["forward"](rule("A B", name="two")),
        opfuser.disable("*"),
    ):
        assert planned().fused("forward") == {}
        with opfuser.enable("two"):
            assert planned().fused("forward") == {"two": 1}


@pytest.mark.parametrize("switch", [opfuser.disable, opfuser.enable])
def test_an_unknown_name_is_an_error_and_changes_nothing(switch: Any) -> None:
    with REGISTER["forward"](rule("A B")):
        before = dict(registry.switched)
        with pytest.raises(UnknownFusionError) as error:
            switch("rule", "rul")
        assert "Received: 'rul'" in str(error.value)
        assert "Choose among:" in str(error.value)
        assert "rule" in str(error.value).split("Choose among:")[1]
        assert isinstance(error.value, KeyError)
        assert registry.switched == before


ENVIRONMENT = """
import logging, opfuser
from opfuser.fusion import Fusion
from opfuser.op import BasicOperation, FusedOperation
class A(BasicOperation): pass
for name, enabled in (("one", True), ("two", True), ("off", False)):
    opfuser.register_forward_fusion(Fusion(name, "forward", (A,), FusedOperation, enabled=enabled))
print([(i.name, i.disabled_by) for i in opfuser.fusions() if i.origin == "user"])
"""


@pytest.mark.parametrize(
    ("disable", "enable", "expected"),
    [
        ("", "", [("one", ""), ("two", ""), ("off", "handle")]),
        (
            "one, two",
            "",
            [("one", "OPFUSER_DISABLE"), ("two", "OPFUSER_DISABLE"), ("off", "handle")],
        ),
        ("*", "two,off", [("one", "OPFUSER_DISABLE"), ("two", ""), ("off", "")]),
    ],
)
def test_switches_of_the_environment(
    disable: str, enable: str, expected: list[tuple[str, str]]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENVIRONMENT],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OPFUSER_DISABLE": disable,
            "OPFUSER_ENABLE": enable,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(expected)


# ---------------------------------------------------------------------- log


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
        assert lines[0].startswith(
            "[stage=forward, fusion=test_matched] [SUMMARY] matches=1 refused=0 time="
        )
        assert lines[0].endswith("ms")
        assert lines[1].startswith(
            "[stage=forward, fusion=test_refused] [SUMMARY] matches=0 refused=1 time="
        )
        assert lines[2:] == [
            "[stage=forward, fusion=test_skipped] skipped (needs cuda, have cpu)",
            "[stage=backward, fusion=test_disabled] disabled (handle)",
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
    fusion = Fusion("test_identity", "forward", (opfuser.Identity, opfuser.Bias), BUILD["forward"])
    with REGISTER["forward"](fusion):
        for seq in (one, two, one):
            seq(torch.ones(2))
        assert len(log()) == 1
