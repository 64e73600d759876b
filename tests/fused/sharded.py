"""Linear operations that say they are sharded, without other ranks: for plans, not for numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import opfuser
from opfuser import BasicLinear
from opfuser.errors import NotSupportedError

SHARDINGS = {
    "column": ("column", False),
    "column, sequence-parallel": ("column", True),
    "row": ("row", False),
    "row, sequence-parallel": ("row", True),
}


def sharded(linear: BasicLinear, name: str) -> BasicLinear:
    mode, sequence_parallel = SHARDINGS[name]
    sharding = linear.sharding._replace(mode=mode, sequence_parallel=sequence_parallel)
    vars(linear)["sharding"] = sharding  # read-only
    return linear


def refusals_when_sharded(
    fusion: str, ops: Callable[[BasicLinear], list[nn.Module]], *extras: int
) -> dict[str, str | None]:
    """For each way to shard a BasicLinear(6, 4): why the fusion is refused, or None."""
    out: dict[str, str | None] = {}
    for name in SHARDINGS:
        seq = opfuser.Sequential(*ops(sharded(BasicLinear(6, 4), name)))
        x = torch.randn(3, 6, requires_grad=True)
        record = seq.plan(x, *[torch.randn(3, n) for n in extras]).record(fusion)
        assert len(record.matches) + len(record.refusals) == 1
        for _, why in record.refusals:
            assert why.code == "COMMUNICATION"
        out[name] = record.refusals[0][1].detail if record.refusals else None
    return out


def hand_built(make: Callable[[BasicLinear], object]) -> dict[str, str | None]:
    """For each way to shard a BasicLinear: what constructing a fused operation by hand raises."""
    return {name: _error(make, sharded(BasicLinear(6, 4), name)) for name in SHARDINGS}


def _error(make: Callable[[BasicLinear], object], linear: BasicLinear) -> str | None:
    try:
        make(linear)
    except NotSupportedError as exc:
        return str(exc)
    return None
