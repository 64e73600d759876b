"""Calls in modes of torch that the recorded one was not in, and calls that somebody watches."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import opfuser
from opfuser import RMSNorm
from opfuser.core.change_tracking import active_calls
from opfuser.engine.recorded.recordable import unrecorded
from tests.engine.recorded_toys import (
    ENOUGH,
    D,
    assert_same,
    block,
    both,
    dropout,
    image,
    mlp,
    output,
    passes,
    record,
    twin,
)


@contextmanager
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(count + 1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "more threads": _threads,
    "default dtype": _default_dtype,
    "default device": partial(torch.device, "meta"),
    "profiler": torch.profiler.profile,
    "anomalies": partial(torch.autograd.detect_anomaly, check_nan=False),
    "events": opfuser.events.record_events,
    "FLOP counter": partial(FlopCounterMode, display=False),
    "hooks": partial(
        torch.autograd.graph.saved_tensors_hooks, lambda t: t.clone(), lambda t: t
    ),
}  # fmt: skip


def split(module: nn.Module, x: Tensor, forward: str, backward: str) -> list[Tensor]:
    """As :func:`both`, each pass in a mode."""
    with MODES[forward]() if forward else nullcontext():
        y = module(x)
    dy = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    with MODES[backward]() if backward else nullcontext():
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:.*[pP]rofiler")
@pytest.mark.parametrize(
    ("recorded_in", "forward", "backward"),
    [*(("", *passes) for mode in MODES for passes in ((mode, ""), ("", mode))),
     ("autocast", "", ""), ("autocast", "autocast", "autocast")],
)  # fmt: skip
def test_modes_of_later_calls(recorded_in: str, forward: str, backward: str) -> None:
    module, x = block(), image()
    record(module, x, call=partial(split, forward=recorded_in, backward=""))
    passed = forward, backward
    with unrecorded():
        theirs = split(twin(block, module), x, *passed)
    for _ in range(ENOUGH):
        assert_same(split(module, x, *passed), theirs)


@contextmanager
def _other_attention() -> Iterator[None]:
    """As torch's ``context_parallel`` replaces it."""
    own = functional.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", partial(own))
        yield


@contextmanager
def _a_number_set_in_a_forward_pass() -> Iterator[None]:
    active_calls.depth += 1
    try:
        norm = RMSNorm(D)
        norm.eps = 0.5
    finally:
        active_calls.depth -= 1
    yield


REFUSING = [_threads, _other_attention, opfuser.events.record_events, torch.profiler.profile]
REFUSING += [torch.inference_mode, _a_number_set_in_a_forward_pass]


@pytest.mark.filterwarnings("ignore:.*[pP]rofiler")
@pytest.mark.parametrize("mode", REFUSING, ids=lambda mode: mode.__name__.strip("_"))
def test_calls_in_other_modes_run_the_program(mode: Callable[[], Any]) -> None:
    module, x = block(), torch.randn(2, 3, D)
    record(module, x, call=output)
    with mode(), passes() as names:
        output(module, x)
    assert not names


@pytest.mark.parametrize(
    "mode", [_threads, partial(torch.autocast, "cpu", torch.bfloat16)], ids=["threads", "autocast"]
)
def test_backward_in_other_modes_runs_the_program(mode: Callable[[], Any]) -> None:
    module, x = block(), image()
    record(module, x, call=lambda m, x: m(x).sum().backward())
    y = module(x)
    with mode(), passes() as names:
        y.sum().backward()
    assert not names


def test_events_are_told_of_recorded_calls() -> None:
    module, x = block(), image()
    record(module, x)
    told = []
    for made in (module, twin(block, module)):
        with opfuser.events.record_events() as log, unrecorded():
            both(made, x)
        told.append([type(event).__name__ for event in log if "Plan" not in type(event).__name__])
    assert "BytesSaved" in told[0]
    assert set(told[0]) <= set(told[1])


def test_a_flop_counter_sees_recorded_functions() -> None:
    module, x = block(), image()
    record(module, x)
    counted = []
    for made in (module, twin(block, module)):
        with FlopCounterMode(display=False) as counter, unrecorded():
            made(x).sum().backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_tangents_of_forward_mode() -> None:
    module, x = mlp(), torch.randn(2, 3, D)
    direction = torch.randn_like(x)

    def tangents(made: nn.Module) -> list[Tensor]:
        with torch.no_grad(), forward_ad.dual_level():
            y = made(forward_ad.make_dual(x, direction))
            return list(forward_ad.unpack_dual(y))

    with unrecorded():
        theirs = tangents(twin(mlp, module))
    for _ in range(ENOUGH):  # also of a call that is recorded with them
        assert_same(tangents(module), theirs)
    other = twin(mlp, module)
    record(other, x, call=output)
    assert_same(tangents(other), theirs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    module, x = dropout(), image()
    record(module, x)

    def step(made: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        y = checkpoint(made, x, use_reentrant=reentrant)
        return [y, *torch.autograd.grad(y.sum(), [x])] if not reentrant else _leaf_grads(y, x)

    with unrecorded():
        theirs = step(twin(dropout, module))
    for _ in range(ENOUGH):
        assert_same(step(module), theirs)


@pytest.mark.parametrize("before", range(4))
def test_a_checkpoint_of_what_saves_nothing(before: int) -> None:
    module = opfuser.Residual(nn.Linear(4, 4, dtype=torch.float64))  # the sum saves nothing
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(before):  # its recomputation may be the first call that is recorded
        module(x)
    (dx,) = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).sum(), [x])
    torch.testing.assert_close(dx, 1 + module[1].weight.sum(0).expand(3, 4))


