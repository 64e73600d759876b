"""Traffic of a Sequential by itself."""

from __future__ import annotations

from torch import Tensor

from opfuser import Sequential
from opfuser.report.target import Target
from opfuser.report.traffic import Traffic, model_traffic


def traffic(sequence: Sequential, *inputs: Tensor) -> Traffic:
    return model_traffic(Target("", sequence, inputs)).sequences[""]
