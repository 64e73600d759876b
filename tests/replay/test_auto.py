"""Mode "auto": what is measured, what is decided, and what is never recorded unasked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import opfuser
from opfuser import torch_internals
from opfuser.core.fusion import Refusal
from opfuser.engine.recorded.specialized import Specializations
from opfuser.engine.replayed import captured, replay, trial
from opfuser.engine.replayed.decision import (
    Costs,
    Sample,
    refusal_after_trial,
    refusal_before_trial,
)
from opfuser.engine.replayed.graphs import CudaGraph
from opfuser.engine.threads import thread_that_may_wait
from opfuser.torch_internals import memory_of
from tests.replay.models import (
    DIM,
    assert_equal,
    assert_same_grads,
    block,
    code,
    count,
    draw,
    replays,
    twin,
)
from tests.replay.recorded import RecordedGraph, Times

AFTER = 3  # calls that run as usual, by default
# One more is under way when the last measurement is complete.
BEFORE = AFTER + trial.SAMPLES + 1
TRIAL = 2 + trial.SAMPLES + 1  # until backward is recorded, and then measured

FREE = Costs(copied=0, memory=2**20, taken=0, limit=2**30, free=2**34)
WAITING = Sample(host=5e-3, device=5.2e-3, behind=False, period=6e-3)


@pytest.fixture
def device(cpu: torch.device) -> torch.device:
    """In times that tests state."""
    return cpu


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    made = Times()
    monkeypatch.setattr(RecordedGraph, "times", made)
    monkeypatch.setattr(trial, "perf_counter", made.perf_counter)
    return made


@pytest.fixture
def auto(device: torch.device, times: Times) -> Iterator[None]:
    with opfuser.replay("auto"):
        yield


def noting_graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Grows by those that are recorded."""
    graphs: list[RecordedGraph] = []
    capture = RecordedGraph.capture

    def noted(self: RecordedGraph, function: Callable[[], Any]) -> Any:
        graphs.append(self)
        return capture(self, function)

    monkeypatch.setattr(RecordedGraph, "capture", noted)
    return graphs


def train(model: Callable[[Tensor], Tensor], device: torch.device, steps: int) -> None:
    for _ in range(steps):
        model(draw(device).requires_grad_()).sum().backward()
        if isinstance(model, torch.nn.Module):
            model.zero_grad()


def refusal(samples: list[Sample], costs: Costs = FREE, *, has_backward: bool = True) -> str:
    found = refusal_before_trial(samples, costs, has_backward=has_backward)
    return "" if found is None else found.code


# The decision, by numbers.


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ""),
        ({"device": 3e-3}, ""),
        ({"device": 6.2e-3}, ""),
        ({"device": 6.3e-3}, "BUSY"),
        ({"device": 50e-3}, "BUSY"),
        ({"behind": True}, "BUSY"),
        ({"host": 1.9e-4, "device": 1e-4}, "SHORT"),
        ({"host": 2.1e-4, "device": 1e-4}, ""),
        ({"period": 1.0}, ""),
    ],
    ids=str,
)
def test_calls_that_deserve_a_trial(change: dict[str, Any], expected: str) -> None:
    assert refusal([WAITING._replace(**change)] * 5) == expected


def test_forward_alone_is_shorter() -> None:
    short = [WAITING._replace(host=1.5e-4, device=1e-4)]
    assert refusal(short) == "SHORT"
    assert refusal(short, has_backward=False) == ""
    short = [WAITING._replace(host=0.9e-4, device=1e-5)]
    assert refusal(short, has_backward=False) == "SHORT"


def test_medians_decide() -> None:
    outlier = Sample(1.0, 2.0, True, 9.0)
    assert refusal([WAITING, outlier, WAITING, outlier, WAITING]) == ""
    assert refusal([WAITING, outlier, outlier, outlier, WAITING]) == "BUSY"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"copied": int(0.2 * 5.2e-3 * 5e11)}, ""),
        ({"copied": int(0.3 * 5.2e-3 * 5e11)}, "COPIES"),
        ({"taken": 2**30 - 2**21}, ""),
        ({"taken": 2**30 - 2**20}, "MEMORY"),
        ({"memory": 2**30}, "MEMORY"),
        ({"free": 2**22}, ""),
        ({"free": 2**21}, "MEMORY"),
    ],
    ids=str,
)
def test_costs(change: dict[str, Any], expected: str) -> None:
    assert refusal([WAITING] * 5, FREE._replace(**change)) == expected


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"host": 1e-3, "device": 2e-3, "period": 3e-3}, True),
        ({"host": 1e-3, "device": 4.9e-3, "period": 5.9e-3}, True),
        ({"host": 1e-3, "device": 5.0e-3, "period": 5.9e-3}, False),
        ({"host": 5.0e-3, "device": 1e-3, "period": 5.9e-3}, False),
        ({"host": 1e-3, "device": 2e-3, "period": 5.95e-3}, False),
        ({"host": 1e-3, "device": 2e-3, "period": 7e-3}, False),
    ],
    ids=str,
)
def test_recordings_that_are_kept(change: dict[str, Any], kept: bool) -> None:
    replayed = WAITING._replace(**change)
    assert (refusal_after_trial([WAITING] * 5, [replayed] * 5) is None) == kept


