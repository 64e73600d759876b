"""How many kinds of calls of one plan are recorded, and which make way for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opfuser import GELU, DotProductAttention, Linear, Sequential
from opfuser.engine.program import Program
from opfuser.engine.recorded import specialized
from opfuser.engine.recorded.functions import NotRecordableError

D = 8


def call(seq: Sequential, rows: int, times: int) -> None:
    for _ in range(times):
        with torch.no_grad():
            seq(torch.ones(rows, D))


def recorded(seq: Sequential) -> list[int]:
    """The rows of the calls that are recorded, the latest first."""
    (program,) = seq._module_groups[0]._programs.values()
    assert isinstance(program, Program)
    found = program.specializations.found
    parameters = seq._module_groups[0]._read_parameters()
    of_rows = {rows: torch.ones(rows, D) for rows in range(1, 40)}
    with torch.no_grad():
        return [
            rows
            for special in found
            for rows, x in of_rows.items()
            if special.guard(x, parameters, (), ())
        ]


def test_a_ninth_kind_replaces_the_one_that_was_unused_for_longest() -> None:
    seq = Sequential(Linear(D, D), GELU())
    for rows in range(1, 9):
        call(seq, rows, 2)
    assert recorded(seq) == list(range(8, 0, -1))
    call(seq, 1, 1)  # so that 2 was unused for longest
    call(seq, 9, 16)
    assert 9 not in recorded(seq), "it may not come again"
    call(seq, 9, 1)
    assert recorded(seq) == [9, 1, 8, 7, 6, 5, 4, 3]
    call(seq, 2, 1)
    assert recorded(seq) == [9, 1, 8, 7, 6, 5, 4, 3], "no matter how often it came before"


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
