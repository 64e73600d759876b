"""The files that OPFUSER_DUMP_DIR asks for."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from opfuser.core.fusion import Refusal
from opfuser.engine.plan import Plan
from opfuser.report.plan_json import plan_data
from tests.planning.toys import plan, rule


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPFUSER_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "dumps"


def stem(made: Plan, rank: int = 0) -> str:
    return f"rank{rank}_{os.getpid()}_plan{made.numbers[0]}"


def no(*parts: object, **kwargs: object) -> Refusal:
    return Refusal("SHAPE", "odd")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_plan_is_written_as_text_and_as_json_with_what_did_not_match(folder: Path) -> None:
    made = plan("ABC", rule("A B", name="ab"), rule("C", name="c", refuses=no))
    assert names(folder) == [f"{stem(made)}.json", f"{stem(made)}.txt"]
    assert (folder / f"{stem(made)}.txt").read_text("utf-8") == f"{made}\n"
    data = json.loads((folder / f"{stem(made)}.json").read_text("utf-8"))
    assert data == plan_data(made)
    assert data["schema"] == "opfuser.plan/1"
    ab, c = data["fusions"]
    assert (ab["status"], ab["matches"]) == ("matched", [[0, 1]])
    assert c["refusals"] == [{"at": 2, "code": "SHAPE", "detail": "odd"}]


def test_equal_plans_are_written_once(folder: Path) -> None:
    first, _, other = (plan(letters, rule("A B", name="ab")) for letters in ("AB", "AB", "ABA"))
    assert names(folder) == sorted(
        f"{stem(made)}{suffix}" for made in (first, other) for suffix in (".json", ".txt")
    )


def test_nothing_is_overwritten(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = plan("AB", rule("A B", name="ab"))
    theirs = folder / f"rank0_{os.getpid()}_plan{first.numbers[0] + 1}.txt"
    theirs.write_text("theirs")
    plan("ABA", rule("A B", name="ab"))
    assert theirs.read_text() == "theirs"
    (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert message.startswith(f"OPFUSER_DUMP_DIR={folder} cannot be written: ")
    assert theirs.name in message


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
    made = plan("AB", rule("A B", name="ab"))
    assert folder.exists() == written
    assert not written or f"{stem(made, int(rank))}.txt" in names(folder)


def test_ranks_that_are_none_are_told_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPFUSER_DUMP_RANKS", "first")
    plan("AB", rule("A B", name="ab"))
    plan("ABA", rule("A B", name="ab"))
    assert len(names(folder)) == 4
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


def test_without_the_variable_nothing_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPFUSER_DUMP_DIR")
    plan("AB", rule("A B", name="ab"))
    assert not folder.exists()
