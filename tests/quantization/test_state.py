"""The state of operations: copies, moves, what replaces its buffers, and what an update costs."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import opfuser
from opfuser.kernels.launch import recorded
from opfuser.kernels.quantize import TensorScaling
from opfuser.quantization.operation_state import state_of
from opfuser.quantization.quantizers import OperandQuantizer
from opfuser.quantization.scale_updates import update_scales
from opfuser.quantization.state import QuantizationState
from opfuser.recipe import DelayedScaling, Float8PredictedScaling, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

X = torch.linspace(-1, 3, 5 * 32).view(5, 32)
RECIPES = DelayedScaling(amax_history_len=2), Float8PredictedScaling(margin=0)


def sequence() -> Any:
    return opfuser.Sequential(opfuser.BasicLinear(32, 16))


def call(seq: Any, x: Tensor = X, recipe: Recipe = RECIPES[0]) -> None:
    with opfuser.autocast(recipe=recipe):
        seq(x)


def state(seq: Any) -> QuantizationState:
    return seq[0].quantization


def used_scale(seq: Any, recipe: Recipe = RECIPES[0]) -> float:
    """That of the next call's input."""
    with opfuser.autocast(recipe=recipe):
        scaling = OperandQuantizer(seq[0], recipe).given("input")
    assert isinstance(scaling, TensorScaling)
    return scaling.scale.item()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda seq: pickle.loads(pickle.dumps(seq))], ids=["copy", "pickle"]
)
def test_scales_of_copies_follow_their_own_calls(
    copied: Callable[[Any], Any], recipe: Recipe
) -> None:
    seq = sequence()
    call(seq, X, recipe)
    other = copied(seq)
    call(other, 4 * X, recipe)
    call(seq, 2 * X, recipe)
    assert used_scale(seq, recipe) == pytest.approx(448 / 6)
    assert used_scale(other, recipe) == pytest.approx(448 / 12)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_inference_first_and_training_later(recipe: Recipe) -> None:
    seq = sequence()
    with torch.inference_mode():
        call(seq, X, recipe)
        call(seq, X, DelayedScaling(amax_history_len=5))
        seq.load_state_dict(seq.state_dict())
    call(seq, 2 * X, recipe)
    with torch.inference_mode():
        assert used_scale(seq, recipe) == pytest.approx(448 / 6)


def replace_data(module: QuantizationState) -> None:
    for buffer in module.buffers():
        buffer.data = buffer.data.bfloat16()  # as FSDP does


def assign_others(module: QuantizationState) -> None:
    others = {name: t.bfloat16() for name, t in module.state_dict().items()}
    others["amax_history"] = others["amax_history"].t().contiguous().t()
    module.load_state_dict(others, assign=True)


@pytest.mark.parametrize(
    "change",
    [nn.Module.half, nn.Module.double, copy.deepcopy, replace_data, assign_others],
    ids=lambda change: change.__name__,
)
def test_replaced_buffers(change: Callable[[QuantizationState], object]) -> None:
    """New ones are followed, in fp32, and old ones are written to no more."""
    seq = sequence()
    call(seq)
    call(seq, 2 * X)
    own = state(seq)
    old = [t.detach() for t in own.buffers()]
    change(own)
    call(seq, 0.5 * X)
    used = {t.data_ptr() for t in own.buffers()}
    left = [t for t in old if t.data_ptr() not in used]
    assert bool(left) == (change in (replace_data, assign_others))
    before = [t.clone() for t in left]
    call(seq, 0.25 * X)
    assert used_scale(seq) == pytest.approx(448 / 1.5)
    assert {t.dtype for t in own.buffers()} == {torch.float32}
    assert all(t.is_contiguous() for t in own.buffers())
    for now, then in zip(left, before):
        torch.testing.assert_close(now, then, rtol=0, atol=0)


def test_states_without_a_recipe_are_left_alone() -> None:
    seq = sequence()
    call(seq)
    fresh = sequence()
    fresh.load_state_dict(seq.state_dict())
    before = [t.clone() for t in state(fresh).buffers()]
    update_scales()
    for now, then in zip(state(fresh).buffers(), before):
        torch.testing.assert_close(now, then, rtol=0, atol=0)


@pytest.mark.parametrize("first", [float("inf"), float("nan")])
def test_first_values_that_are_not_finite_are_known_after_loading(first: float) -> None:
    """What has loaded them goes on with the scale that the first call has left."""

    def scales(seq: Any) -> list[Tensor]:
        found = []
        for _ in range(3):
            call(seq)
            found.append(state(seq).scale.clone())
        return found

    ours, theirs = sequence(), sequence()
    call(ours, torch.full_like(X, first))
    kept = copy.deepcopy(ours.state_dict())
    expected = scales(ours)
    theirs.load_state_dict(kept)
    for own, other in zip(scales(theirs), expected):
        assert torch.equal(own, other)


def test_one_launch_updates_all_that_live() -> None:
    def programs() -> list[int]:
        gc.collect()
        with recorded() as launches:
            update_scales()
        return [one.grid[0] for one in launches if one.tensors[0].get_device() < 0]

    others = sum(programs())
    seqs = [sequence() for _ in range(3)]
    for seq in seqs:
        call(seq)
    del seq
    assert programs() == [others + 3]
    seqs.pop()
    assert programs() == [others + 2]


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_views_of_buffers_are_made_once() -> None:
    seq, recipe = sequence(), DelayedScaling()
    call(seq, X, recipe)
    with Calls() as calls:
        own = state_of(seq[0], recipe, None)
        for role in ("input", "weight", "grad_output"):
            scale, amax = own.scale_of(role), own.amax_seen(role)
            assert scale.shape == amax.shape == (1,)
    assert calls.names == []
    own.scale.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert own.scale_of("weight").item() == 2.0
