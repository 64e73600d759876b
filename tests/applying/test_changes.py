"""Copies of a model after apply, and what it is not traced anew for; for all else, adversities."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.applying import report
from opfuser.applying.forwards import state_of

from .models import assert_equal_steps, llama, paths, step


def test_a_mode_is_seen() -> None:
    model, plain = (llama(attention_dropout=1.0) for _ in range(2))
    opfuser.apply(model)
    step(model)
    assert_equal_steps(step(model.eval()), step(plain.eval()))


def test_another_attention_function_sees_other_keys() -> None:
    model, plain = llama("eager"), llama("eager")
    opfuser.apply(model)
    step(model)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    tables = model.rotary_emb(x, torch.arange(7)[None])
    for attention in ("eager", "sdpa", "eager"):
        for m in (model, plain):
            m.set_attn_implementation(attention)
        got, want = (m.layers[0](x, position_embeddings=tables) for m in (model, plain))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


class Detached(nn.Module):
    """Computes its norm without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.norm(x)
        return x + torch.relu(self.up(h))


def test_what_is_computed_without_gradients_gets_none_once_it_is_unfrozen() -> None:
    model, x = Detached(), torch.randn(3, 8)
    model.norm.requires_grad_(False)
    opfuser.apply(model)
    model(x)
    assert paths(report(model)) == [""]
    model.norm.requires_grad_()
    model(x).sum().backward()
    assert model.norm.weight.grad is None


def test_exchanged_parameters_are_taken_over_without_another_trace() -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    step(model)
    before = len(state_of(model.layers[0]).decisions)
    for _ in range(2):
        for m in (model, plain):
            for name, p in [*m.named_parameters()]:
                holder, _, own = name.rpartition(".")
                setattr(m.get_submodule(holder), own, nn.Parameter(1.1 * p.detach()))
        assert_equal_steps(step(model), step(plain))
    assert len(state_of(model.layers[0]).decisions) == before
    # Gradients of parameters that are tied now add up.
    for m in (model, plain):
        m.layers[0].mlp.up_proj.weight = m.layers[0].mlp.gate_proj.weight
    assert_equal_steps(step(model), step(plain))


def test_a_deep_copy_is_applied_and_apart() -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    want = step(model)
    copied = copy.deepcopy(model)
    for m in (copied, plain):
        m.layers[1].input_layernorm.variance_epsilon = 0.5
    assert_equal_steps(step(copied), step(plain))
    assert_equal_steps(step(model), want, rtol=0)
    assert paths(report(copied)) == paths(report(model))
    opfuser.revert(copied)
    assert paths(report(copied)) == []
    assert_equal_steps(step(model), want, rtol=0)
    assert paths(report(model)) != []


def of_the_dict(module: nn.Module) -> Any:
    """A shallow copy, as DataParallel makes its replicas."""
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    return made


@pytest.mark.parametrize("shallow", [copy.copy, of_the_dict, lambda m: copy.copy(of_the_dict(m))])
def test_a_shallow_copy_computes_with_its_own_children(shallow: Any) -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    want = step(model)
    for m in (model, plain):
        copied = shallow(m.layers[1])
        copied._modules = dict(copied._modules)
        copied.mlp = m.layers[2].mlp
        m.layers.append(copied)
        m.config.num_hidden_layers = 4
    assert_equal_steps(step(model), step(plain))
    assert_equal_steps(step(model), step(plain))
    assert "layers.3" in paths(report(model))
    for m in (model, plain):
        del m.layers[3]
        m.config.num_hidden_layers = 3
    assert_equal_steps(step(model), want)


def test_a_shallow_copy_within_what_is_read_computes_with_its_own_children() -> None:
    model, plain = (nn.Sequential(llama().layers[0].mlp) for _ in "12")
    opfuser.apply(model)
    x, got = torch.linspace(-1, 1, 64, dtype=torch.float64).view(2, 32), []
    for m in (model, plain):
        m(x)
        copied = of_the_dict(m[0])
        copied._modules = {**copied._modules, "act_fn": nn.ReLU()}
        m.append(copied)
        got.append([m(x), m(x), copied(x)])
    assert_equal_steps(*got)
    assert paths(report(model)) == ["", "1"]


def test_a_shallow_copy_has_a_forward_of_its_own_from_the_start() -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    step(model)
    x, got = torch.linspace(-1, 1, 64, dtype=torch.float64).view(2, 32), []
    for m in (model, plain):
        copied = copy.copy(m.norm)
        copied.variance_epsilon = 0.5
        loaded = pickle.loads(pickle.dumps([copied, m.norm]))
        assert vars(loaded[0]).keys() == vars(plain.norm).keys()
        modules = copied, m.norm, *loaded, copy.deepcopy(copied), copy.copy(copied)
        got.append([module.forward(x) for module in modules])
    assert_equal_steps(*got)
    opfuser.revert(copied)
    assert vars(copied).keys() == vars(plain.norm).keys()


def test_a_layer_that_changes_with_every_call_is_right() -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    for number in range(4):
        for m in (model, plain):
            m.layers[1].input_layernorm.variance_epsilon = 0.1 * number
        assert_equal_steps(step(model), step(plain))
