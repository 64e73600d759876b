"""The short form of ``make soak``."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import ACROSS
from tests.soak.runs import Losses, Schedule, Soak, difference, first_difference
from tests.soak.training import CASES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCHEDULE = Schedule(steps=9, evaluate=2, resume=3)
SHORT = [case for case in CASES if case[:2] in (("delayed", "reentrant"), ("predicted", "mlp"))]


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    return Soak(tmp_path_factory.mktemp("soak"), SHORT, SCHEDULE)


@pytest.fixture(scope="module")
def unbroken(soak: Soak) -> list[Losses]:
    return soak.unbroken(2)


def test_resumed_on_as_many_ranks_losses_are_the_same_bits(
    soak: Soak, unbroken: list[Losses]
) -> None:
    assert len(SHORT) == 2
    for case, ours, theirs in zip(SHORT, soak.resumed(2), unbroken, strict=True):
        assert first_difference(ours, theirs) is None, case


def test_resumed_on_other_numbers_of_ranks_losses_are_near(
    soak: Soak, unbroken: list[Losses]
) -> None:
    for case, ours, theirs in zip(SHORT, soak.resumed(1, 2, 4), unbroken, strict=True):
        assert difference(ours, theirs) <= ACROSS, case
