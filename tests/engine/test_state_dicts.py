"""Meta device, and checkpoints of torch.nn and te.ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import opfuser
from tests.engine.toys import Mixed, Times, model, randn, run, same


def real_values(seq: nn.Module) -> None:
    for p in seq.parameters():
        assert p.device.type == "cpu"
        assert torch.isfinite(p).all()


@pytest.mark.parametrize("touched", [False, True])
def test_from_the_meta_device(touched: bool) -> None:
    with torch.device("meta"):
        seq = opfuser.Sequential(
            opfuser.Linear(3, 4), nn.Tanh(), opfuser.Residual(opfuser.BasicLinear(4, 4))
        )
    assert {p.device.type for p in seq.parameters()} == {"meta"}
    if touched:
        assert seq(torch.empty(2, 3, device="meta")).device.type == "meta"
    seq.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in seq.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    real_values(seq)
    twin = opfuser.Sequential(
        opfuser.Linear(3, 4), nn.Tanh(), opfuser.Residual(opfuser.BasicLinear(4, 4))
    )
    twin.load_state_dict(seq.state_dict())
    x = torch.randn(2, 3, requires_grad=True)
    torch.testing.assert_close(run(seq, x), run(twin, x))
    optimizer = torch.optim.SGD(seq.parameters(), lr=0.1)
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


# ---------------------------------------------------------------------- state dicts


def with_torch() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.ReLU(),
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()),
        nn.Linear(4, 3),
    )


def with_ours() -> opfuser.Sequential:
    return opfuser.Sequential(
        opfuser.Linear(3, 4),
        opfuser.ReLU(),
        opfuser.Sequential(opfuser.BasicLinear(4, 4), nn.ReLU()),
        opfuser.Linear(4, 3),
    )


def test_state_dicts_go_both_ways() -> None:
    theirs, ours, x = with_torch(), with_ours(), torch.randn(2, 3, requires_grad=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    torch.testing.assert_close(run(ours, x), run(theirs, x))
    again = with_torch()
    again.load_state_dict(ours.state_dict())
    torch.testing.assert_close(run(again, x), run(theirs, x))


def te_keys(state: dict[str, Any], *, extra: bool) -> dict[str, Any]:
    """As te.ops names them: parameters under the basic operations, and extra state everywhere."""
    out: dict[str, Any] = {}
    for key, value in state.items():
        prefix, name = key.rsplit(".", 1)
        index = {"weight": 0, "bias": 1}[name]
        linear = prefix != "2.0"
        place = f"{prefix}.basic_ops.{index}." if linear else f"{prefix}."
        out[place + name] = value
        if extra:
            out[place + "_extra_state"] = torch.empty(0, dtype=torch.uint8)
    if extra:
        for prefix in ("0.", "1.", "3."):
            out[prefix + "_extra_state"] = torch.empty(0, dtype=torch.uint8)
    return out


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_checkpoints_of_te_ops_load(extra: bool, assign: bool) -> None:
    source, target = with_torch(), with_ours()
    state = te_keys(source.state_dict(), extra=extra)
    kept = dict(state)
    result = target.load_state_dict(state, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert state.keys() == kept.keys(), "the caller's dict is as it was"
    torch.testing.assert_close(dict(target.state_dict()), dict(source.state_dict()))


def test_what_does_not_fit_is_reported() -> None:
    state = with_ours().state_dict()
    state["1.weight"] = state.pop("0.weight")
    with pytest.raises(
        RuntimeError, match=r'(?s)Missing key.*"0.weight".*Unexpected key.*"1.weight"'
    ):
        with_ours().load_state_dict(state)
    state = with_ours().state_dict()
    state["0.bias"] = torch.zeros(7)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        with_ours().load_state_dict(state)


def test_loading_casts_and_keeps_the_parameters() -> None:
    seq = with_ours().bfloat16()
    parameters = list(seq.parameters())
    seq.load_state_dict(with_torch().state_dict())
    assert all(a is b for a, b in zip(parameters, seq.parameters()))
    assert {p.dtype for p in seq.parameters()} == {torch.bfloat16}
    assert seq[0].basic_ops[0].weight is seq[0].weight


def test_casting_reaches_operations_with_extra_tensors() -> None:
    seq = opfuser.Sequential(Mixed(), opfuser.Linear(3, 3), Times(dtype=torch.float32))
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    y, extra = seq.bfloat16()(x, x)
    assert {y.dtype, extra.dtype} == {torch.bfloat16}
