"""Models with experts to which apply was applied, and what changes of them afterwards."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.applying import report

from .models import IDS, assert_equal_steps, model_of, paths, step

interface = pytest.importorskip("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
_SIZES = {"num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral(implementation: str = "batched_mm") -> Any:
    model: Any = model_of("mixtral", **_SIZES)
    model.set_experts_implementation(implementation)
    return model.train()


def blocks(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.layers]


def doubled(self: Any, *args: Tensor) -> Tensor:
    result: Tensor = interface["batched_mm"](self, *args)
    return 2 * result


def gates_by_relu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return torch.relu(gate) * up


def set_each(name: str, value: Any, of: str = "experts") -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for block in blocks(model):
            setattr(getattr(block, of), name, value)

    return change


def other_parameters(model: Any) -> None:
    """One is exchanged, one written to."""
    for block in blocks(model):
        block.experts.down_proj = nn.Parameter(2 * block.experts.down_proj.detach())
        with torch.no_grad():
            block.experts.gate_up_proj.mul_(2)


def hook_routers(model: Any) -> None:
    for block in blocks(model):
        block.gate.register_forward_hook(lambda module, args, out: (out[0], 3 * out[1], out[2]))


CHANGES: dict[str, Callable[[Any], None]] = {
    "a loop": lambda model: model.set_experts_implementation("eager"),
    "an implementation of one's own": lambda model: model.set_experts_implementation("doubled"),
    "a gate": set_each("_apply_gate", gates_by_relu),
    "an activation": set_each("act_fn", nn.GELU("tanh")),
    "more experts": set_each("top_k", 3, "gate"),
    "expert parallelism": set_each("_is_expert_parallel", True),
    "parameters": other_parameters,
    "hooks": hook_routers,
}


@pytest.mark.parametrize("implementation", ["batched_mm", "eager"])
def test_a_step_is_as_without_apply(implementation: str) -> None:
    model, plain = mixtral(implementation), mixtral(implementation)
    opfuser.apply(model)
    for _ in range(2):
        assert_equal_steps(step(model), step(plain))
    (done, *_) = report(model).computed
    assert "Experts" in done.operations
    assert done.called == (("mlp.gate", "chooses experts"),)
    assert {"layers.0", "layers.1"} <= set(paths(report(model)))


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(type(interface)._global_mapping, "doubled", doubled)
    model, plain = mixtral(), mixtral()
    opfuser.apply(model)
    before = step(model)
    for each in (model, plain):
        CHANGES[name](each)
    for _ in range(2):
        assert_equal_steps(step(model), step(plain))
    if name not in ("a loop", "expert parallelism"):
        with pytest.raises(AssertionError):
            assert_equal_steps(step(model), before)


def test_the_losses_of_routers() -> None:
    """Which transformers collects by hooks on the routers, that are called."""
    transformers = pytest.importorskip("transformers")
    config = copy.deepcopy(mixtral().config)
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).double()
    plain = copy.deepcopy(model)
    opfuser.apply(model)
    given: dict[str, Any] = {"input_ids": IDS, "labels": IDS, "output_router_logits": True}
    for _ in range(2):
        ours, theirs = model(**given), plain(**given)
        torch.testing.assert_close(ours.aux_loss, theirs.aux_loss)
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=1e-6)


def test_functions_that_keep_what_they_return() -> None:
    """Rows sorted by expert ask for torch's version so: what these read is not looked at."""
    from_versions = pytest.importorskip("transformers.utils.import_utils")
    from_versions.is_torch_less_or_equal.cache_clear()
    model = mixtral("grouped_mm").float()
    opfuser.apply(model)
    for _ in range(3):
        model(IDS)
    calls = {done.path: (done.calls, dict(done.fell_back)) for done in report(model).computed}
    assert calls["layers.0"] == calls["layers.1"] == (3, {})


@functools.cache
def _factors(count: int) -> list[float]:
    return [1 / count]


class Scaled(nn.Module):
    """Normalized and scaled by what a function keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x)) * _factors(3)[0]
        return y


def test_functions_that_keep_objects_are_called_once_before() -> None:
    """The first call alone is the model's own: a trace may have left stand-ins in an object."""
    _factors.cache_clear()
    model = Scaled()
    opfuser.apply(model)
    for _ in range(3):
        model(torch.randn(4, 8))
    done = next(done for done in report(model).computed if not done.path)
    assert (done.calls, done.fell_back) == (2, (("fills a cache", 1),))
