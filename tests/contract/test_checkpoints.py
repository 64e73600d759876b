"""Parameters: state dicts, checkpoints of te.ops and torch.nn, aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, against, close, fill, rand


def model() -> of.Sequential:
    return of.Sequential(
        of.LayerNorm(8, **F64), of.Linear(8, 16, **F64), of.GELU(),
        of.BasicLinear(16, 8, **F64), of.RMSNorm(8, **F64), of.Dropout(0.0),
        of.Sequential(of.Linear(8, 4, bias=False, **F64)),
    )  # fmt: skip


def plain() -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(8, **F64), nn.Linear(8, 16, **F64), nn.GELU(approximate="tanh"),
        nn.Linear(16, 8, bias=False, **F64), nn.RMSNorm(8, eps=1e-5, **F64), nn.Dropout(0.0),
        nn.Sequential(nn.Linear(8, 4, bias=False, **F64)),
    )  # fmt: skip


def by_torch(twin: nn.Sequential) -> Callable[..., Tensor]:
    return lambda p, x: torch.func.functional_call(twin, dict(p), (x,))


# ------------------------------------------------------------------------------ state dicts


@pytest.mark.parametrize("called", [False, True])
def test_hazard_28_state_dict_has_the_names_of_the_parameters_and_nothing_else(
    called: bool,
) -> None:
    seq = fill(model())
    if called:
        seq(rand(3, 8)).sum().backward()
    state = seq.state_dict()
    assert list(state) == [name for name, _ in seq.named_parameters()] == list(plain().state_dict())
    for name, value in state.items():
        assert isinstance(value, Tensor), "anything but a tensor breaks distributed checkpoints"
        assert value.dtype == torch.float64
        assert value.data_ptr() == seq.get_parameter(name).data_ptr()
    assert state._metadata.keys() == {  # type: ignore[attr-defined]
        name for name, _ in seq.named_modules()
    }


@pytest.mark.parametrize("assign", [False, True])
def test_hazard_29_checkpoints_of_torch_nn_load_and_go_back(assign: bool) -> None:
    source, seq = fill(plain()), fill(model())
    result = seq.load_state_dict(source.state_dict(), strict=True, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    x = rand(3, 8, grad=True)
    close(seq(x), source(x))
    against(seq, by_torch(plain()), x)
    target = fill(plain())
    target.load_state_dict(fill(seq).state_dict(), strict=True)
    close(target(x), seq(x))


def test_hazard_29_what_is_missing_or_unknown_is_named() -> None:
    state = plain().state_dict()
    del state["1.bias"]
    state["1.scale"] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*1\.bias.*Unexpected key.*1\.scale"):
        model().load_state_dict(state)


def te_keys(state: dict[str, Tensor], prefix: str = "") -> dict[str, Any]:
    """The same values under the keys of te.ops: parts of a Linear, and state of every operation."""
    parts = {"weight": "basic_ops.0.weight", "bias": "basic_ops.1.bias"}
    out: dict[str, Any] = {}
    for key, value in state.items():
        owner, _, name = key.rpartition(".")
        is_linear = owner in ("1", "6.0")
        out[f"{prefix}{owner}.{parts[name] if is_linear else name}"] = value.clone()
    owners = ("0", "1.basic_ops.0", "1.basic_ops.1", "2", "3", "4", "5", "6.0.basic_ops.0")
    for owner in owners:  # empty without quantized compute; tests/integrations/test_te_scales.py
        out[f"{prefix}{owner}._extra_state"] = torch.empty(0, dtype=torch.uint8)
    return out


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("prefix", ["", "decoder.layers."])
def test_checkpoints_of_te_ops_load(prefix: str, assign: bool) -> None:
    source, target = fill(model()), fill(model())
    holder: nn.Module = target
    for name in reversed(prefix.split(".")[:-1]):
        holder = nn.ModuleDict({name: holder})
    state = te_keys(source.state_dict(), prefix)
    keys = set(state)
    result = holder.load_state_dict(state, strict=True, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert set(state) == keys, "the caller's dict is left alone"
    for (name, p), q in zip(source.named_parameters(), target.parameters()):
        assert torch.equal(p, q), name
    against(target, by_torch(plain()), rand(3, 8, grad=True))


def test_a_checkpoint_of_te_ops_with_a_missing_part() -> None:
    state = te_keys(model().state_dict())
    del state["1.basic_ops.1.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.bias"):
        model().load_state_dict(state)
    result = model().load_state_dict(state, strict=False)
    assert result.missing_keys == ["1.bias"]


# ------------------------------------------------------------------------------ aliases


def test_assignment_aliases() -> None:
    linear, basic, bias = of.Linear(8, 8, **F64), of.BasicLinear(8, 8, **F64), of.Bias(8, **F64)
    weight, vector = nn.Parameter(rand(8, 8)), nn.Parameter(rand(8))
    linear.weight = basic.weight = weight
    linear.bias = bias.bias = vector
    for owner in (linear, linear.basic_ops[0], basic):
        assert owner.weight is weight
    for owner in (linear, linear.basic_ops[1], bias):
        assert owner.bias is vector
    assert dict(linear.named_parameters()) == {"weight": weight, "bias": vector}
    part = nn.Parameter(rand(8, 8))
    linear.basic_ops[0].weight = part
    assert linear.weight is part
    against(
        of.Sequential(linear, basic, bias),
        lambda p, x: (x @ p["part"].t() + p["vector"]) @ p["weight"].t() + p["vector"],
        rand(3, 8),
        parameters={"part": part, "weight": weight, "vector": vector}.items(),
    )


@pytest.mark.parametrize("called", [False, True])
def test_bias_of_none_clears(called: bool) -> None:
    linear, bias = fill(of.Linear(8, 8, **F64)), fill(of.Bias(8, **F64))
    seq = of.Sequential(linear, bias, of.GELU())
    x = rand(3, 8, grad=True)
    if called:
        seq(x)
    linear.bias = bias.bias = None
    assert linear.basic_ops[1].bias is None
    assert [name for name, _ in seq.named_parameters()] == ["0.weight"]
    against(seq, lambda p, x: F.gelu(x @ p["0.weight"].t(), approximate="tanh"), x)
    linear.bias = nn.Parameter(torch.ones(8, dtype=torch.float64))
    seq(x).sum().backward()
    assert linear.bias.grad is not None
