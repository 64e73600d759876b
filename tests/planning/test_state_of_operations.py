"""What operations and hooks keep on a module between calls costs neither plans nor memory."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser.engine.plan import Plan


class Remembers(opfuser.BasicOperation):
    """y = x; counts its calls and keeps what it saw last."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.mean = 0.0
        self.seen: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        self.calls += 1
        self.mean = float(input_.mean())
        self.seen = {"input": input_}
        self.last = input_.detach()
        return input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[()]]:
        return grad_output, ()


def call_often(seq: opfuser.Sequential) -> int:
    """How many of many inputs are alive in the end."""
    refs = []
    for _ in range(10):
        x = torch.rand(2, 3, requires_grad=True) * 1
        refs.append(weakref.ref(x))
        seq(x)
        del x
    return sum(ref() is not None for ref in refs)


def test_an_operation_with_state(plans: list[Plan]) -> None:
    seq = opfuser.Sequential(opfuser.GELU(), Remembers(), opfuser.GELU())
    assert call_often(seq) == 0  # it keeps the output of what stands before it
    assert seq[1].calls == 10
    assert len(plans) <= 2


@pytest.mark.parametrize("kept", [lambda o: o, lambda o: [o], lambda o: {"output": o}])
def test_a_hook_that_keeps_an_activation(plans: list[Plan], kept: Any) -> None:
    seq = opfuser.Sequential(opfuser.GELU(), opfuser.ConstantScale(2.0))
    seq[1].register_forward_hook(lambda module, args, out: setattr(module, "kept", kept(out)))
    assert call_often(seq) <= 1
    assert len(plans) <= 3


def test_a_flag_changed_between_calls_counts(plans: list[Plan]) -> None:
    seq, x = opfuser.Sequential(Remembers()), torch.rand(2, 3)
    seq(x)
    seq[0].flag = True
    seq(x)
    assert len(plans) >= 2


def test_a_flag_that_another_thread_sets_during_a_forward_counts(plans: list[Plan]) -> None:
    inside, done = threading.Event(), threading.Event()

    class Waits(opfuser.Identity):
        """Its first forward lasts until the other thread is done."""

        def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
            inside.set()
            assert done.wait(10)
            return input_

    seq, x = opfuser.Sequential(opfuser.ConstantScale(2.0), Waits()), torch.ones(2, 3)
    thread = threading.Thread(target=seq, args=(x,))
    thread.start()
    assert inside.wait(10)
    seq[0].scale = 3.0
    done.set()
    thread.join()
    assert torch.equal(seq(x), 3 * x)
    assert len(plans) == 2
