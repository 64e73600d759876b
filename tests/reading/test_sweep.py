"""The sweep over families counts what it finds, and says what is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from . import sweep


def test_nothing_is_wrong_or_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "count_of", lambda example: 3)
    counts: Counter[str] = Counter()
    assert list(sweep.swept("vit", counts, "training", mutants=True)) == []
    assert counts["mutants"] == 3
    assert list(sweep.swept("vit", counts, "with a cache", mutants=True)) == []
    assert counts["mutants"] == 3
    assert list(sweep.swept("opt", counts, "with a cache", mutants=True)) == []
    assert counts["mutants"] == 6
    assert counts["missed"] == 0
    assert counts["traces"] == counts["read whole"] + counts["read in part"] + counts["kept"]


def test_what_is_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*args: object) -> None:
        raise AssertionError("the output")

    monkeypatch.setattr(sweep, "assert_equal_steps", wrong)
    assert sweep.main(["gpt2", "--no-mutants"]) == 1
    monkeypatch.setattr(sweep, "assert_equal_steps", lambda *args: None)
    monkeypatch.setattr(sweep, "outcome_of", wrong)
    monkeypatch.setattr(sweep, "count_of", lambda example: 1)
    assert sweep.main(["gpt2"]) == 1
    assert sweep.main(["gpt2", "no such family", "--no-mutants"]) == 0
    told = capsys.readouterr().out
    assert "gpt2, h.0, evaluation: the output" in told
    assert "gpt2, h.0, training: clamp behind operation 0 is missed" in told
    assert "no such family: no tiny model: KeyError" in told
    assert told.splitlines()[-1].startswith("1 families, ")
