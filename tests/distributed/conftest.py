"""What the modules of checks on several ranks share."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Outcomes, outcomes_of


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What came of a module's ``CHECKS`` on as many ranks as it asks for, all in one start."""
    module, device = request.module, getattr(request, "param", "cpu")
    folder = tmp_path_factory.mktemp("ranks")
    return outcomes_of(module.__name__, module.RANKS, folder, device)
