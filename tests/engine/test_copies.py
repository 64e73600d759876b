"""Copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import opfuser
from tests.engine.toys import Times, model, randn, run, same

# ---------------------------------------------------------------------- copies


def by_pickle(seq: Any) -> Any:
    return pickle.loads(pickle.dumps(seq))


def by_torch_save(seq: Any) -> Any:
    file = io.BytesIO()
    torch.save(seq, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("called", [False, True])
def test_copies_stand_on_their_own(how: Callable[[Any], Any], called: bool) -> None:
    seq, x = model(), randn(2, 3, grad=True)
    expected = run(seq, x)
    if not called:
        fresh = model()
        fresh.load_state_dict(seq.state_dict())
        seq = fresh
    twin = how(seq)
    same(run(twin, x), expected)
    assert {id(p) for p in seq.parameters()} & {id(p) for p in twin.parameters()} == set()
    assert list(twin.state_dict()) == list(seq.state_dict())
    linear = twin[0]
    assert linear.basic_ops[0].weight is linear.weight
    with torch.no_grad():
        twin[0].bias.add_(1)
    same(run(seq, x), expected)
    assert not torch.equal(run(twin, x)[0], expected[0])
    twin.append(Times())
    same(run(seq, x), expected)


def test_a_copy_in_training_keeps_no_plans() -> None:
    seq, x = model(), randn(2, 3)
    run(seq, x.requires_grad_())
    assert len(pickle.dumps(seq)) < 2 * len(pickle.dumps(model()))


def test_a_shallow_copy_shares_its_modules() -> None:
    seq, x = model(), randn(2, 3, grad=True)
    expected = run(seq, x)
    twin = copy.copy(seq)
    same(run(twin, x), expected)
    assert twin[0] is seq[0]


def test_copies_of_operations_alone() -> None:
    op, x = Times(), randn(2, 3)
    op(x)
    for twin in (copy.deepcopy(op), by_pickle(op)):
        assert twin.w is not op.w
        same(twin(x), op(x))
    linear = opfuser.Linear(3, 3)
    twin = copy.deepcopy(linear)
    twin.bias = None
    assert linear.bias is not None
    assert twin.basic_ops[1].bias is None


def test_shared_parameters_stay_shared_in_copies() -> None:
    one, two = opfuser.Linear(3, 3), opfuser.Linear(3, 3)
    two.weight = one.weight
    seq = opfuser.Sequential(one, two)
    for twin in (copy.deepcopy(seq), by_pickle(seq)):
        assert twin[0].weight is twin[1].weight is twin[1].basic_ops[0].weight
