"""The switch, what it shows, and why calls are not replayed."""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import opfuser
from opfuser.engine.replayed import options
from opfuser.engine.replayed.options import current
from opfuser.errors import ArgumentError
from opfuser.recipe import DelayedScaling
from tests.replay.models import DIM, assert_equal, block, code, count, draw, replays, twin, warm
from tests.replay.recorded import RecordedGraph


def test_by_default_it_is_decided_from_times(device: torch.device) -> None:
    assert current().mode == "auto"
    model = block(device)
    warm(model, device, 2)
    (record,) = replays(model)
    assert (record.instances, record.refusal) == (0, None), "two calls are too few to decide from"


def test_of_a_sequence(device: torch.device) -> None:
    model = block(device)
    model.replay = "on"
    warm(model, device, 4)
    assert count(model) == 3
    model.replay = "off"
    warm(model, device, 2)
    assert count(model) == 3
    assert opfuser.Sequential(opfuser.Identity(), replay="auto").replay == "auto"
    with opfuser.replay("on"):
        warm(model, device, 2)
    assert count(model) == 3, "a sequence that says so overrides the program"


def test_switches_undo_their_own_change() -> None:
    first = opfuser.replay("on")
    assert current().share == 0.5
    with opfuser.replay("auto"):
        assert current().share == 0.05
    second = opfuser.replay("auto", after=7, instances=3, memory=0.25)
    now = current()
    assert now.share == 0.25
    assert (now.mode, now.after, now.instances, now.memory) == ("auto", 7, 3, 0.25)
    first.__exit__()
    assert current() is now
    second.__exit__()
    assert current().mode == "auto"


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "yes"}, {"after": 0}, {"instances": 0}, {"memory": 0}, {"memory": 2}],
    ids=str,
)
def test_values_outside_their_domain(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"opfuser\.replay"):
        opfuser.replay(**wrong)
    with pytest.raises(ArgumentError, match=r"replay is 'off', 'on' or 'auto' \(Sequential\)"):
        opfuser.Sequential(replay="yes")


