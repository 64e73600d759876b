"""Copies, pickles, the meta device, and what loading leaves as it was."""

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
from tests.engine.toys import Mixed, Times, model, randn, run, same


def by_pickle(seq: Any) -> Any:
    return pickle.loads(pickle.dumps(seq))


def by_torch_save(seq: Any) -> Any:
    file = io.BytesIO()
    torch.save(seq, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("how", "called"),
    [(copy.deepcopy, False), (copy.deepcopy, True), (by_pickle, True), (by_torch_save, True),
     (by_torch_save, False)],
)  # fmt: skip
def test_copies_stand_on_their_own(how: Callable[[Any], Any], called: bool) -> None:
    seq, x = model(), randn(2, 3, grad=True)
    if called:
        run(seq, x)
    twin = how(seq)
    expected = run(seq, x)
    same(run(twin, x), expected)
    assert {id(p) for p in seq.parameters()} & {id(p) for p in twin.parameters()} == set()
    assert list(twin.state_dict()) == list(seq.state_dict())
    assert twin[0].basic_ops[0].weight is twin[0].weight
    with torch.no_grad():
        twin[0].bias.add_(1)
    twin[0].bias = nn.Parameter(twin[0].bias + 1)
    assert twin[0].basic_ops[1].bias is twin[0].bias
    assert not torch.equal(run(twin, x)[0], expected[0])
    twin.append(Times())
    same(run(seq, x), expected)


def test_a_copy_in_training_keeps_no_plans() -> None:
    """Hazard 28."""
    seq, x = model(), randn(2, 3)
    run(seq, x.requires_grad_())
    assert len(pickle.dumps(seq)) < 2 * len(pickle.dumps(model()))


def test_a_shallow_copy_shares_its_modules() -> None:
    seq, x = model(), randn(2, 3, grad=True)
    expected = run(seq, x)
    twin = copy.copy(seq)
    same(run(twin, x), expected)
    assert twin[0] is seq[0]
    same(seq[1:](seq[:1](x)), seq(x))
    assert seq[:1][0].weight is seq[0].weight


@pytest.mark.parametrize("how", [copy.deepcopy, by_pickle])
def test_copies_of_operations_alone(how: Callable[[Any], Any]) -> None:
    op, x = Times(), randn(2, 3)
    op(x)
    twin = how(op)
    assert twin.w is not op.w
    same(twin(x), op(x))
    linear = opfuser.Linear(3, 3)
    twin = how(linear)
    twin.bias = None
    assert linear.bias is not None
    assert twin.basic_ops[1].bias is None


def test_shared_parameters_stay_shared_in_copies() -> None:
    one, two = opfuser.Linear(3, 3), opfuser.Linear(3, 3)
    two.weight = one.weight
    seq = opfuser.Sequential(one, two)
    for twin in (copy.deepcopy(seq), by_pickle(seq)):
        assert twin[0].weight is twin[1].weight is twin[1].basic_ops[0].weight


# From the meta device (hazard 11).


@pytest.mark.parametrize("touched", [False, True])
def test_from_the_meta_device(touched: bool) -> None:
    with torch.device("meta"):
        seq = model().float()
    assert {p.device.type for p in seq.parameters()} == {"meta"}
    if touched:
        assert seq(torch.empty(2, 3, device="meta")).device.type == "meta"
    seq.to_empty(device="cpu")
    for module in seq.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    nn.init.ones_(seq[-1].w)
    for p in seq.parameters():
        assert p.device.type == "cpu"
        assert torch.isfinite(p).all()
    twin = model().float()
    twin.load_state_dict(seq.state_dict())
    x = torch.randn(2, 3, requires_grad=True)
    torch.testing.assert_close(run(seq, x), run(twin, x))
    optimizer = torch.optim.SGD(seq.parameters(), lr=0.01)
    before = seq(x).square().sum()
    before.backward()
    optimizer.step()
    assert seq(x).square().sum() < before


@pytest.mark.parametrize("assign", [False, True])
def test_from_the_meta_device_by_loading(assign: bool) -> None:
    seq, x = model(), randn(2, 3, grad=True)
    with torch.device("meta"):
        twin = model()
    if not assign:
        twin.to_empty(device="cpu")
    twin.load_state_dict(seq.state_dict(), assign=assign)
    same(run(twin, x), run(seq, x))


def test_loading_casts_and_keeps_the_parameters() -> None:
    seq = model().bfloat16()
    parameters = list(seq.parameters())
    seq.load_state_dict(model().state_dict())
    assert all(a is b for a, b in zip(parameters, seq.parameters()))
    assert {p.dtype for p in seq.parameters()} == {torch.bfloat16}
    assert seq[0].basic_ops[0].weight is seq[0].weight


def test_casting_reaches_operations_with_extra_tensors() -> None:
    seq = opfuser.Sequential(Mixed(), opfuser.Linear(3, 3), Times(dtype=torch.float32))
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    y, extra = seq.bfloat16()(x, x)
    assert {y.dtype, extra.dtype} == {torch.bfloat16}
