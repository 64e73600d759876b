"""Fusions of toys, for what programs and tests ask of plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import opfuser
from opfuser import Identity
from opfuser.core.fusion import Fusion, Refusal, Requires
from tests.checks.scales import PATTERN, Scales
from tests.planning.toys import Fused, FusedBackward

NO = Refusal("DTYPE", "only bf16")
FUSIONS = [
    Fusion("scales", "forward", PATTERN, Scales),
    Fusion("picky", "forward", (Identity, Identity), Fused, lambda a, b, env: NO),
    Fusion("cuda", "forward", PATTERN, Fused, requires=Requires(device="cuda")),
    Fusion("missing", "forward", PATTERN, Fused, requires=Requires(package="no_such")),
]


@pytest.fixture
def _fusions() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(opfuser.disable(*(info.name for info in opfuser.fusions())))
        back = Fusion("back", "backward", PATTERN, FusedBackward)
        stack.enter_context(opfuser.register_backward_fusion(back))
        for fusion in FUSIONS:
            stack.enter_context(opfuser.register_forward_fusion(fusion))
        yield
