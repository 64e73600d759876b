"""Hazards 28 and 29: checkpoints."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from tests.contract.tensors import F64, fill


def ours() -> of.Sequential:
    return of.Sequential(
        of.LayerNorm(8, **F64),
        of.Linear(8, 16, **F64),
        of.GELU(),
        of.Linear(16, 8, bias=False, **F64),
        of.RMSNorm(8, **F64),
        of.Dropout(0.0),
        of.Sequential(of.Linear(8, 4, **F64)),
    )


def plain() -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(8, **F64),
        nn.Linear(8, 16, **F64),
        nn.GELU(approximate="tanh"),
        nn.Linear(16, 8, bias=False, **F64),
        nn.RMSNorm(8, eps=1e-5, **F64),
        nn.Dropout(0.0),
        nn.Sequential(nn.Linear(8, 4, **F64)),
    )


@pytest.mark.parametrize("called", [False, True])
def test_hazard_28_state_dict_has_the_names_of_the_parameters_and_nothing_else(
    called: bool,
) -> None:
    model = fill(ours())
    if called:
        model(torch.randn(3, 8, dtype=torch.float64)).sum().backward()
    state = model.state_dict()
    assert list(state) == [name for name, _ in model.named_parameters()]
    for name, value in state.items():
        assert isinstance(value, Tensor), "anything but a tensor breaks distributed checkpoints"
        assert value.dtype == torch.float64
        assert value.data_ptr() == model.get_parameter(name).data_ptr()
    assert list(state) == list(plain().state_dict())
    assert not any("_extra_state" in name for name in state)
    assert state._metadata.keys() == {  # type: ignore[attr-defined]
        name for name, _ in model.named_modules()
    }


@pytest.mark.parametrize(
    "op",
    [
        lambda: of.Linear(4, 3),
        lambda: of.BasicLinear(4, 3),
        lambda: of.Bias(4),
        lambda: of.GroupedLinear(2, 4, 3),
        of.GELU,
        of.SwiGLU,
        of.Quantize,
        of.MakeExtraOutput,
    ],
)
def test_hazard_28_no_operation_has_extra_state(op: Any) -> None:
    operation = op()
    assert list(operation.state_dict()) == [name for name, _ in operation.named_parameters()]


def test_hazard_28_a_called_model_pickles_without_its_plans() -> None:
    model, x = fill(ours()), torch.randn(3, 8, dtype=torch.float64)
    untouched = len(pickle.dumps(model))
    want = model(x)
    model[0](x)
    copy = pickle.loads(pickle.dumps(model))
    assert len(pickle.dumps(model)) < 1.05 * untouched
    torch.testing.assert_close(copy(x), want, rtol=0, atol=0)
    assert list(copy.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_hazard_29_checkpoint_of_torch_nn_loads(assign: bool) -> None:
    source, model = fill(plain()), fill(ours())
    result = model.load_state_dict(source.state_dict(), strict=True, assign=assign)
    assert result.missing_keys == []
    assert result.unexpected_keys == []
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    x64 = x.detach().clone().requires_grad_()
    got, want = model(x), source(x64)
    dy = torch.randn_like(got)
    got.backward(dy)
    want.backward(dy)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, x64.grad, rtol=1e-12, atol=1e-12)
    for p, q in zip(model.parameters(), source.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


def test_hazard_29_checkpoint_loads_back_into_torch_nn() -> None:
    model, target = fill(ours()), fill(plain())
    target.load_state_dict(model.state_dict(), strict=True)
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(target(x), model(x), rtol=1e-12, atol=1e-12)


def test_hazard_29_what_is_missing_or_unknown_is_named() -> None:
    state = plain().state_dict()
    del state["1.bias"]
    state["1.scale"] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*1\.bias.*Unexpected key.*1\.scale"):
        ours().load_state_dict(state)
