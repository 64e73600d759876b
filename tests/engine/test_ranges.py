"""Ranges of steps in the profiles of torch.profiler and of Nsight Systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import profiler
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import opfuser
from opfuser import GELU, BasicOperation, Linear, RMSNorm
from opfuser.engine import ranges
from tests.replay.conftest import cpu, device, replaying

__all__ = ["cpu", "device", "replaying"]


def ranges_of(call: Callable[[], Any]) -> list[FunctionEvent]:
    """The ranges of a call's steps in its profile, in the order in which they began."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        call()
    own = [e for e in found.events() if e.name.startswith("opfuser::")]
    return sorted(own, key=lambda e: e.time_range.start)


def names(call: Callable[[], Any]) -> list[str]:
    return [e.name for e in ranges_of(call)]


def inside(event: FunctionEvent) -> Iterator[str]:
    """Names of all that ran within a range."""
    for child in event.cpu_children:
        yield child.name
        yield from inside(child)


def model() -> opfuser.Sequential:
    mlp = opfuser.Sequential({"act": GELU(), "down": Linear(16, 8)})
    layers = {"norm": RMSNorm(8), "up": Linear(8, 16), "mlp": mlp, "drop": opfuser.Dropout(0.5)}
    return opfuser.Sequential({**layers, "tanh": nn.Tanh(), "head": Linear(8, 4, bias=False)})


def step(seq: nn.Module, x: Tensor) -> Callable[[], None]:
    return lambda: seq(x).sum().backward()


@pytest.mark.parametrize("planned", [True, False])
def test_every_step_of_both_passes_has_a_range(planned: bool) -> None:
    seq, x = model(), torch.randn(4, 8)
    if planned:
        seq(x)
    assert names(step(seq, x)) == [
        "opfuser::norm-up::norm_linear.forward",
        "opfuser::up-mlp.down::activation_linear.forward",
        "opfuser::drop::Dropout.forward",
        "opfuser::head::BasicLinear.forward",
        "opfuser::head::BasicLinear.backward",
        "opfuser::drop::Dropout.backward",
        "opfuser::up-mlp.down::activation_linear.backward",
        "opfuser::norm-up::norm_linear.backward",
    ]
    with torch.no_grad():
        assert all(name.endswith(".forward") for name in names(lambda: seq(x)))


def test_passes_that_are_fused_differently_name_their_own_steps() -> None:
    block = opfuser.Sequential(Linear(8, 8), opfuser.MakeExtraOutput(), Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)

    def call() -> None:
        y, extra = block(x)
        (y.sum() + extra.sum()).backward()

    found = names(call)
    plan = block.last_plan
    assert plan is not None
    assert "backward_linear_add" in plan.fused("backward")
    for stage, steps in (("forward", plan.forward), ("backward", plan.backward[::-1])):
        kinds = [s.fusion or type(s.op).__name__ for s in steps]
        own = [name.split("::")[-1] for name in found if name.endswith(f".{stage}")]
        assert own == [f"{kind}.{stage}" for kind in kinds]
    assert "opfuser::1-2::backward_linear_add.backward" in found


def test_range_holds_what_its_step_ran_and_nothing_else() -> None:
    seq = opfuser.Sequential(Linear(8, 8, bias=False), opfuser.Dropout(0.5))
    x = torch.randn(4, 8, requires_grad=True)
    ran = {e.name.split("::")[-1]: set(inside(e)) for e in ranges_of(step(seq, x))}
    for stage in ("forward", "backward"):
        assert "aten::mm" in ran[f"BasicLinear.{stage}"]
        assert "aten::mm" not in ran[f"Dropout.{stage}"]
    assert "aten::bernoulli_" in ran["Dropout.forward"]
    assert "aten::bernoulli_" not in ran["BasicLinear.forward"]
    assert not any(name.startswith("opfuser::") for own in ran.values() for name in own)


