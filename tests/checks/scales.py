"""Operations that fuse in both passes, for what programs and tests ask of plans."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opfuser import ConstantScale, Sequential
from tests.planning.toys import FusedForward

PATTERN = (ConstantScale, ConstantScale)


class Scales(FusedForward):
    """Computes, so that models can be called."""

    def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
        return input_ * 4, [() for _ in ctxs]


def scales(count: int = 2) -> Sequential:
    return Sequential(*(ConstantScale(2.0) for _ in range(count)))
