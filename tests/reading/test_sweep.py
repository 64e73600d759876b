"""The sweep over families counts what it finds, and says what is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from . import sweep
from .mutations import mutants_of


def test_nothing_is_wrong_or_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "mutants_of", lambda example: mutants_of(example)[:3])
    counts: Counter[str] = Counter()
    assert list(sweep.swept("vit", counts, "training", (0, 1))) == []
    assert counts["mutants"] == 3
    assert list(sweep.swept("vit", counts, "with a cache", (0, 1))) == []
    assert counts["mutants"] == 3
    assert list(sweep.swept("opt", counts, "with a cache", (0, 1))) == []
    assert counts["mutants"] == 6
    assert counts["missed"] == 0
    assert counts["traces"] == counts["read whole"] + counts["read in part"] + counts["kept"]


def test_what_is_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*args: object) -> None:
        raise AssertionError("the output")

    def raises(*args: object) -> None:
        raise RuntimeError("permute")

    for name, error in (
        ("assert_equal_steps", wrong), ("assert_equal_steps", raises), ("read_of", raises),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(sweep, name, error)
            assert sweep.main(["gpt2", "--no-mutants"]) == 1
    monkeypatch.setattr(sweep, "assert_equal_steps", lambda *args: None)
    monkeypatch.setattr(sweep, "outcome_of", wrong)
    monkeypatch.setattr(sweep, "mutants_of", lambda example: mutants_of(example)[:1])
    assert sweep.main(["gpt2"]) == 1
    assert sweep.main(["gpt2", "no such family", "--no-mutants"]) == 0
    told = capsys.readouterr().out
    assert "gpt2, h.0, evaluation: AssertionError: the output" in told
    assert "gpt2, h.0, training: RuntimeError: permute" in told
    assert "gpt2, evaluation: RuntimeError: permute" in told  # no error of the family
    assert "gpt2, h.0, training: clamp behind operation 0 is missed: AssertionError" in told
    assert "no such family, evaluation: no tiny model: KeyError" in told
    assert "gpt2: 10 traces, " in told
    assert told.splitlines()[-1].startswith("1 families, ")


def test_parts_of_a_sweep_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(sweep, "outcome_of", lambda example, number, name: tried.append(number))
    monkeypatch.setattr(sweep, "mutants_of", lambda example: mutants_of(example)[:7])
    monkeypatch.setattr(sweep, "MODES", ("evaluation",))
    for part in range(3):
        assert sweep.main(["vit", f"--part={part}/3"]) == 0
    assert tried == [0, 3, 6, 1, 4, 2, 5]
