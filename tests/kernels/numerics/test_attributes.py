"""Attributes of operations that are set later, where kernels run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser import ConstantScale, Dropout, Sequential, SiLU
from opfuser.kernels.launch import recorded
from tests.basic.attributes import CASES, Change, attributes_of, make, results, same
from tests.basic.attributes_in_sequences import (
    CHANGES,
    Sets,
    check_change,
)

# What has no kernel of its own is the same with kernels and without.
PLAIN = (
    "AddExtraInput",
    "ConstantScale",
    "Embedding",
    "MakeExtraOutput",
    "PointwiseOperation",
    "Quantize",
)
PLAIN += ("BasicLinear", "DotProductAttention", "GroupedLinear", "Reshape")
SETTABLE = [(name, attribute) for name, attribute in attributes_of(Change) if name not in PLAIN]

# The sequences with kernels that no operation alone runs.
KERNELS = ("sum and norm", "queries and keys", "loss", "chain", "chain and norm")
OF_KERNELS = [
    change for change in CHANGES if change[0] in KERNELS and not change[2].startswith("accumulate")
]


def on(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    return [t.to(device) for t in tensors]


@pytest.mark.parametrize(("name", "attribute"), SETTABLE)
def test_an_operation(name: str, attribute: str, device: torch.device) -> None:
    case, op = CASES[name], make(name).to(device)
    change: Any = case.attributes[attribute]
    other = make(name, **{change.argument or attribute: change.value}).to(device)
    other.load_state_dict(op.state_dict())
    inputs = on(device, case.inputs())
    with recorded() as launches:
        results(op, inputs)
    assert launches
    wanted = results(op, inputs)
    assert same(results(op, inputs, lambda: setattr(op, attribute, change.value)), wanted)
    inputs = on(device, (change.inputs or case.inputs)())
    assert same(results(op, inputs), results(other, inputs))


@pytest.mark.parametrize(("name", "n", "attribute", "how"), OF_KERNELS)
def test_a_fusion(name: str, n: int, attribute: str, how: Change, device: torch.device) -> None:
    check_change(name, n, attribute, how, device)


def chain(*ops: opfuser.BasicOperation) -> Sequential:
    """A sequence in which the last ones are a chain."""
    seq = Sequential(*ops)
    assert seq.plan(torch.ones(2, 8, requires_grad=True)).fused("forward") == {"pointwise_chain": 1}
    return seq


def test_a_factor_that_a_neighbour_sets(device: torch.device) -> None:
    scale, factors = ConstantScale(2.0), [3.0, 5.0, 5.0, 7.0, 3.0]
    seq, x = chain(Sets(scale, "scale", *factors), scale, SiLU()), torch.randn(3, 8, device=device)
    for factor in factors:
        assert same(results(seq, [x]), results(chain(ConstantScale(factor), SiLU()), [x]))
    scale.scale = 4.0
    wanted = results(chain(ConstantScale(4.0), SiLU()), [x])
    assert same(results(chain(scale, SiLU()), [x]), wanted)


def test_a_probability_that_a_neighbour_sets(device: torch.device) -> None:
    dropout, values = Dropout(0.5), [0.9, 0.0, 0.3, 0.3, 0.5]
    seq = chain(Sets(dropout, "dropout_probability", *values), dropout, ConstantScale(2.0), SiLU())
    x = torch.ones(9, 9, device=device)
    for p in values:
        assert same(results(seq, [x]), results(chain(*fresh(p)), [x]))
    dropout.dropout_probability = 0.7
    assert same(results(chain(dropout, *fresh(0.7)[1:]), [x]), results(chain(*fresh(0.7)), [x]))


def fresh(p: float) -> list[opfuser.BasicOperation]:
    return [Dropout(p), ConstantScale(2.0), SiLU()]