# Calls.


@pytest.mark.usefixtures("auto")
def test_calls_for_which_the_device_waits(device: torch.device) -> None:
    model = block(device)
    train(model, device, BEFORE)
    assert count(model) == 0
    train(model, device, TRIAL + 20)
    assert count(model) == TRIAL + 20
    assert code(model) == ""


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"usual": (5e-3, 7e-3)}, "BUSY"),
        ({"lag": 6}, "BUSY"),
        ({"lag": 1000}, "UNMEASURED"),
        ({"usual": (5e-5, 5e-5)}, "SHORT"),
        ({"replayed": (1e-4, 4.9e-3)}, "SLOWER"),
        ({"between": 10.0}, "SLOWER"),
    ],
    ids=str,
)
def test_calls_that_are_left_alone(
    state: dict[str, Any], expected: str, device: torch.device, times: Times
) -> None:
    vars(times).update(state)
    model = block(device)
    train(model, device, trial.MOST_CALLS + 5)
    assert code(model) == expected
    (record,) = replays(model)
    assert (record.instances, record.bytes) == (0, 0)
    assert count(model) == (TRIAL if expected == "SLOWER" else 0)
    before = times.events
    train(model, device, 20)
    assert times.events == before, "nothing is measured any more"
    assert code(model) == expected


