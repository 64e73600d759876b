"""What a checkpoint computes again follows its own forward: its recipe, its scales, its weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import opfuser
from opfuser import BasicLinear, Sequential
from opfuser.core.recomputation import computed_again, parts_under_way
from opfuser.errors import RecomputationError
from opfuser.quantization import checkpointed
from opfuser.quantization.quantizers import OperandQuantizer
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    NVFP4BlockScaling,
    Recipe,
)

from .test_calls_between import DIM, Experts, X, recomputing, states, swiglu, warm

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")

DELAYED = DelayedScaling(amax_history_len=1)
CURRENT = Float8CurrentScaling()
RECIPES: dict[str, Recipe] = {
    "delayed": DELAYED,
    "history": DelayedScaling(amax_compute_algo="most_recent", amax_history_len=4),
    "bf16 gradients": DelayedScaling(amax_history_len=1, backward_override="high_precision"),
}

Run = Callable[[nn.Module, Tensor], Any]
Calls = Callable[[Callable[[Tensor], Tensor]], list[Tensor]]


def plain(model: nn.Module, x: Tensor) -> Any:
    return model(x)


def by_hooks(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False)


def selective(model: nn.Module, x: Tensor) -> Any:
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(model, x, use_reentrant=False, context_fn=saved)


def reentrant(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=True)


class _Own(torch.autograd.Function):
    """A checkpoint as other libraries write theirs."""

    @staticmethod
    def forward(context: Any, model: nn.Module, x: Tensor) -> Any:
        context.model = model
        context.save_for_backward(x)
        with torch.no_grad():
            return model(x)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:
        x = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = context.model(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def by_another(model: nn.Module, x: Tensor) -> Any:
    return _Own.apply(model, x)


def by_module(model: nn.Module, x: Tensor) -> Any:
    """As the composable checkpoint of torch.distributed, whose hooks a module's forward opens."""
    if not hasattr(model, "checkpointed"):
        composable(model)
        model.__dict__["checkpointed"] = True
    return model(x)


def within(outer: Run, inner: Run) -> Run:
    def run(model: nn.Module, x: Tensor) -> Any:
        class Inner(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return inner(model, x)

        return outer(Inner(), x)

    return run


def beside_hooks(model: nn.Module, x: Tensor) -> Any:
    """Hooks of the caller's inside hide those of the checkpoint."""

    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Any:
            with save_on_cpu():
                return model(x)

    return checkpoint(Inside(), x, use_reentrant=False)


def late(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False, early_stop=False)


RUNS: dict[str, Run] = {
    "hooks": by_hooks,
    "reentrant": reentrant,
    "another": by_another,
    "module": by_module,
    "beside hooks": beside_hooks,
    "late": late,
    "hooks in hooks": within(by_hooks, by_hooks),
    "reentrant in hooks": within(by_hooks, reentrant),
    "hooks in reentrant": within(reentrant, by_hooks),
    "reentrant in reentrant": within(reentrant, reentrant),
    "hooks in another in hooks": within(by_hooks, within(by_another, by_hooks)),
}


def linears() -> nn.Module:
    """Two sequences that share an operation: it is called twice."""
    shared = BasicLinear(DIM, DIM)
    return nn.Sequential(Sequential(shared, opfuser.GELU()), nn.Tanh(), Sequential(shared))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "swiglu": swiglu,
    "linears": linears,
    "experts": Experts,
    "recomputing": recomputing,
}


def results(model: nn.Module, run: Run, calls: Calls) -> list[Tensor]:
    """Gradients of all inputs and parameters, and the scales that are left."""
    inputs: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        inputs.append(x.clone().requires_grad_())
        return run(model, inputs[-1])

    outputs = calls(call)
    found = [*outputs, *[x.grad for x in inputs], *[p.grad for p in model.parameters()]]
    for state in states(model):
        found += [state.scale, state.amax_history, state.amax]
    return [t.detach().clone() for t in found if t is not None]


