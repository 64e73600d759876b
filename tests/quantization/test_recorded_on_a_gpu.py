"""What a recorded step calls where kernels are launched: counted, with launches that do nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

import opfuser
from opfuser import torch_internals
from opfuser.kernels.launch import Launch, recorded
from opfuser.quantization import products
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PredictedScaling,
    MXFP8BlockScaling,
    Recipe,
)
from opfuser.runtime.recording import watching

# Launches of forward and backward, and tensors that they allocate, besides six GEMMs.
CALLS: dict[str, tuple[Recipe | None, int, int]] = {
    "bf16": (None, 5, 8),
    "delayed": (DelayedScaling(), 11, 16),
    "predicted": (Float8PredictedScaling(), 11, 16),
    "current": (Float8CurrentScaling(), 17, 17),
    "blocks": (Float8BlockScaling(), 11, 28),
    "mxfp8": (MXFP8BlockScaling(), 15, 32),
}


def product(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    if has_torch_function((a, b)):
        return handle_torch_function(product, (a, b), a, b, *rest)
    return a.new_zeros(a.shape[0], b.shape[1], dtype=rest[7])


nothing = "".format  # takes any arguments


def prepared(launch: Launch, tensors: Any, ints: Any) -> Any:
    return nothing, launch.name, (), False, tuple(launch.constants.values())


def noted(own: Launch, grid: Any, tensors: Any, ints: Any = (), floats: Any = ()) -> None:
    if watching.watcher is not None:
        watching.watcher.note_launch(own, grid, tensors, ints, floats)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Launch, "__call__", noted)
    monkeypatch.setattr(Launch, "prepared", prepared)
    monkeypatch.setattr(torch, "_scaled_mm_v2", product)
    monkeypatch.setattr(products, "has_hardware", lambda device, recipe: True)
    monkeypatch.setattr(torch_internals, "cuda_stream", lambda device: 0)
    with recorded():  # with kernels for a CPU
        yield


def recorded_step(
    recipe: Recipe | None, features: int = 512, begun: Callable[[], None] = lambda: None
) -> str:
    model = opfuser.Sequential(
        opfuser.RMSNorm(features),
        opfuser.Linear(features, 1024, bias=False),
        opfuser.SwiGLU(),
        opfuser.Linear(512, features, bias=False),
    ).to(torch.bfloat16)
    x = torch.randn(512, features, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(5):
        begun()
        with opfuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(torch.ones_like(y))
    return model.last_plan.recorded


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_recorded_step(name: str) -> None:
    recipe, launches, allocations = CALLS[name]
    lines = recorded_step(recipe)
    calls = Counter(re.findall(r"([a-zA-Z]\w*)\(", re.sub(r"#.*", "", lines)))
    for word in ("forward", "backward", "data_ptr", "clear", "current_stream", "append"):
        calls.pop(word, None)
    assert sum(calls.pop(name, 0) for name in ("product", "linear", "mm", "matmul")) == 6
    assert calls.pop("launch") == launches
    assert calls.pop("empty_strided") == allocations
    # Weights are held as forward has read them, that of the norm for its output again. Of bf16
    # gradients are transposed; else memory is allocated as it is read.
    views = {"detach": 3} if recipe else {"detach": 3, "t": 2}
    per_tensor = {"scratch": 2} if recipe and recipe.float8_per_tensor_scaling() else {}
    kept = {"clones": 1} if name in ("delayed", "predicted") else {}
    measured = {"zeros_for": 2} if name == "current" else {}
    assert calls == {**views, **per_tensor, **kept, **measured}


def test_a_norm_computed_again_is_given_both_weights() -> None:
    """That of forward, and the one of backward: they were one while the step was recorded."""
    lines = recorded_step(None)
    weight, held = re.findall(r"(\w+) = (?:parameters\[0\]|p0\.detach\(\))", lines)
    assert weight == "p0"
    saved = re.findall(r"\w+", re.findall(r"return \w+, \[\], \[(.*?)\]", lines, re.DOTALL)[0])
    (launched,) = re.findall(r"norm_backward, (.*?)\)\n", lines, re.DOTALL)
    given = re.findall(r"s(\d+)\.data_ptr", launched)
    assert {str(saved.index(held)), str(len(saved))} <= set(given)


@pytest.mark.parametrize("name", [name for name, (recipe, *_) in CALLS.items() if recipe])
def test_layouts_that_gemms_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of scales that are small enough to be kept from call to call."""
    steps: list[list[Any]] = []

    def noted(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        if has_torch_function((a, b)):
            return handle_torch_function(noted, (a, b), a, b, *rest)
        operands = (a, b, *rest[0], *rest[3])
        steps[-1].append([(t.shape, t.stride(), t.dtype) for t in operands])
        return product(a, b, *rest)

    monkeypatch.setattr(torch, "_scaled_mm_v2", noted)
    recorded_step(CALLS[name][0], 128, lambda: steps.append([]))
    assert len(steps[0]) == 6
    assert steps[-1] == steps[0]


def test_copies_of_scales_lie_as_each_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binaries of backward tell apart which addresses are multiples of 16."""
    made: list[Tensor] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: (made.extend(to), copy(to, of)))
    recorded_step(DelayedScaling(), begun=made.clear)
    assert len(made) == 2
    for scales in made:
        assert scales.shape == (3,)
        assert scales.data_ptr() % 16 == 0
        assert scales.is_contiguous()