@pytest.mark.usefixtures("auto")
def test_values_and_gradients(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    held: list[tuple[Tensor, Tensor]] = []
    for step in range(BEFORE + TRIAL + 10):
        x, dy = draw(device), draw(device)
        ys = []
        for m in (model, other):
            ys.append(m(x))
            ys[-1].backward(dy)
        assert_equal(*ys)
        assert_same_grads(model, other)
        held += [(y, y.detach().clone()) for y in ys]
        if step % 3 == 2:  # what is no longer accumulated into
            held += [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            other.zero_grad()
    for t, value in held:
        assert_equal(t, value)
    assert count(model) >= TRIAL + 10


@pytest.mark.usefixtures("auto")
def test_gradients_are_never_memory_of_a_graph(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that ``record_stream`` names may still read them while the next pass is replayed."""
    graphs = noting_graphs(monkeypatch)
    model = block(device)
    train(model, device, BEFORE + TRIAL)
    model(draw(device).requires_grad_()).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    places = [grad.data_ptr() for grad in grads]
    model(draw(device).requires_grad_()).sum().backward()
    assert places == [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    assert len(graphs) == 2, "of forward and of backward"
    memory = {memory_of(t) for graph in graphs for call in graph.calls for t in call.results()}
    assert memory
    assert {memory_of(t) for t in grads}.isdisjoint(memory)


@pytest.mark.usefixtures("auto")
def test_without_gradients(device: torch.device) -> None:
    model = block(device)
    with torch.no_grad():
        for _ in range(BEFORE + TRIAL + 5):
            model(draw(device))
    assert count(model) == TRIAL + 5
    assert code(model) == ""


@pytest.mark.usefixtures("auto")
def test_forwards_whose_backward_never_comes(device: torch.device) -> None:
    model = block(device)
    for _ in range(trial.MOST_CALLS + AFTER + 3):
        model(draw(device))
    assert code(model) == "UNMEASURED"
    assert count(model) == 0


@pytest.mark.usefixtures("auto")
def test_an_output_that_is_memory_of_the_input(device: torch.device) -> None:
    model = opfuser.Sequential(opfuser.Identity())
    for _ in range(BEFORE):
        x = draw(device)
        model(x).add_(1)
        assert code(model) in ("", "VIEW")
    assert code(model) == "VIEW"
    y = model(x)
    assert y.data_ptr() == x.data_ptr()


@pytest.mark.usefixtures("auto")
def test_an_extra_output_that_is_memory_of_the_input(device: torch.device) -> None:
    model = opfuser.Sequential(opfuser.MakeExtraOutput(), opfuser.GELU())
    for _ in range(BEFORE):
        model(draw(device))
    assert code(model) == "VIEW"


@pytest.mark.usefixtures("auto")
def test_memory_is_asked_for_before_anything_is_recorded(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedGraph, "limit", 2**15)
    monkeypatch.setattr(RecordedGraph, "capture", lambda *_: pytest.fail("something was recorded"))
    model = block(device)
    train(model, device, BEFORE + 3)
    assert code(model) == "MEMORY"


@pytest.mark.usefixtures("auto")
def test_nothing_is_recorded_while_somebody_looks_for_faults(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = block(device)
    monkeypatch.setattr(RecordedGraph, "why_not", "CUDA_LAUNCH_BLOCKING is set")
    train(model, device, 3)
    assert code(model) == "DEBUGGING"
    monkeypatch.setattr(RecordedGraph, "why_not", None)
    with opfuser.record_events():
        train(model, device, 1)
        assert code(model) == "WATCHED"
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(model, device, 3)
        assert code(model) == "DETERMINISTIC"
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def another_thread() -> Iterator[None]:
    """While one that is named logs waits."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.usefixtures("auto")
def test_nothing_is_recorded_beside_a_thread_that_may_wait(device: torch.device) -> None:
    model = block(device)
    with another_thread():
        train(model, device, BEFORE + TRIAL)
    (record,) = replays(model)
    assert record.instances == 0
    assert record.refusal == Refusal(
        "THREADS", "logs, another thread, may wait for the device while a call is recorded"
    )
    train(model, device, 300 + BEFORE + TRIAL)
    assert count(model) > 0


@pytest.mark.usefixtures("auto")
def test_backward_waits_for_such_a_thread_to_end(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "logs"
    monkeypatch.setattr(captured, "thread_that_may_wait", lambda: other)
    graphs, model = noting_graphs(monkeypatch), block(device)
    train(model, device, BEFORE + TRIAL)
    assert code(model) == ""
    assert len(graphs) == 1, "of forward alone"
    other = None
    train(model, device, TRIAL)
    assert len(graphs) == 2


def test_which_threads_may_wait() -> None:
    assert thread_that_may_wait() is None
    loader = DataLoader(TensorDataset(torch.arange(4)), num_workers=1)
    batches = iter(loader)
    next(batches)
    assert thread_that_may_wait() is None, "queues of a data loader"
    with another_thread():
        assert thread_that_may_wait() == "logs"
    del batches
    x = torch.ones((), requires_grad=True)
    said = []
    y = x * 1
    y.register_hook(lambda _: said.append(thread_that_may_wait()))
    y.backward()
    assert said == [None], "the thread that called backward"


def test_what_asks_for_no_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch_internals, "cuda_history", lambda: False)
    assert CudaGraph.objection() is None
    for name in ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        with monkeypatch.context() as m:
            m.setenv(name, "1")
            assert CudaGraph.objection() == f"{name} is set"
            m.setenv(name, "0")
            assert CudaGraph.objection() is None
    with monkeypatch.context() as m:
        m.setattr(torch_internals, "cuda_history", lambda: True)
        assert CudaGraph.objection() == "the history of memory is recorded"
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    assert CudaGraph.objection() == "memory is not that of torch's own allocator"


@pytest.mark.usefixtures("auto")
def test_ever_fewer_refused_calls_are_looked_at(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, passed_over = block(device), list[bool]()
    pauses = noting(replay.Replays.pauses, passed_over)
    monkeypatch.setattr(replay.Replays, "pauses", pauses)
    for _ in range(300):
        checkpoint(model, draw(device), use_reentrant=False)
    assert code(model) == "SAVED_TENSOR_HOOKS"
    assert passed_over.count(False) < 20
    train(model, device, 300 + BEFORE + TRIAL)
    assert count(model) > 0, "and others are replayed all the same"


def test_on_a_device_without_graphs_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="opfuser")
    model = opfuser.Sequential(opfuser.Linear(DIM, DIM))
    with opfuser.replay("auto"):
        train(model, torch.device("cpu"), 3)
    assert replays(model) == ()
    assert not [r for r in caplog.records if "[replay]" in r.getMessage()]


@pytest.mark.usefixtures("device", "times")
def test_recordings_of_the_modes_are_apart(device: torch.device) -> None:
    model = block(device)
    with opfuser.replay("on"):
        train(model, device, 3)
    before = count(model)
    assert before == 2
    with opfuser.replay("auto"):
        train(model, device, BEFORE)
        assert count(model) == before
        train(model, device, TRIAL)
        assert count(model) == before + TRIAL


@pytest.mark.usefixtures("auto")
def test_a_second_backward_of_a_measured_call(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    for _ in range(BEFORE + TRIAL):
        x, dy = draw(device), draw(device)
        for m in (model, other):
            y = m(x)
            y.backward(dy, retain_graph=True)
            y.backward(dy)
        assert_same_grads(model, other)


@pytest.mark.usefixtures("auto")
def test_profiled_calls_are_not_measured(device: torch.device, times: Times) -> None:
    model = block(device)
    train(model, device, AFTER)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True):  # or torch 2.11 warns
        train(model, device, BEFORE)
    assert (count(model), times.events) == (0, 0)
    train(model, device, trial.SAMPLES + 2)
    assert count(model) == 1


@pytest.mark.usefixtures("auto")
def test_recordings_make_way_for_none_that_nobody_asked_for(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, asked = block(device), block(device), block(device)
    train(first, device, BEFORE + TRIAL)
    size = replays(first)[0].bytes
    monkeypatch.setattr(RecordedGraph, "limit", int(1.5 * size / 0.05))
    monkeypatch.setattr(trial, "refusal_before_trial", lambda *_, **__: None)
    train(second, device, BEFORE + TRIAL)
    assert code(second) == "MEMORY"
    before = count(first)
    train(first, device, 3)
    assert count(first) == before + 3
    asked.replay = "on"
    with opfuser.replay("on", memory=0.05):
        train(asked, device, 4)
    assert count(asked) == 3


@pytest.mark.usefixtures("auto")
def test_a_call_that_fails(device: torch.device) -> None:
    model = block(device)
    for _ in range(BEFORE + TRIAL):
        with pytest.raises(opfuser.errors.InputError):
            model(torch.randn(3, DIM + 1, device=device))
        with pytest.raises(ZeroDivisionError):
            model(draw(device).requires_grad_()).sum().backward(torch.tensor(1 // 0))
        train(model, device, 1)
    assert code(model) in ("", "SLOWER")


def noting(ask: Callable[..., Any], answers: list[Any]) -> Callable[..., Any]:
    """``ask``, whose answers are noted."""

    def noted(*args: Any) -> Any:
        answers.append(ask(*args))
        return answers[-1]

    return noted


@pytest.mark.usefixtures("auto")
def test_calls_that_are_not_replayed_are_as_fast_as_with_replay_off(
    device: torch.device, times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run what was recorded of calls of their kind, also while they are measured."""
    answers: dict[str, list[Any]] = {"find": [], "pauses": []}
    for owner, name in ((Specializations, "find"), (replay.Replays, "pauses")):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name), answers[name]))
    times.usual = 5e-3, 50e-3
    model = block(device)
    train(model, device, BEFORE + 1)
    assert code(model) == "BUSY"
    found = [call for call in answers["find"] if call is not None]
    assert len(found) == BEFORE + 1 - 2, "the first is no example, the second is recorded"
    for asked in answers.values():
        asked.clear()
    train(model, device, 30)
    assert sum(answers["pauses"]) > 20, "most are passed over"
    assert answers["find"].count(None) == 0
    assert len(answers["find"]) == 30


@pytest.mark.usefixtures("auto")
def test_parameters_that_come_back_to_their_addresses(device: torch.device) -> None:
    """As where FSDP gathers them: each place has a recording, one decision holds for all."""
    model = block(device)
    other = twin(model)
    places = [model[2].weight.detach().clone() for _ in range(2)]
    for step in range(BEFORE + 2 * TRIAL + 10):
        model[2].weight.data = places[step % 2].copy_(model[2].weight.detach())
        x, dy = draw(device), draw(device)
        for m in (model, other):
            m.zero_grad()
            m(x).backward(dy)
        assert_same_grads(model, other)
    assert code(model) == ""
    assert count(model) > TRIAL
    assert replays(model)[0].instances == 2


@pytest.mark.usefixtures("auto")
def test_a_backward_in_a_capture_of_the_callers(device: torch.device, times: Times) -> None:
    model = block(device)
    train(model, device, AFTER)
    y = model(draw(device).requires_grad_())
    before = times.events
    RecordedGraph(device).capture(lambda: y.sum().backward())
    assert times.events == before
    times.events += before % 4  # its backward does not count
    model.zero_grad()
    train(model, device, trial.SAMPLES + 2)
    assert count(model) > 0
