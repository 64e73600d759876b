"""Every operation inside nested Sequentials, between others: values and gradients.

Alone they are tested in tests/basic, also against formulas; here, what a Sequential adds. Unusual
shapes and layouts (hazard 13): ``check_op`` and ``check_fusion``, of all operations and fusions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import opfuser as of
from tests.basic.attributes import CASES, make, results
from tests.contract.tensors import as_exact, fill


class Plain(nn.Module):
    """The reference of an operation, over the same parameters."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, *inputs: Any) -> Any:
        return self.op.reference(*inputs)


@pytest.mark.parametrize("name", sorted({*CASES} - {"Dropout", "Jitter"}))
def test_operation(name: str) -> None:
    op = fill(make(name))
    inputs = CASES[name].inputs()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tensors = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
        op.to(dtype)
        model = of.Sequential(of.Sequential(of.Identity(), op), of.ConstantScale(1.0))
        ours, plain = results(model, tensors), results(Plain(op), tensors)
        exact = results(
            Plain(op.double()), [t.double() if t.is_floating_point() else t for t in tensors]
        )
        for got, theirs, want in zip(ours, plain, exact, strict=True):
            assert got.dtype == theirs.dtype
            as_exact(str(dtype), got, theirs, want)
