"""Registering, removing and switching fusions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import opfuser
from opfuser.engine.plan import Plan
from opfuser.errors import FusionError, UnknownFusionError
from opfuser.fusion import Refusal, Requires
from opfuser.registry import FusionHandle, Registry, registry
from tests.planning.toys import NEEDED, A, B, Fused, env, make_plan, ops, rule

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


@pytest.mark.parametrize(
    ("disable", "enable", "expected"),
    [
        ("", "", {"one": "", "two": "", "off": "handle"}),
        ("one, two", "", {"one": "OPFUSER_DISABLE", "two": "OPFUSER_DISABLE", "off": "handle"}),
        ("*", "two,off", {"one": "OPFUSER_DISABLE", "two": "", "off": ""}),
        ("two", "two", {"one": "", "two": "", "off": "handle"}),
    ],
)
def test_switches_of_the_environment(
    disable: str, enable: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPFUSER_DISABLE", disable)
    monkeypatch.setenv("OPFUSER_ENABLE", enable)
    with (
        REGISTER["forward"](rule("A B", name="one")),
        REGISTER["forward"](rule("A B", name="two")),
        REGISTER["forward"](rule("A B", name="off", enabled=False)),
    ):
        monkeypatch.setattr(registry, "switched", Registry().switched)
        found = {info.name: info.disabled_by for info in opfuser.fusions()}
        assert {name: found[name] for name in expected} == expected
        for record in planned().history:
            if expected.get(record.name):
                assert (record.status, record.detail) == ("disabled", expected[record.name])
        if expected["one"] and expected["two"]:
            with opfuser.enable("one"):  # a block has the last word
                assert planned().fused("forward") == {"one": 1}


def test_the_environment_is_read_at_import() -> None:
    name = "forward_linear_bias_add"
    code = (
        f"import opfuser; print([i.disabled_by for i in opfuser.fusions() if i.name == '{name}'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPFUSER_DISABLE": name},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "['OPFUSER_DISABLE']"


def test_a_name_in_the_environment_that_nobody_has_is_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at import: the fusion may be registered later."""
    monkeypatch.setenv("OPFUSER_DISABLE", "liner_bias,*")
    monkeypatch.setattr(registry, "switched", Registry().switched)
    for _ in range(2):
        opfuser.Sequential(opfuser.Identity())(torch.ones(2))
    texts = [r.getMessage() for r in caplog.records if "liner_bias" in r.getMessage()]
    assert texts == ["OPFUSER_DISABLE names 'liner_bias', but no fusion has that name"]


def off() -> list[str]:
    return [info.name for info in opfuser.fusions() if info.name in "xyz" and not info.enabled]


@pytest.fixture
def three() -> Any:
    with (
        REGISTER["forward"](rule("A B", name="x")),
        REGISTER["forward"](rule("A B", name="y")),
        REGISTER["forward"](rule("A B", name="z")),
    ):
        yield


@pytest.mark.usefixtures("three")
def test_switches_that_end_out_of_order_undo_their_own_change() -> None:
    a = opfuser.disable("x")
    b = opfuser.disable("y")
    c = opfuser.enable("x")
    assert off() == ["y"]
    a.__exit__()
    assert off() == ["y"]
    c.__exit__()
    assert off() == ["y"]
    b.__exit__()
    b.__exit__()
    assert off() == []


@pytest.mark.usefixtures("three")
def test_what_is_switched_for_good_inside_a_block_stays() -> None:
    with opfuser.disable("x"):
        opfuser.disable("y")
        with opfuser.disable("z"):
            opfuser.enable("z")
        assert off() == ["x", "y"]
    assert off() == ["y"]
    opfuser.enable("y")
    assert off() == []


@pytest.mark.usefixtures("three")
def test_a_block_that_begins_before_another_one_and_ends_inside_it() -> None:
    first = opfuser.disable("x", "y")
    with opfuser.enable("y"):
        first.__exit__()
        assert off() == []
        with opfuser.disable("y"):
            assert off() == ["y"]
        assert off() == []
    assert off() == []


@pytest.mark.usefixtures("three")
def test_switching_again_and_again_piles_nothing_up() -> None:
    held = opfuser.disable("z")
    for _ in range(10):
        opfuser.disable("x", "y")
        opfuser.enable("y")
        with opfuser.disable("y"):
            pass
    assert off() == ["x", "z"]
    assert len(registry._switches) <= 4
    held.__exit__()
    opfuser.enable("x")
    assert off() == []
