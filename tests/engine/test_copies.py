"""Copies, and what loading and casting leave as it was."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import opfuser
from tests.engine.toys import Times, model, randn, run, same


def by_pickle(seq: Any) -> Any:
    return pickle.loads(pickle.dumps(seq))


def by_torch_save(seq: Any) -> Any:
    file = io.BytesIO()
    torch.save(seq, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("how", "called"),
    [(copy.deepcopy, True), (copy.deepcopy, False), (by_pickle, True), (by_torch_save, False)],
)
def test_copies_stand_on_their_own(how: Callable[[Any], Any], called: bool) -> None:
    """Also one that is changed afterwards."""
    seq, x = model(), randn(2, 3, grad=True)
    if called:
        run(seq, x)
        assert len(pickle.dumps(seq)) < 1.05 * len(pickle.dumps(model())), "plans are left out"
    twin = how(seq)
    expected = run(seq, x)
    same(run(twin, x), expected)
    assert {id(p) for p in seq.parameters()} & {id(p) for p in twin.parameters()} == set()
    with torch.no_grad():
        twin[0].bias.add_(1)
    twin[0].weight = nn.Parameter(twin[0].weight + 1)
    assert twin[0].basic_ops[0].weight is twin[0].weight
    twin.append(Times())
    assert not torch.equal(run(twin, x)[0], expected[0])
    same(run(seq, x), expected)


def test_a_shallow_copy_shares_its_modules() -> None:
    seq, x = model(), randn(2, 3, grad=True)
    expected = run(seq, x)
    twin = copy.copy(seq)
    same(run(twin, x), expected)
    assert twin[0] is seq[0]
    same(seq[1:](seq[:1](x)), seq(x))
    assert seq[:1][0].weight is seq[0].weight


def test_shared_parameters_stay_shared_in_copies() -> None:
    one, two = opfuser.Linear(3, 3), opfuser.Linear(3, 3)
    two.weight = one.weight
    seq = opfuser.Sequential(one, two)
    for twin in (copy.deepcopy(seq), by_torch_save(seq)):
        assert twin[0].weight is twin[1].weight is twin[1].basic_ops[0].weight


def test_loading_casts_and_keeps_the_parameters() -> None:
    seq = model().bfloat16()
    parameters = list(seq.parameters())
    seq.load_state_dict(model().state_dict())
    assert all(a is b for a, b in zip(parameters, seq.parameters()))
    assert {p.dtype for p in seq.parameters()} == {torch.bfloat16}
    assert seq[0].basic_ops[0].weight is seq[0].weight


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, by_pickle, by_torch_save])
def test_copies_of_the_parts_of_a_linear_operation(how: Callable[[Any], Any]) -> None:
    linear, x = opfuser.Linear(3, 2, dtype=torch.float64), randn(4, 3)
    same(opfuser.Sequential(*how(list(linear.basic_ops)))(x), linear(x))
    product = how(linear.basic_ops[0])
    same(product(x), x @ linear.weight.T)
    with torch.no_grad():
        product.weight.zero_()
    assert bool(linear.weight.any()) is (how is not copy.copy)
