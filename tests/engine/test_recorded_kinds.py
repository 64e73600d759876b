"""How many kinds of calls of one plan are recorded, and which make way for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opfuser import GELU, DotProductAttention, Linear, Sequential
from opfuser.engine.recorded import specialized
from opfuser.engine.recorded.functions import NotRecordableError
from tests.engine.recorded_toys import passes

D = 8


def call(seq: Sequential, rows: int, times: int) -> None:
    for _ in range(times):
        with torch.no_grad():
            seq(torch.ones(rows, D))


def is_recorded(seq: Sequential, rows: int) -> bool:
    """Whether one more call with so many rows runs what was recorded."""
    with passes() as names:
        call(seq, rows, 1)
    return names == ["forward"]


def test_a_ninth_kind_replaces_the_one_that_was_unused_for_longest() -> None:
    seq = Sequential(Linear(D, D), GELU())
    for rows in range(1, 9):
        call(seq, rows, 2)
    assert all(is_recorded(seq, rows) for rows in (*range(1, 9), 1))  # 2 was unused for longest
    call(seq, 9, 16)
    assert not is_recorded(seq, 9), "it may not come again"
    assert all(is_recorded(seq, rows) for rows in (9, 1, *range(8, 2, -1)))
    for _ in range(2):
        assert not is_recorded(seq, 2), "no matter how often it came before"
    assert all(is_recorded(seq, rows) for rows in (9, 1, *range(8, 2, -1)))


def test_kinds_of_long_ago_are_forgotten() -> None:
    """So that not all that ever came are kept."""
    seq = Sequential(Linear(D, D), GELU())
    for rows in range(1, 70):
        call(seq, rows, 1)
    assert [is_recorded(seq, 1) for _ in range(3)] == [False, False, True]


def test_ever_other_shapes_are_hardly_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    seq, made = Sequential(Linear(D, D), GELU()), []
    add = specialized.Specializations.add

    def counted(*args: Any) -> Any:
        made.append(args)
        return add(*args)

    monkeypatch.setattr(specialized.Specializations, "add", counted)
    for _ in range(50):
        for rows in range(1, 13):
            call(seq, rows, 1)
    assert len(made) == 8 + 3 * 4, "after 17, 34 and 50 rounds"


def test_a_kind_that_was_refused_is_not_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors among keywords are part of the kind."""
    seq, tried = Sequential(DotProductAttention(1)), []

    def refuse(*args: Any) -> Any:
        tried.append(args)
        raise NotRecordableError("for this test")

    monkeypatch.setattr(specialized, "guard_of_call", refuse)
    with torch.no_grad():
        for _ in range(5):
            mask = torch.ones(1, 2, dtype=torch.bool)
            seq(torch.ones(1, 2, 3 * D), op_kwargs={0: {"mask": mask}})
    assert len(tried) == 1