def _leaf_grads(y: Tensor, x: Tensor) -> list[Tensor]:
    x.grad = None
    y.sum().backward()
    assert x.grad is not None
    return [y, x.grad]


def test_compiled_without_gradients() -> None:
    module, x = mlp(), torch.randn(2, 3, D)
    record(module, x, call=output)
    with torch.no_grad():
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x))


def test_the_kernel_of_the_last_call() -> None:
    attention = opfuser.DotProductAttention(2, causal=True)
    some, none = torch.randn(1, 4, 3 * D), torch.randn(0, 4, 3 * D)
    record(attention, some, call=output)
    choices = []
    for x in (some, none, some):  # the second one is not recorded
        output(attention, x)
        choices.append(str(attention.last_choice).split()[0])
    assert choices == ["cpu", "blockwise", "cpu"]


class _Method(str, enum.Enum):
    TANH = "tanh"


def _fp32(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x.float() @ x.float().transpose(-1, -2)


def _bf16(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.transpose(-1, -2)


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x * torch.rand_like(x)


def _forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return x * torch.rand_like(x)


def _default(x: Tensor) -> Tensor:
    with _default_dtype():
        return x.to(torch.float64) * torch.ones(D)


def _of_an_enumeration(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate=_Method.TANH)


class _Calls(opfuser.BasicOperation):
    """Calls a function in one of its passes."""

    recordable = True

    def __init__(self, function: Callable[[Tensor], Tensor], stage: str) -> None:
        super().__init__()
        self.function, self.stage = function, stage

    def op_forward(self, ctx: opfuser.OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return self.function(input_) if self.stage == "forward" else input_ * 2

    def op_backward(self, ctx: opfuser.OperationContext, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if self.stage == "forward":
            return torch.zeros_like(x), ()
        return self.function(x).sum(-1, keepdim=True).to(x.dtype) * x, ()


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize(
    ("function", "recorded"),
    [
        (_fp32, False),
        (_bf16, False),
        (_seeded, False),
        (_forked, False),
        (_default, False),
        (_of_an_enumeration, True),
    ],
)
def test_modes_that_an_operation_sets(
    function: Callable[[Tensor], Tensor], recorded: bool, stage: str
) -> None:
    """They are no calls of functions of torch that could be repeated: such passes are not."""

    def results(module: nn.Module) -> list[list[Tensor]]:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=function is not _bf16):
            return [[*both(module, x), torch.rand(3)] for _ in range(2 * ENOUGH)]

    module, x = opfuser.Sequential(_Calls(function, stage)), image()
    with unrecorded():
        theirs = results(opfuser.Sequential(_Calls(function, stage)))
    with passes() as names:
        ours = results(module)
    for own, others in zip(ours, theirs):
        assert_same(own, others)
        assert [t.dtype for t in own] == [t.dtype for t in others]
    assert (stage in names) == recorded
    if not recorded:
        plan = module.last_plan
        assert plan is not None
        (recording,) = plan.recordings
        refusal = "autocast, the default dtype or a random generator is set"
        assert recording.refusal == refusal


def _in_default_dtype(x: Tensor) -> Tensor:
    return x.to(torch.get_default_dtype())


def _deterministic(x: Tensor) -> Tensor:
    return x * (2 if torch.are_deterministic_algorithms_enabled() else 3)


@contextmanager
def _deterministically() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize(
    ("function", "mode"),
    [(_in_default_dtype, _default_dtype), (_deterministic, _deterministically)],
)
def test_modes_that_an_operation_asks_for(
    function: Callable[[Tensor], Tensor],
    mode: Callable[[], AbstractContextManager[Any]],
    stage: str,
) -> None:
    module, x = opfuser.Sequential(_Calls(function, stage)), image()
    record(module, x)
    with unrecorded(), mode():
        theirs = both(opfuser.Sequential(_Calls(function, stage)), x)
    with mode():
        ours = both(module, x)
    assert_same(ours, theirs)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
