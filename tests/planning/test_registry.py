"""Registering, removing and switching fusions (hazard 20)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import opfuser
from opfuser.core.fusion import Refusal, Requires
from opfuser.errors import FusionError, UnknownFusionError
from opfuser.registry import FusionHandle, registry
from opfuser.registry.handles import Registry
from tests.planning.toys import REGISTER, A, B, Fused, planned, rule

ROOT = Path(__file__).parents[2]


def names() -> list[str]:
    return [info.name for info in opfuser.fusions() if info.origin == "user"]


def state(name: str = "rule") -> str:
    """What the record of a plan made now says."""
    record = planned().record(name)
    return f"{record.status} {record.detail}".strip()


def off() -> list[str]:
    return [info.name for info in opfuser.fusions() if info.name in "xyz" and not info.enabled]


@pytest.fixture
def three() -> Iterator[None]:
    with (
        REGISTER["forward"](rule("A B", name="x")),
        REGISTER["forward"](rule("A B", name="y")),
        REGISTER["forward"](rule("A B", name="z")),
    ):
        yield


@pytest.mark.parametrize("stage", REGISTER)
def test_a_handle_removes_its_fusion(stage: Any) -> None:
    handle = REGISTER[stage](rule("A B", stage))
    assert names() == ["rule"]
    assert state() == "matched"
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


@pytest.mark.parametrize("stage", REGISTER)
def test_prepend(stage: Any) -> None:
    """In front of those registered before, and of the library's."""
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
        assert next(i.name for i in opfuser.fusions() if i.stage == stage) == "third"


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


# Names.


def _pairs(ops: Sequence[Any]) -> list[Any]:
    return list(ops)


def test_default_names() -> None:
    with REGISTER["forward"](_pairs) as one, REGISTER["backward"](_pairs) as two:
        assert one.name == f"{__name__}:_pairs"
        assert two.name == f"{__name__}:_pairs#2"
    with REGISTER["forward"](_pairs, name="mine") as handle:
        assert handle.name == "mine"


@pytest.mark.parametrize(
    ("stage", "function", "name", "text"),
    [
        *((stage, _pairs, "rule", r"a second fusion named 'rule'.*choose another name")
          for stage in REGISTER),
        ("backward", rule("A B", name="other"), None,
         r"fusion 'other'.*Received: stage 'forward', registered as 'backward'.*of the forward st"),
        ("forward", 3, None, r"a function of a list of operations. Received: 3"),
    ],
)  # fmt: skip
def test_errors_of_registering(stage: Any, function: Any, name: str | None, text: str) -> None:
    with REGISTER["forward"](rule("A B")):
        with pytest.raises(FusionError, match=text):
            REGISTER[stage](function, name=name)
        assert names() == ["rule"]


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


# Switching: the handle, then blocks, of which the last one counts.


@pytest.mark.parametrize("enabled", [True, False])
def test_handles_and_blocks_switch_a_fusion(enabled: bool) -> None:
    by_default = "matched" if enabled else "disabled default"
    with REGISTER["forward"](rule("A B", enabled=enabled)) as handle:
        assert state() == by_default
        with opfuser.disable("rule"):
            assert state() == "disabled opfuser.disable"
            with opfuser.enable("rule"):
                assert state() == "matched"
            assert state() == "disabled opfuser.disable"
        switch = opfuser.enable("rule")  # without a block it stays
        assert state() == "matched"
        switch.__exit__()
        assert state() == by_default
        version = registry.version
        handle.enabled = not enabled
        assert registry.version != version
        assert state() == ("disabled handle" if enabled else "matched")


@pytest.mark.usefixtures("three")
def test_all_off_but_one() -> None:
    with opfuser.disable("*"):
        assert planned().fused("forward") == {}
        with opfuser.enable("y"):
            assert planned().fused("forward") == {"y": 1}


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("switch", [opfuser.disable, opfuser.enable])
def test_an_unknown_name_is_an_error_and_changes_nothing(switch: Any) -> None:
    with opfuser.disable("z"):
        with pytest.raises(UnknownFusionError, match=r"Received: 'xx'.*Choose among: .*x") as error:
            switch("x", "xx", "z")
        assert "y" not in str(error.value).rpartition("among: ")[2]
        assert isinstance(error.value, KeyError)
        assert off() == ["z"]


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
def test_switching_again_and_again() -> None:
    """That nothing piles up: test_config.py, of configurations, which are kept alike."""
    held = opfuser.disable("z")
    for _ in range(10):
        opfuser.disable("x", "y")
        opfuser.enable("y")
        with opfuser.disable("y"):
            pass
    assert off() == ["x", "z"]
    held.__exit__()
    opfuser.enable("x")
    assert off() == []


@pytest.mark.usefixtures("three")
def test_threads_that_switch_at_once_undo_their_own_change() -> None:
    def switch() -> None:
        for _ in range(2000):
            with opfuser.disable("x"):
                pass

    before, interval = registry.version, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=switch) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert off() == []
    assert registry.version == before + 2 * 2000 * 8, "each change is one that calls notice"


# The environment.


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("disable", "enable", "expected"),
    [
        ("", "", ["", "", "default"]),
        ("x, y", "", ["OPFUSER_DISABLE", "OPFUSER_DISABLE", "default"]),
        ("*", "y,off", ["OPFUSER_DISABLE", "", ""]),
        ("y", "y", ["", "", "default"]),
    ],
)
def test_switches_of_the_environment(
    disable: str, enable: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPFUSER_DISABLE", disable)
    monkeypatch.setenv("OPFUSER_ENABLE", enable)
    with REGISTER["forward"](rule("A B", name="off", enabled=False)):
        monkeypatch.setattr(registry, "switched", Registry().switched)
        found = {info.name: info.disabled_by for info in opfuser.fusions()}
        assert [found[name] for name in ("x", "y", "off")] == expected
        for name in ("x", "y", "off"):
            if found[name]:
                assert state(name) == f"disabled {found[name]}"
        with opfuser.enable("x"):  # a block has the last word
            assert planned().fused("forward") == {"x": 1}


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
