"""opfuser with replayed plans: all that the benchmarks know of that mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import opfuser
from benchmarks.gpu.problem import Function, Row, Within

REPLAYED = "opfuser, replayed"


def context() -> Any:
    """Inside of it, plans are captured and replayed."""
    return opfuser.replay("on")


def missing(device: torch.device) -> str | None:
    """Why the contestant cannot take part."""
    return None if device.type == "cuda" else "replaying needs a CUDA device"


def replayed(model: nn.Module, device: torch.device) -> dict[str, Function]:
    """The entry of a model that no other contestant runs; or none."""
    if missing(device) is not None:
        return {}
    return {REPLAYED: Within(model, context, lambda: captured(model))}


def left_out(device: torch.device) -> dict[str, str]:
    reason = missing(device)
    return {} if reason is None else {REPLAYED: reason}


def captured(model: nn.Module) -> Row:
    """The memory of recordings, and why the last call was not replayed, if it was not."""
    plans = [m.last_plan for m in model.modules() if isinstance(m, opfuser.Sequential)]
    records = [record for plan in plans if plan is not None for record in plan.replays]
    row: Row = {"captured_bytes": sum(record.bytes for record in records)}
    refusals = [str(record.refusal) for record in records if record.refusal is not None]
    return {**row, "not_replayed": refusals} if refusals else row
