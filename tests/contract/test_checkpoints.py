"""Parameters: aliases, checkpoints of te.ops, copies, pickles and activation checkpointing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opfuser as of
from tests.contract.tensors import F64, close, fill, leaf, rand


def model() -> of.Sequential:
    return of.Sequential(
        of.LayerNorm(8, **F64),
        of.Linear(8, 16, **F64),
        of.SwiGLU(),
        of.Linear(8, 8, bias=False, **F64),
        of.BasicLinear(8, 8, **F64),
        of.Bias(8, **F64),
    )


def te_keys(state: dict[str, Tensor], prefix: str = "") -> dict[str, Any]:
    """The same values under the keys of te.ops: parts of a Linear, and state of every operation."""
    moved = {
        "1.weight": "1.basic_ops.0.weight",
        "1.bias": "1.basic_ops.1.bias",
        "3.weight": "3.basic_ops.0.weight",
    }
    out: dict[str, Any] = {prefix + moved.get(key, key): v.clone() for key, v in state.items()}
    owners = ("0", "1.basic_ops.0", "1.basic_ops.1", "2", "3.basic_ops.0", "4", "5")
    # Must be skipped unread: unpickling what a checkpoint brings would run its code.
    for n, owner in enumerate(owners):
        state_bytes = torch.full((n,), 0x80, dtype=torch.uint8)
        out[f"{prefix}{owner}._extra_state"] = state_bytes
    return out


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("prefix", ["", "decoder.layers."])
def test_checkpoint_of_te_ops_loads(prefix: str, assign: bool) -> None:
    source, target = fill(model()), fill(model())
    holder: nn.Module = target
    for name in reversed(prefix.split(".")[:-1]):
        holder = nn.ModuleDict({name: holder})
    state = te_keys(source.state_dict(), prefix)
    keys = set(state)
    result = holder.load_state_dict(state, strict=True, assign=assign)
    assert result.missing_keys == []
    assert result.unexpected_keys == []
    assert set(state) == keys, "the caller's dict is left alone"
    for (name, p), q in zip(source.named_parameters(), target.parameters()):
        assert torch.equal(p, q), name
    x = rand(3, 8, grad=True)
    close(target(x), source(x))
    target(x).sum().backward()
    assert all(p.grad is not None for p in target.parameters())


def test_checkpoint_of_te_ops_with_a_missing_part() -> None:
    state = te_keys(model().state_dict())
    del state["1.basic_ops.1.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.bias"):
        model().load_state_dict(state)
    result = model().load_state_dict(state, strict=False)
    assert result.missing_keys == ["1.bias"]


def test_a_linear_of_its_own_loads_both_kinds_of_keys() -> None:
    source, target = fill(of.Linear(8, 4, **F64)), of.Linear(8, 4, **F64)
    target.load_state_dict(
        {"basic_ops.0.weight": source.weight.detach(), "basic_ops.1.bias": source.bias.detach()}
    )
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)
    assert list(target.state_dict()) == ["weight", "bias"]


def test_assignment_aliases() -> None:
    linear, basic, bias = of.Linear(8, 8, **F64), of.BasicLinear(8, 8, **F64), of.Bias(8, **F64)
    weight, vector = nn.Parameter(rand(8, 8)), nn.Parameter(rand(8))
    linear.weight = weight
    linear.bias = vector
    basic.weight = weight
    bias.bias = vector
    for owner in (linear, linear.basic_ops[0], basic):
        assert owner.weight is weight
    for owner in (linear, linear.basic_ops[1], bias):
        assert owner.bias is vector
    assert dict(linear.named_parameters()) == {"weight": weight, "bias": vector}
    part = nn.Parameter(rand(8, 8))
    linear.basic_ops[0].weight = part
    assert linear.weight is part
    x, dy = rand(3, 8), rand(3, 8)
    of.Sequential(linear, basic, bias)(x).backward(dy)
    w, v, u = leaf(part), leaf(weight), leaf(vector)
    ((x @ w.t() + u) @ v.t() + u).backward(dy)
    close(part.grad, w.grad)
    close(weight.grad, v.grad)
    close(vector.grad, u.grad)


@pytest.mark.parametrize("called", [False, True])
def test_bias_of_none_clears(called: bool) -> None:
    linear, bias = fill(of.Linear(8, 8, **F64)), fill(of.Bias(8, **F64))
    seq = of.Sequential(linear, bias, of.GELU())
    x = rand(3, 8, grad=True)
    if called:
        seq(x)
    linear.bias = None
    bias.bias = None
    assert linear.basic_ops[1].bias is None
    assert [name for name, _ in seq.named_parameters()] == ["0.weight"]
    y = seq(x)
    y.sum().backward()
    x64, w = leaf(x), leaf(linear.weight)
    want = torch.nn.functional.gelu(x64 @ w.t(), approximate="tanh")
    want.sum().backward()
    close(y, want)
    close(x.grad, x64.grad)
    close(linear.weight.grad, w.grad)
    linear.bias = nn.Parameter(torch.ones(8, dtype=torch.float64))
    seq(x).sum().backward()
    assert linear.bias.grad is not None


def test_a_linear_without_bias_cannot_be_given_one() -> None:
    linear = of.Linear(8, 8, bias=False)
    assert linear.bias is None
    linear.bias = None
    with pytest.raises(ValueError, match="bias"):
        linear.bias = nn.Parameter(torch.zeros(8))


def _deepcopy(m: nn.Module) -> nn.Module:
    return copy.deepcopy(m)


def _pickle(m: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(m))


@pytest.mark.parametrize("twin_of", [_deepcopy, _pickle])
@pytest.mark.parametrize("called", [False, True])
def test_copies_are_independent(twin_of: Any, called: bool) -> None:
    original = fill(of.Sequential(of.Residual(*model()), of.Dropout(0.0), of.GELU()))
    x = rand(3, 8)
    if called:
        original(x).sum().backward()
        original.zero_grad()
    twin = twin_of(original)
    close(twin(x), original(x))
    twin(x).sum().backward()
    assert all(p.grad is None for p in original.parameters())
    with torch.no_grad():
        want = original(x)
        for p in twin.parameters():
            p.zero_()
        close(original(x), want)
        assert not torch.equal(twin(x), want)
    # What one of a compound and its parts says, the other says: in the copy too.
    linear = twin[0][2]
    linear.weight = nn.Parameter(torch.ones(16, 8, dtype=torch.float64))
    assert linear.basic_ops[0].weight is linear.weight
    assert original[0][2].weight is not linear.weight


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    seq = fill(of.Sequential(*model(), of.Dropout(0.5)))
    x, dy = rand(3, 8, grad=True), rand(3, 8)
    torch.manual_seed(5)
    want = seq(x)
    want.backward(dy)
    grads = [x.grad, *(p.grad for p in seq.parameters())]
    x.grad = None
    seq.zero_grad()
    torch.manual_seed(5)
    y = checkpoint(seq, x, use_reentrant=reentrant)
    y.backward(dy)
    close(y, want)
    for got, expected in zip([x.grad, *(p.grad for p in seq.parameters())], grads):
        close(got, expected)


def test_checkpointing_saves_only_the_input() -> None:
    seq = fill(model())
    x = rand(3, 8, grad=True)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = checkpoint(seq, x, use_reentrant=False)
    kept = [t for t in saved if t.numel()]
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]
    y.sum().backward()
    assert x.grad is not None