def test_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read when the module is loaded, here once more."""
    monkeypatch.setenv("OPFUSER_REPLAY", "off")
    spec = importlib.util.spec_from_file_location(f"{options.__name__}_again", options.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)
    spec.loader.exec_module(again)
    assert again.current().mode == "off"


def test_plan_and_log(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="opfuser")
    model = block(device)
    with opfuser.replay("on"):
        warm(model, device, 3)
    (record,) = replays(model)
    assert (record.instances, record.replayed, record.refusal) == (1, 2, None)
    assert record.bytes > 0
    size = f"{record.bytes / 2**20:.1f} MiB"
    plan = model.last_plan
    assert f"replay of 0-7: 2 calls replayed, 1 recording of {size}" in str(plan)
    assert plan == model.plan(draw(device).requires_grad_()), "recordings are no part of a plan"
    lines = [r.getMessage() for r in caplog.records if "[replay]" in r.getMessage()]
    assert [line.split(":")[0] for line in lines] == [
        "[replay] captured MakeExtraOutput to AddExtraInput (8 operations)"
    ]


class Custom(opfuser.BasicOperation):
    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        return input_ * 2

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output * 2, ()


class Promising(Custom):
    replayable: ClassVar[bool] = True


class Inheriting(Promising):
    pass


class Counting(Promising):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        self.calls += 1
        return input_ * 2

    replayable: ClassVar[bool] = True


class Reading(Promising):
    replayable: ClassVar[bool] = True

    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        raise_in_a_capture(input_)
        return input_ * 2


def raise_in_a_capture(x: Tensor) -> None:
    if x.is_cuda:
        x.sum().item()
    elif RecordedGraph.under_way():
        raise RuntimeError("the host may not read a value now")


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (Custom, "OPERATION"),
        (Promising, ""),
        (Inheriting, "OPERATION"),
        (Counting, "OPERATION"),
        (Reading, "CAPTURE"),
    ],
)
def test_users_operations(op: type[Custom], reason: str, device: torch.device) -> None:
    model = opfuser.Sequential(opfuser.GELU(), op(), opfuser.Bias(DIM, device=device))
    with opfuser.replay("on"):
        for _ in range(4):
            x = draw(device)
            assert_equal(model(x).detach(), model[2](model[0](x) * 2).detach())
    assert code(model) == reason
    assert count(model) == (0 if reason else 3)


def test_a_step_aside_is_told_once(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    for mode, level in (("on", logging.WARNING), ("auto", logging.INFO)):
        caplog.clear()
        kind = type(f"Custom_{mode}_{device.type}", (Custom,), {})  # once per text
        models = [opfuser.Sequential(kind()) for _ in range(2)]
        with opfuser.replay(mode), caplog.at_level(logging.INFO, logger="opfuser"):
            for model in models * 5:
                model(draw(device))
        (record,) = [r for r in caplog.records if "[replay]" in r.getMessage()]
        assert record.levelno == level
        assert record.getMessage() == (
            f"[replay] steps aside: OPERATION: op 0, {kind.__name__}, does not promise that it "
            "only launches kernels"
        )


def test_keyword_arguments(device: torch.device) -> None:
    model = opfuser.Sequential(opfuser.RotaryEmbedding(2, 4), opfuser.GELU())
    x = torch.randn(1, 3, 24, device=device)
    positions = torch.tensor([2, 0, 1], device=device)
    with opfuser.replay("on"):
        for _ in range(3):
            y = model(x, op_kwargs={0: {"positions": positions}})
            assert not torch.equal(y, model(x))
            assert code(model) == ""
        model(x, op_kwargs={0: {"positions": positions}})
    assert code(model) == "OP_KWARGS"


def test_what_torch_is_to_see(device: torch.device) -> None:
    model, x = block(device), draw(device)

    def within(manager: Any) -> str:
        with manager:
            model(x).sum().backward()
        return code(model)

    with opfuser.replay("on"):
        warm(model, device, 3)
        assert within(torch.autograd.graph.save_on_cpu()) == "SAVED_TENSOR_HOOKS"
        assert within(opfuser.keep_quantized_weights()) == "KEPT_WEIGHTS"
        assert within(opfuser.watch_quantization()) == "WATCHED"
        assert within(FlopCounterMode(display=False)) == "TORCH_MODE"
        with pytest.warns(UserWarning, match="Anomaly Detection"):
            assert within(torch.autograd.detect_anomaly()) == "ANOMALY_MODE"
        assert within(torch.autograd.forward_ad.dual_level()) == "TRANSFORM"
        with torch.no_grad():
            model = opfuser.Sequential(opfuser.GELU())
            torch.func.vmap(model)(x)
        assert code(model) in ("TRANSFORM", "TENSOR_TYPE")


@pytest.mark.usefixtures("replaying")
def test_a_mode_that_is_to_see_backward_alone(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    warm(model, device, 4)
    x, dy = draw(device), draw(device)
    flops = []
    for m in (model, other):
        y = m(x.clone().requires_grad_())
        with FlopCounterMode(display=False) as counter:
            y.backward(dy)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0
    for p, q in zip(model.parameters(), other.parameters()):
        assert_equal(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
def test_checkpoints_of_scales_that_are_kept(device: torch.device) -> None:
    """A replayed call would have the scales of now, and count its values twice."""
    model, x = block(device), draw(device)
    other = twin(model)
    with opfuser.replay("on"):
        for m in (model, other):
            outputs = []
            for factor in (1, 1, 1, 50):
                own = (x * factor).requires_grad_()
                with opfuser.autocast(recipe=DelayedScaling(amax_history_len=1)):
                    again = m is model
                    outputs.append(checkpoint(m, own, use_reentrant=True) if again else m(own))
            assert code(model) == "CHECKPOINT"
            for y in outputs:
                y.sum().backward()
        assert code(model) == "CHECKPOINT"
    for p, q in zip(model.parameters(), other.parameters()):
        assert_equal(p.grad, q.grad)


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, device: torch.device) -> None:
    model = block(device, dropout=0.5)
    other = twin(model)
    for seed in range(4):
        x, dy = draw(device), draw(device)
        for m in (model, other):
            torch.manual_seed(seed)
            m.zero_grad()
            y = checkpoint(m, x.clone().requires_grad_(), use_reentrant=reentrant)
            y.backward(dy)
        for p, q in zip(model.parameters(), other.parameters()):
            assert_equal(p.grad, q.grad)


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("target", ["main_grad", "grad"])
def test_accumulation_by_operations(target: str, device: torch.device) -> None:
    torch.manual_seed(0)
    option = {f"accumulate_into_{target}": True}
    model = opfuser.Sequential(
        opfuser.Linear(DIM, DIM, device=device, **option),
        opfuser.GELU(),
        opfuser.Linear(DIM, DIM, device=device, **option),
    )
    other = twin(model)
    for m in (model, other):
        for p in m.parameters():
            p.main_grad = torch.zeros_like(p)
    for step in range(9):
        x, dy = draw(device), draw(device)
        for m in (model, other):
            for p in m.parameters():
                p.grad_added_to_main_grad = False
            m(x).backward(dy)
        for p, q in zip(model.parameters(), other.parameters()):
            assert_equal(p.grad, q.grad)
            assert_equal(p.main_grad, q.main_grad)
            assert p.grad_added_to_main_grad == q.grad_added_to_main_grad
        if step % 3 == 2:
            model.zero_grad()
            other.zero_grad()
    assert count(model) == 8
    assert code(model) == ""


@pytest.mark.usefixtures("replaying")
def test_main_grad_that_is_overwritten(device: torch.device) -> None:
    model = opfuser.Sequential(
        opfuser.Linear(DIM, DIM, bias=False, device=device, accumulate_into_main_grad=True)
    )
    other = twin(model)
    for m in (model, other):
        m[0].weight.main_grad = torch.zeros_like(m[0].weight)
        m[0].weight.overwrite_main_grad = True
    for _ in range(4):
        x, dy = draw(device), draw(device)
        for m in (model, other):
            m(x).backward(dy)
        assert_equal(model[0].weight.main_grad, other[0].weight.main_grad)


@pytest.mark.usefixtures("replaying")
def test_main_grad_of_a_weight_that_one_backward_pass_uses_twice(device: torch.device) -> None:
    """A forward within a backward pass tells whose part its own backward pass is."""
    model = opfuser.Sequential(
        opfuser.BasicLinear(DIM, DIM, device=device, accumulate_into_main_grad=True)
    )
    other = twin(model)
    for m in (model, other):
        m[0].weight.main_grad = torch.zeros_like(m[0].weight)
        m[0].weight.overwrite_main_grad = True
    for _ in range(5):
        x, dy = draw(device), draw(device)
        for m in (model, other):
            y = checkpoint(m, x.clone().requires_grad_(), use_reentrant=True)
            checkpoint(m, y, use_reentrant=True).backward(dy)
        assert_equal(model[0].weight.main_grad, other[0].weight.main_grad)
    assert count(model) > 0


def test_memory_is_limited(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [block(device) for _ in range(3)]
    with opfuser.replay("on", memory=1e-9):
        warm(models[0], device, 4)
    assert code(models[0]) == "MEMORY"
    if device.type == "cuda":
        return  # a pool has no less than 2 MiB
    with opfuser.replay("on", memory=1.0):
        warm(models[1], device, 3)
        size = replays(models[1])[0].bytes
        monkeypatch.setattr(RecordedGraph, "limit", 1.5 * size)
        for _ in range(2):  # both take turns
            for model in models[1:]:
                warm(model, device, 3)
    assert count(models[1]) > 4
    assert [replays(model)[0].instances for model in models[1:]] == [0, 1]


def test_backward_that_cannot_be_recorded(device: torch.device) -> None:
    class Odd(Promising):
        replayable: ClassVar[bool] = True

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            raise_in_a_capture(grad_output)
            return grad_output * 2, ()

    model = opfuser.Sequential(opfuser.Bias(DIM, device=device), Odd())
    with opfuser.replay("on"):
        for _ in range(4):
            model.zero_grad()
            dy = draw(device)
            model(draw(device)).backward(dy)
            torch.testing.assert_close(model[0].bias.grad, 2 * dy.sum(0))
    assert code(model) == "CAPTURE"


def test_more_forwards_than_recordings(device: torch.device) -> None:
    model = block(device)
    with opfuser.replay("on", instances=1):
        warm(model, device, 3)
        ys = [model(draw(device)) for _ in range(3)]
        assert code(model) == "IN_FLIGHT"
        for y in ys:
            y.sum().backward()
        model(draw(device))
    assert code(model) == ""


def test_a_growing_table_of_angles(device: torch.device) -> None:
    model = opfuser.Sequential(opfuser.RotaryEmbedding(2, 4), opfuser.GELU())
    xs = [torch.randn(1, n, 24, device=device) for n in (3, 5, 9)]
    expected = [twin(model)(x) for x in xs]
    with opfuser.replay("on"), torch.no_grad():
        for x, y in zip(xs, expected):
            for _ in range(3):
                assert_equal(model(x), y)
        for _ in range(3):
            for x, y in zip(xs, expected):
                assert_equal(model(x), y)
    assert count(model) == 6 + 9