def assert_as_saved(make: Callable[[], nn.Module], recipe: Recipe, run: Run, calls: Calls) -> None:
    """A checkpoint changes nothing, against a model that saves what backward needs."""
    saving = warm(make, recipe)
    assert bool(states(saving)) == isinstance(recipe, DelayedScaling)
    again = copy.deepcopy(saving)
    wanted, got = results(saving, plain, calls), results(again, run, calls)
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not checkpointed.is_any_known()


def micro_batches(recipe: Recipe, order: tuple[int, ...]) -> Calls:
    """Three forwards, each in a region that updates the scales, before the first backward."""

    def calls(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        outputs = []
        for factor in (1.0, 100.0, 0.1):
            with opfuser.autocast(recipe=recipe):
                outputs.append(call(X * factor))
        for n in order:
            outputs[n].backward(X)
        return outputs

    return calls


ORDERS = (0, 1, 2), (2, 1, 0)


def fp8_then_plain(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    with opfuser.autocast(recipe=DELAYED):
        y = call(X)
    z = call(X * 2)
    y.backward(X)
    z.backward(X)
    return [y, z]


def plain_then_fp8(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    y = call(X)
    with opfuser.autocast(recipe=DELAYED):
        z = call(X * 2)
        y.backward(X)
    z.backward(X)
    return [y, z]


def evaluation_between(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    with opfuser.autocast(recipe=DELAYED):
        y = call(X)
    with torch.no_grad():
        plainly = call(X * 3)
        with opfuser.autocast(recipe=DELAYED):
            quantized = call(X * 50)
    y.backward(X)
    return [y, plainly, quantized]


def two_recipes(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    with opfuser.autocast(recipe=DELAYED):
        y = call(X)
    with opfuser.autocast(recipe=CURRENT):
        z = call(X * 2)
        y.backward(X)
    z.backward(X)
    return [y, z]


def nested_regions(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    with opfuser.autocast(recipe=DELAYED):
        y = call(X)
        with opfuser.autocast(enabled=False):
            z = call(X)
            with opfuser.autocast(recipe=CURRENT):
                w = call(X)
                for each in (w, z, y):
                    each.backward(X)
    return [y, z, w]


class OpensItself(nn.Module):
    """Computes in the region around it, in its own, and in none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sequential(BasicLinear(DIM, DIM)) for _ in range(4))
        self.layers.append(Sequential(BasicLinear(DIM, DIM), recipe=DELAYED))

    def forward(self, x: Tensor) -> Any:
        around, own, inside, nowhere, given = self.layers
        with opfuser.autocast(recipe=CURRENT):
            x = own(x)
            with opfuser.autocast(recipe=DELAYED):
                x = inside(x)
        with opfuser.autocast(enabled=False):
            x = nowhere(x)
        return given(around(x))


def in_a_thread(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Autograd computes again in its own threads where there are GPUs."""
    with opfuser.autocast(recipe=DELAYED):
        y = call(X)
    with opfuser.autocast(recipe=CURRENT):
        thread = threading.Thread(target=y.backward, args=(X,))
        thread.start()
        thread.join()
    return [y]


def twice(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    with opfuser.autocast(recipe=DELAYED):
        y = call(X)
    for _ in range(2):
        with opfuser.autocast(recipe=DELAYED):
            pass
        y.backward(X, retain_graph=True)
    return [y]


NESTINGS: list[Calls] = [
    fp8_then_plain,
    plain_then_fp8,
    evaluation_between,
    two_recipes,
    nested_regions,
]
OPENED: list[Calls] = [plain_then_fp8, fp8_then_plain, nested_regions]
NESTED: list[Run] = [by_hooks, reentrant, by_another, within(reentrant, by_hooks)]
# Of models, recipes and kinds of checkpoints all pairs, but for those that differ in nothing.
CASES: list[tuple[Run, Callable[[], nn.Module], Recipe, Calls]] = [
    *(
        ((by_hooks, reentrant)[(n + m) % 2], make, recipe, micro_batches(recipe, order))
        for n, make in enumerate(MODELS.values())
        for m, recipe in enumerate(RECIPES.values())
        for order in [ORDERS[(n // 2 + m) % 2]]
    ),
    *((run, linears, DELAYED, micro_batches(DELAYED, (2, 1, 0))) for run in RUNS.values()),
    *(
        (run, (swiglu, recomputing)[(n + m) % 2], DELAYED, calls)
        for n, run in enumerate(NESTED)
        for m, calls in enumerate(NESTINGS)
    ),
    *((run, OpensItself, DELAYED, OPENED[n % 3]) for n, run in enumerate([*RUNS.values()][2:])),
    *((run, OpensItself, DELAYED, calls) for run in (by_hooks, reentrant) for calls in OPENED),
    *((run, swiglu, DELAYED, in_a_thread) for run in RUNS.values()),
    *(
        (selective, swiglu, recipe, micro_batches(recipe, (1, 0)))
        for recipe in (CURRENT, Float8BlockScaling())
    ),
    *((run, linears, DELAYED, twice) for run in (by_hooks, late, RUNS["hooks in hooks"])),
]


@pytest.mark.parametrize(("run", "make", "recipe", "calls"), CASES)
def test_a_checkpoint_changes_nothing(
    run: Run, make: Callable[[], nn.Module], recipe: Recipe, calls: Calls
) -> None:
    """Several forwards before a backward, nested regions, other threads, graphs that are kept."""
    assert_as_saved(make, recipe, run, calls)


@pytest.mark.parametrize(
    ("recipe", "run", "later"),
    [
        (DELAYED, by_hooks, True), (DELAYED, reentrant, False), (CURRENT, reentrant, True),
        (Float8BlockScaling(), by_hooks, False), (NVFP4BlockScaling(), by_hooks, True),
    ],
)  # fmt: skip
def test_kept_weights(recipe: Recipe, run: Run, later: bool) -> None:
    def calls(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(3)  # of stochastic rounding
        with opfuser.keep_quantized_weights():
            with opfuser.autocast(recipe=recipe):
                outputs = [call(X), call(2 * X)]
            if not later:
                for y in outputs:
                    y.backward(X)
        if later:
            for y in outputs:
                y.backward(X)
        return outputs

    assert_as_saved(swiglu, recipe, run, calls)


def test_weights_kept_in_forward_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight is quantized once for a forward and what is computed again after the block."""
    rounded = []
    original = OperandQuantizer.quantize
    monkeypatch.setattr(
        OperandQuantizer,
        "quantize",
        lambda self, role, *args, **how: rounded.append(role) or original(self, role, *args, **how),
    )
    model = swiglu()
    with opfuser.keep_quantized_weights(), opfuser.autocast(recipe=CURRENT):
        y = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False)
    y.backward(X)
    assert rounded.count("weight") == 2


def test_formats_of_gradients_that_alternate() -> None:
    """A scale for E5M2 would have all of a gradient in E4M3 saturate."""
    hybrid, narrow = DelayedScaling(), DelayedScaling(fp8_format=Format.E4M3, margin=1)
    model = warm(lambda: Sequential(BasicLinear(DIM, DIM)), hybrid)
    weight = next(model.parameters())
    # The state is that of the last recipe of forward: each of them has a backward with the other's.
    for recipes, order in product(((hybrid, narrow), (narrow, hybrid)), ((0, 1), (1, 0))):
        pairs = []
        for recipe in recipes:
            x = X.clone().requires_grad_()
            with opfuser.autocast(recipe=recipe):
                pairs.append((x, model(x)))
        for n in order:
            x, y = pairs[n]
            y.backward(X)
            wanted = X @ weight
            error = (x.grad - wanted).norm() / wanted.norm()
            assert error < 0.1


def test_a_region_after_a_disabled_one_is_not_the_outermost() -> None:
    model = warm(lambda: Sequential(BasicLinear(DIM, DIM)), DELAYED)
    (state,) = states(model)
    with opfuser.autocast(recipe=DELAYED):
        before = state.scale.clone()
        model(100 * X)
        with opfuser.autocast(enabled=False), opfuser.autocast(recipe=DELAYED):
            assert torch.equal(state.scale, before)
    with opfuser.autocast(enabled=False), opfuser.autocast(recipe=DELAYED):
        assert state.scale[0] < before[0]


def test_a_backward_leaves_the_state_to_the_last_recipe() -> None:
    short, long = DelayedScaling(amax_history_len=2), DelayedScaling(amax_history_len=8)
    model = Sequential(BasicLinear(DIM, DIM))
    x = X.clone().requires_grad_()
    with opfuser.autocast(recipe=short):
        y = model(x)
    for _ in range(6):
        with opfuser.autocast(recipe=long):
            model(X)
    (state,) = states(model)
    history = state.amax_history.clone()
    y.backward(X)
    assert torch.equal(state.amax_history, history)
    assert state.recipe == long


def test_more_calls_than_in_forward_are_refused() -> None:
    seq = warm(lambda: Sequential(BasicLinear(DIM, DIM)), DELAYED)
    counts = iter([1, 2])

    def run(x: Tensor) -> Any:
        for _ in range(next(counts)):
            x = seq(x)
        return x

    x = X.clone().requires_grad_()
    with opfuser.autocast(recipe=DELAYED):
        y = checkpoint(run, x, use_reentrant=True)
    with pytest.raises(RecomputationError, match=r"makes the calls of its forward.*after the 1 of"):
        y.backward(X)


def by_unpacking(model: nn.Module, x: Tensor) -> Iterator[Any]:
    """Computes again in a hook that belongs to no checkpoint of torch's."""
    own = x.detach()

    def unpack(_: None) -> Tensor:
        with torch.enable_grad():
            model(own.requires_grad_())
        return own

    with saved_tensors_hooks(lambda t: None, unpack):
        yield x * x


@pytest.mark.parametrize("recipe", [DELAYED, None])
def test_a_forward_that_cannot_be_told_is_refused(recipe: Recipe | None) -> None:
    model = warm(swiglu, DELAYED)
    x = X.clone().requires_grad_()
    (y,) = by_unpacking(model, x)
    region = nullcontext() if recipe is None else opfuser.autocast(recipe=recipe)
    refusal = pytest.raises(
        RecomputationError, match=r"has the scales of its forward.*by no checkpoint that is known"
    )
    with region, nullcontext() if recipe is None else refusal:
        y.backward(X)


def test_nothing_is_computed_twice_here() -> None:
    assert computed_again() is None
    assert parts_under_way() == []
    with torch.no_grad(), save_on_cpu():
        assert computed_again() is None
        assert parts_under_way() == []


def test_functions_of_the_library_are_no_checkpoints() -> None:
    seen: list[Any] = []

    class Asking(BasicLinear):
        def op_forward(self, *args: Any, **kwargs: Any) -> Any:
            seen.append((parts_under_way(), computed_again()))
            return super().op_forward(*args, **kwargs)

        def op_backward(self, *args: Any, **kwargs: Any) -> Any:
            seen.append((parts_under_way(), computed_again()))
            return super().op_backward(*args, **kwargs)

    Sequential(Asking(DIM, DIM))(X.clone().requires_grad_()).backward(X)
    assert seen == [([], None)] * 2


def test_hooks_stay_as_they_are() -> None:
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with save_on_cpu():
        below = top(False)
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            before = top(False)
            parts_under_way()
            assert top(False) == before
        assert top(False) == below
    assert top(False) is None
