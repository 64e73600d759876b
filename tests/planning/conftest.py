"""Planning is tested with fusions of its own; the built-in ones are switched off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import opfuser
from opfuser import fuser
from opfuser.registry import registry


@pytest.fixture(autouse=True)
def _no_built_in_fusions() -> Iterator[None]:
    before = list(registry)
    with opfuser.disable(*(handle.name for handle in before)):
        yield
    assert list(registry) == before, "a test left a fusion registered"


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one entry per plan that is made."""
    made: list[Any] = []
    original = fuser.make_plan

    def counting(*args: Any) -> Any:
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr(fuser, "make_plan", counting)
    return made
