"""What the tests of fusions of element-wise operations share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opfuser import PointwiseOperation, Sequential
from opfuser.engine.plan import Plan


class Cube(PointwiseOperation):
    device_function = "somewhere:cube"

    def value(self, x: Tensor) -> Tensor:
        return x**3


def plan_on(
    device: str, *ops: nn.Module, dtype: torch.dtype = torch.float32, grad: bool = True
) -> Plan:
    """A plan needs no data: one for tensors of meta tells what becomes of those of a GPU."""
    seq = Sequential(*ops).to(device, dtype)
    x = torch.empty(2, 3, 6, device=device, dtype=dtype, requires_grad=grad)
    return seq.plan(x, *[x] * seq.num_extra_inputs)
