"""Every operation, and an example of every fusion, whose calls are replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser import Sequential
from opfuser.core.op_base.kinds import is_built_in
from tests.basic.attributes import CASES, make
from tests.basic.values import fill
from tests.fused.examples import EXAMPLES, UNQUANTIZED, extras, filled
from tests.replay.models import assert_equal, code, count, twin

pytestmark = pytest.mark.usefixtures("replaying")

CALLS = 6


def redrawn(t: Tensor) -> Tensor:
    """Other values in the range of these."""
    if t.is_floating_point():
        return torch.randn_like(t).requires_grad_()
    return t.flatten()[torch.randperm(t.numel(), device=t.device)].view_as(t)


def outputs_and_grads(model: Any, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    torch.manual_seed(1)
    ys = model(*inputs)
    ys = [y for y in (ys if isinstance(ys, tuple) else (ys,)) if y.requires_grad]
    dys = [torch.randn_like(y) for y in ys]
    wrt = [t for t in (*inputs, *model.parameters()) if t.requires_grad]
    if not ys or not wrt:
        return [y.detach() for y in ys]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, wrt, dys, allow_unused=True)]


def check_replayed(model: Sequential, inputs: Sequence[Tensor]) -> None:
    other = twin(model)
    for _ in range(CALLS):
        given = [redrawn(t) for t in inputs]
        for a, b in zip(outputs_and_grads(model, given), outputs_and_grads(other, given)):
            if a is None or b is None:
                assert a is b
            else:
                assert_equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_operations(name: str, device: torch.device) -> None:
    op = fill(make(name)).to(device)
    model = Sequential(op)
    check_replayed(model, [t.to(device) for t in CASES[name].inputs()])
    reads_values = name == "GroupedLinear"
    assert code(model) == ("OPERATION" if reads_values or not is_built_in(op) else "")
    assert count(model) == (0 if code(model) else CALLS - 1)


@pytest.mark.parametrize("fusion", UNQUANTIZED, ids=lambda fusion: fusion.name)
def test_fusions(fusion: opfuser.Fusion, device: torch.device) -> None:
    model = Sequential(*filled(EXAMPLES[fusion.name][0]())).to(device)
    inputs = [torch.randn(2, 3, 6), *extras(fusion.name, 2, 3)]
    check_replayed(model, [t.to(device) for t in inputs])
    assert code(model) == ""
    assert count(model) == CALLS - 1
