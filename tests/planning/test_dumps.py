"""The files that OPFUSER_DUMP_DIR asks for."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import opfuser
from opfuser.engine import dumps
from opfuser.errors import PlanError
from opfuser.fusion import Refusal, Requires
from opfuser.op import FusibleOperation
from tests.planning.toys import A, B, ops, plan, rule


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for known in ("plans", "told"):
        monkeypatch.setattr(dumps._Written, known, set())
    monkeypatch.setenv("OPFUSER_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "dumps"


def names(folder: Path, suffix: str = ".json") -> list[str]:
    return sorted(path.name for path in folder.glob(f"*{suffix}"))


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / name).read_text("utf-8")) for name in names(folder)]


def no(*parts: object, **kwargs: object) -> Refusal:
    return Refusal("SHAPE", "odd")


def test_every_attempt_is_written_with_what_was_before_and_behind_it(folder: Path) -> None:
    made = plan(
        "ABC",
        rule("A B", name="ab"),
        rule("C", name="c", refuses=no),
        rule("C A", name="ca"),
        rule("A", name="skipped", requires=Requires(device="cuda")),
        rule("B C", "backward", name="bc"),
    )
    (number,) = made.numbers
    order = "forward_ab", "forward_c", "forward_ca", "forward_skipped", "backward_bc"
    stems = [f"{n:06}_rank0_plan{number}_{name}" for n, name in enumerate(order, 1)]
    assert names(folder) == [f"{stem}.json" for stem in stems]
    assert names(folder, ".txt") == [f"{stem}.txt" for stem in stems]
    first, refused, closest, skipped, backward = read(folder)
    single = [
        {"indices": [n], "operation": name, "covers": [name], "fusion": None}
        for n, name in enumerate("ABC")
    ]
    fused = {"indices": [0, 1], "operation": "FusedForward", "covers": ["A", "B"], "fusion": "ab"}
    assert first == {
        "schema": "opfuser.dump/1", "number": 1, "rank": 0, "plan": number,
        "fusion": "ab", "stage": "forward", "status": "matched", "detail": "",
        "matches": [[0, 1]], "refusals": [], "near_misses": [],
        "before": single, "after": [fused, single[2]],
        "env": {"dtype": "torch.float32", "device": "cpu", "autocast_dtype": None,
                "grad_enabled": True, "recipe": None},
        "operations": ["A()", "B()", "C()"],
    }  # fmt: skip
    assert refused["before"] == refused["after"] == first["after"]
    assert refused["refusals"] == [{"index": 2, "code": "SHAPE", "detail": "odd"}]
    assert closest["status"] == "unmatched"
    assert [near["stopped_by"]["code"] for near in closest["near_misses"]] == ["GROUP_SPLIT"]
    assert (skipped["status"], skipped["detail"]) == ("skipped", "needs cuda, have cpu")
    assert skipped["before"] == skipped["after"] == first["after"]
    assert backward["before"] == single, "each pass starts from the joint result"
    assert [step["fusion"] for step in backward["after"]] == [None, "bc"]


def test_the_text_says_the_same(folder: Path) -> None:
    made = plan("ABC", rule("A B", name="ab"), rule("C", name="c", refuses=no), rule("C A"))
    texts = [(folder / name).read_text("utf-8") for name in names(folder, ".txt")]
    about = f"plan {made.numbers[0]}, rank 0: torch.float32, cpu, autocast off, grad on"
    steps = ["  0-1       A() + B() -> FusedForward [ab]", "  2         C()"]
    assert texts[0].splitlines() == [
        "[stage=forward, fusion=ab] matched", about, "matched: 0-1",
        "before:", "  0         A()", "  1         B()", "  2         C()",
        "after:", *steps,
    ]  # fmt: skip
    assert texts[1].splitlines() == [
        "[stage=forward, fusion=c] refused", about, "refused at 2: SHAPE: odd",
        "before:", *steps, "after:", *steps,
    ]  # fmt: skip
    assert texts[2].splitlines()[2] == (
        "began: 1 of 2 at 2; GROUP_SPLIT: the run of operations ends where A is expected"
    )


def test_operations_are_written_with_their_arguments(folder: Path) -> None:
    on = opfuser.enable("backward_linear_add")  # the others are off in these tests
    with on, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        opfuser.Sequential(opfuser.Linear(4, 6))(torch.ones(2, 4))
    for found in read(folder):
        assert found["operations"] == ["BasicLinear(in_features=4, out_features=6)", "Bias(6)"]
        assert found["env"]["autocast_dtype"] == "torch.bfloat16"
        assert not found["env"]["grad_enabled"]
    history = [(info.name, info.stage) for info in opfuser.fusions()]
    assert [(found["fusion"], found["stage"]) for found in read(folder)] == history
    (one,) = [found for found in read(folder) if found["fusion"] == "backward_linear_add"]
    assert (one["status"], one["detail"]) == ("skipped", "no gradient is needed")


def test_equal_plans_are_written_once_and_others_behind_them(folder: Path) -> None:
    for letters in ("AB", "AB", "ABA"):
        plan(letters, rule("A B", name="ab"))
    assert [name[:6] for name in names(folder)] == ["000001", "000002"]
    assert [len(found["operations"]) for found in read(folder)] == [2, 3]


def test_numbers_go_on_and_nothing_is_overwritten(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    kept = folder / "000041_rank3_plan7_forward_older.json", folder / "99_note.txt"
    for path in kept:
        path.write_text("mine")
    made = plan("AB", rule("A B", name="ab"))
    assert names(folder)[-1] == f"000042_rank0_plan{made.numbers[0]}_forward_ab.json"
    # Another process writes between the look into the directory and the writing.
    following = f"000043_rank0_plan{made.numbers[0] + 1}_forward_ab.json"
    (folder / following).write_text("theirs")
    monkeypatch.setattr(dumps, "_last_number", lambda folder: 42)
    plan("ABA", rule("A B", name="ab"))
    assert (folder / following).read_text() == "theirs"
    assert names(folder)[-1].startswith("000044_rank0_")
    assert [path.read_text() for path in kept] == ["mine", "mine"]


@pytest.mark.parametrize(
    ("rank", "ranks", "written"),
    [("0", None, True), ("1", None, False), ("1", "all", True), ("2", "0, 2", True),
     ("1", "0,2", False)],
)  # fmt: skip
def test_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: str, ranks: str | None, written: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    if ranks is not None:
        monkeypatch.setenv("OPFUSER_DUMP_RANKS", ranks)
    plan("AB", rule("A B", name="ab"))
    assert folder.exists() == written
    assert all(f"_rank{rank}_" in name for name in names(folder) if written)


def test_ranks_that_are_none_are_told_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPFUSER_DUMP_RANKS", "first")
    plan("AB", rule("A B", name="ab"))
    plan("ABA", rule("A B", name="ab"))
    assert len(names(folder)) == 2
    message = "OPFUSER_DUMP_RANKS is 'all' or numbers such as '0,8', not 'first'"
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [message]


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "file" / "below"
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("OPFUSER_DUMP_DIR", str(place))
    for letters in ("AB", "ABA"):
        assert plan(letters, rule("A B", name="ab")).fused("forward") == {"ab": 1}
    (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert message.startswith(f"OPFUSER_DUMP_DIR={place} cannot be written: ")


def test_names_of_fusions_become_names_of_files(folder: Path) -> None:
    plan("AB", rule("A B", name="pkg/../mod:f.<locals>.g#2"))
    (name,) = names(folder)
    assert name.endswith("_forward_pkg-..-mod-f.-locals-.g-2.json")
    assert read(folder)[0]["fusion"] == "pkg/../mod:f.<locals>.g#2"


def test_what_was_tried_before_an_error_is_there(folder: Path) -> None:
    def breaks(given: Sequence[FusibleOperation], **kwargs: Any) -> list[FusibleOperation]:
        return list(given[:1])

    with pytest.raises(PlanError, match="breaks"):
        plan([A(), B()], rule("A B", name="ab", refuses=no), breaks)
    assert [found["fusion"] for found in read(folder)] == ["ab"]


def test_without_the_variable_nothing_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPFUSER_DUMP_DIR")
    plan(ops("AB"), rule("A B", name="ab"))
    assert not folder.exists()
