"""From the third call of a kind on, recorded functions run: results are those of any other call."""

from __future__ import annotations

import linecache
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import GELU, Linear, Residual, RMSNorm, Sequential
from opfuser.engine.recorded.recordable import unrecorded
from opfuser.engine.recorded.recorder import Recorder
from opfuser.op import BasicOperation, OperationContext
from opfuser.runtime.recording import watching
from tests.engine.recorded_toys import (
    ENOUGH,
    D,
    assert_same,
    block,
    both,
    dropout,
    image,
    mlp,
    passes,
    record,
    twin,
)
from tests.engine.toys import without_collector


@pytest.mark.parametrize("make", [block, mlp, dropout])
def test_recorded_functions_return_the_same(make: Callable[[], Sequential]) -> None:
    module = make()
    record(module, image())
    with unrecorded():
        other = twin(make, module)
        for seed in range(3):
            torch.manual_seed(seed)
            x = image()
            theirs = both(other, x)
            torch.manual_seed(seed)
            x = image()
            with passes() as names:
                ours = both(module, x)
            assert names == ["forward", "backward"]
            assert_same(ours, theirs)


# Names, threads, exceptions, memory.


@pytest.mark.parametrize(
    "name", ["(" + "x, " * 99, "[" + "x" * 90 + ", raise SystemExit, " + "x" * 90, "'", "#\n", "\\"]
)
def test_names_of_a_user_stand_in_comments_alone(name: str) -> None:
    module = Sequential(RMSNorm(D))
    nn.Module.add_module(module, name, opfuser.BasicLinear(D, D))
    record(module, image())


def test_threads_share_what_is_recorded() -> None:
    module = block()
    inputs = [torch.randn(2, 3, D, requires_grad=True) for _ in range(4)]
    with unrecorded():
        other = twin(block, module)
        expected = [both(other, x) for x in inputs]
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for _ in range(20):
                assert_same(both(module, inputs[n]), expected[n])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
def test_exceptions_while_a_pass_is_recorded(
    stage: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is recorded afterwards, nor kept of what was."""
    module, x = mlp(), image()
    with unrecorded():
        theirs = both(twin(mlp, module), x)
    both(module, x)
    if stage == "backward":
        both(module, x)  # whose forward is recorded
    calls: list[Any] = []

    def fail(self: Recorder, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls.append(func)
        if len(calls) % 5 == 0:
            raise error
        return func(*args, **(kwargs or {}))

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "__torch_function__", fail)
        for _ in range(3):
            with pytest.raises(error):
                both(module, x)
            assert watching.watcher is None
            assert not torch._C._len_torch_function_stack()
    assert len(calls) == 15
    assert_same(both(module, x), theirs)
    record(module, x)
    assert_same(both(module, x), theirs)


def test_recordings_are_freed_with_their_module() -> None:
    """Without the garbage collector."""

    def texts() -> int:
        return sum(" specialized " in name for name in linecache.cache)

    before, module = texts(), Sequential(RMSNorm(D), opfuser.BasicLinear(D, D), GELU())
    record(module, image())
    assert texts() > before
    kept = [weakref.ref(t) for t in (*module.modules(), *module.parameters())]
    with without_collector():
        del module
        assert [ref() for ref in kept if ref() is not None] == []
        assert texts() <= before  # those of other tests may have been in cycles


class Halved(BasicOperation):
    """Of a user's, which does not say that it may be left out of calls."""

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_.square() / 2

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad_output * x, ()


class Recordable(Halved):
    recordable = True


class Inherits(Recordable):
    pass


@pytest.mark.parametrize(("kind", "recorded"), [(Halved, 0), (Recordable, 2), (Inherits, 0)])
def test_operations_of_users(kind: type[BasicOperation], recorded: int) -> None:
    """They are recorded only where their own class promises what that takes for granted."""
    module, x = Sequential(Linear(D, D), kind()), image()
    with passes() as names:
        for _ in range(ENOUGH + 1):
            result = both(module, x)
    assert_same(result, both(twin(lambda: Sequential(Linear(D, D), kind()), module), x))
    assert bool(names) == bool(recorded)
    plan = module.last_plan
    assert plan is not None
    (recording,) = plan.recordings
    assert len(recording.texts) == recorded
    if recorded:
        assert recording.refusal is None
        assert "square" in plan.recorded
    else:
        assert recording.refusal == (
            f"op 2 ({kind.__name__}) is not opfuser's own, nor recordable by its class"
        )
        assert plan.recorded == f"# operations 0 to 2: {recording.refusal}"


class InOneMemory(BasicOperation):
    """Adds a parameter, whose gradient is a view of that of the input."""

    recordable = True

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", nn.Parameter(torch.zeros(D * D)))

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        return 2 * (input_ + self.bias.view(D, D))

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        dx = 2 * grad_output
        return dx, (dx.view(D * D),)


def test_gradients_of_a_recorded_pass_share_no_memory() -> None:
    module, x = Sequential(InOneMemory()), torch.randn(D, D, requires_grad=True)
    record(module, x)
    _, dx, dw = both(module, x)
    assert dx.untyped_storage().data_ptr() != dw.untyped_storage().data_ptr()


def test_what_was_recorded_can_be_read() -> None:
    """Of the last plan, group by group; a plan that was only made has nothing recorded."""
    module = Sequential({"norm": RMSNorm(D), "plain": nn.Tanh(), "up": Linear(D, 2 * D)})
    x = image()
    record(module, x)
    plan = module.last_plan
    assert plan is not None
    assert [(r.indices, len(r.texts), r.refusal) for r in plan.recordings] == [
        ((0,), 2, None),
        ((1, 2), 2, None),
    ]
    assert "# 0 RMSNorm: norm" in plan.recorded
    assert "# up.weight" in plan.recorded
    assert plan.recorded.count("def forward(") == plan.recorded.count("def backward(") == 2
    assert module.plan(x).recorded == ""
    assert module.plan(x) == plan


def test_what_a_steady_call_of_a_model_costs() -> None:
    """Frames of Python between ``Sequential.forward`` and the first call of torch; and calls."""
    layers = [
        part
        for _ in range(4)
        for part in (
            Residual(
                opfuser.LayerNorm(D),
                Linear(D, 3 * D),
                opfuser.DotProductAttention(2, causal=True),
                Linear(D, D),
            ),
            Residual(opfuser.LayerNorm(D), Linear(D, 4 * D), GELU(), Linear(4 * D, D)),
        )
    ]
    head = opfuser.LayerNorm(D), Linear(D, 50, bias=False), opfuser.CrossEntropy()
    model = Sequential(opfuser.Embedding(50, D), *layers, *head)
    tokens, targets = torch.randint(50, (2, 2, 8))
    for _ in range(ENOUGH):
        model(tokens, targets).backward()
    depths, calls = [], 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"
        if event == "c_call" and getattr(arg, "__name__", "") == "embedding":
            depth, above = 0, frame
            while above.f_code is not Sequential.forward.__code__:
                assert above.f_back is not None
                depth, above = depth + 1, above.f_back
            depths.append(depth)

    sys.setprofile(profile)
    try:
        model(tokens, targets).backward()
    finally:
        sys.setprofile(None)
    assert depths == [5]
    assert calls <= 100  # 1,978 where operations are called
