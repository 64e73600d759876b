"""Commands are called in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from opfuser.cli import main


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def opfuser_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def call(*argv: str) -> Done:
        status = main(argv)
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return call