def test_names_follow_where_an_operation_stands() -> None:
    x = torch.randn(4, 8)
    seq = opfuser.Sequential(nn.Tanh(), RMSNorm(8))
    assert names(lambda: seq(x)) == ["opfuser::1::RMSNorm.forward"]
    del seq[0]
    assert names(lambda: seq(x)) == ["opfuser::0::RMSNorm.forward"]
    seq.register_forward_hook(lambda *_: None)  # called as a module, not taken into the group
    outer = opfuser.Sequential({"inner": seq})
    assert names(lambda: outer(x)) == ["opfuser::inner.0::RMSNorm.forward"]
    assert names(lambda: RMSNorm(8)(x)) == ["opfuser::RMSNorm.forward"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the names of ranges that begin."""
    names: list[str] = []

    class Range(profiler.record_function):
        def __init__(self, name: str) -> None:
            names.append(name)
            super().__init__(name)

    monkeypatch.setattr(ranges, "record_function", Range)
    return names


def test_without_a_profiler_no_range_is_opened(opened: list[str]) -> None:
    call = step(model(), torch.randn(4, 8))
    call()
    assert not opened
    with profiler.profile():
        call()
    assert len(opened) == 8
    call()
    assert len(opened) == 8


class Failing(BasicOperation):
    """Raises in the pass that it is told to."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def op_forward(self, ctx: Any, input: Tensor, **_: Any) -> Tensor:
        if self.stage == "forward":
            raise ZeroDivisionError
        return input * 2

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[()]]:
        if self.stage == "backward":
            raise ZeroDivisionError
        return grad_output * 2, ()


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_range_ends_where_its_step_raises(stage: str) -> None:
    seq, x = opfuser.Sequential(Failing(stage)), torch.randn(4, 8, requires_grad=True)
    errors = []

    def call() -> None:
        try:
            seq(x).sum().backward()
        except ZeroDivisionError as error:
            errors.append(error)  # and with it the frames
        GELU()(x.detach())

    failed, behind = ranges_of(call)[-2:]
    assert failed.name == f"opfuser::0::Failing.{stage}"
    assert behind.name == "opfuser::GELU.forward"
    assert failed.name not in {e.name for e in parents(behind)}
    assert len(errors) == 1


def parents(event: FunctionEvent) -> Iterator[FunctionEvent]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


def test_transforms_run_within_ranges() -> None:
    seq, x = opfuser.Sequential(GELU()), torch.randn(3, 4, 8)
    with torch.no_grad():
        wanted, result = torch.vmap(seq)(x), []
        found = names(lambda: result.append(torch.vmap(seq)(x)))
    assert found == ["opfuser::0::GELU.forward"]
    assert torch.equal(result[0], wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it traces
@pytest.mark.parametrize("of_user", [True, False])
def test_compiled_code_has_no_ranges_and_is_not_traced_again(
    of_user: bool, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    # With an operation of the user Dynamo traces the steps itself; without, AOTAutograd does.
    middle = Failing("none") if of_user else opfuser.ReLU()
    seq, x = opfuser.Sequential(RMSNorm(8), middle, GELU()), torch.randn(4, 8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(seq, backend=counter, fullgraph=True)
    call = step(compiled, x)
    with monkeypatch.context() as patch:
        patch.setattr(profiler, "_is_profiler_enabled", True)  # while it is traced
        call()
    assert not opened
    call()
    assert names(call) == []
    assert counter.frame_count == 1


def test_replayed_pass_is_one_range(replaying: None, device: torch.device) -> None:
    seq = opfuser.Sequential({"norm": RMSNorm(8), "drop": opfuser.Dropout(0.5)}).to(device)
    x = torch.randn(4, 8, device=device)
    call = step(seq, x)
    for _ in range(3):
        call()
    assert names(call) == [
        "opfuser::norm-drop::replay.forward",
        "opfuser::norm-drop::replay.backward",
    ]
    with torch.no_grad():
        for _ in range(3):
            seq(x)
        assert names(lambda: seq(x)) == ["opfuser::norm-drop::replay.forward"]


def test_recording_under_a_profiler_shows_steps_once(replaying: None, device: torch.device) -> None:
    seq = opfuser.Sequential(opfuser.Dropout(0.5)).to(device)
    call = step(seq, torch.randn(4, 8, device=device, requires_grad=True))
    passes = [names(call) for _ in range(5)]
    steps = ["opfuser::0::Dropout.forward", "opfuser::0::Dropout.backward"]
    replays = ["opfuser::0::replay.forward", "opfuser::0::replay.backward"]
    assert passes[0] == steps
    assert passes[-1] == replays
    recorded = [name for own in passes[1:] for name in own if name in steps]
    assert recorded.count(steps[0]) == 1  # as it was recorded
    assert recorded.count(steps[1]) == 2  # its first one runs as usual


@pytest.mark.gpu
def test_kernels_of_a_gpu_stand_under_the_steps_that_launched_them() -> None:
    seq, x = model().cuda(), torch.randn(4, 8, device="cuda")
    step(seq, x)()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as found:
        step(seq, x)()
        torch.cuda.synchronize()
    events, gpu = found.events(), torch.autograd.DeviceType.CUDA
    ranges = [e for e in events if e.name.startswith("opfuser::")]
    of_host, of_gpu = ([e for e in ranges if (e.device_type == gpu) == on] for on in (False, True))
    assert len(of_host) == 8
    assert sorted(e.name for e in of_gpu) == sorted(e.name for e in of_host)
    kernels = [e.time_range for e in events if e.device_type == gpu and e not in of_gpu]
    for own in (e.time_range for e in of_gpu):
        assert any(own.start <= k.start and k.end <= own.end for k in kernels)


@pytest.mark.gpu
def test_nvtx_gets_the_ranges(opened: list[str]) -> None:
    seq, x = model().cuda(), torch.randn(4, 8, device="cuda")
    with profiler.emit_nvtx():
        step(seq, x)()
    assert any(name.endswith(".forward") for name in opened)
    assert any(name.endswith(".backward") for name in opened)
