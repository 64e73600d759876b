"""Planning is tested with fusions of its own; the built-in ones are switched off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import opfuser
from opfuser.registry import registry


@pytest.fixture(autouse=True)
def _no_built_in_fusions() -> Iterator[None]:
    before = list(registry)
    with opfuser.disable(*(handle.name for handle in before)):
        yield
    assert list(registry) == before, "a test left a fusion registered"


@pytest.fixture
def plans() -> Iterator[list[Any]]:
    """Grows by one entry per plan that is made."""
    made: list[Any] = []

    def counts_plans(ops: Sequence[Any]) -> Sequence[Any]:
        made.append(ops)
        return ops

    with opfuser.register_forward_fusion(counts_plans):
        yield made
