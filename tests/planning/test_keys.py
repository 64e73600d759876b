"""When a plan is made, and when one that was made before is used again (hazard 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import opfuser
from opfuser import Identity
from opfuser.core.fusion import Fusion, Refusal
from opfuser.op import BasicOperation, OperationContext
from opfuser.recipe import DelayedScaling
from tests.planning.toys import FusedForward


class Probe(BasicOperation):
    """Has one of everything that a fusion may look at."""

    num_extra_inputs = 1

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(2))
        self.inner = nn.Linear(2, 2)
        self.flag = False
        self.sizes = [1, 2]
        self.options = {"a": 1}

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, **kwargs: Any
    ) -> Any:
        return input_ + 0, [()]

    def fuser_backward(self, ctxs: Any, grad_output: torch.Tensor, **kwargs: Any) -> Any:
        return grad_output, [tuple(None for _ in self.parameter_slots())], [(None,)]


def look(probe: Probe, *, env: Any) -> Refusal:
    """Declines, and says all that it saw."""
    return Refusal(
        "SHAPE",
        repr((
            env.device, env.dtype, env.autocast_dtype, env.grad_enabled, env.needs_backward,
            env.recipe,
            probe.weight.dtype, probe.weight.shape, probe.weight.device,
            probe.table.dtype, probe.table.shape,
            probe.inner.weight.shape, probe.inner.training,
            probe.flag, probe.sizes, probe.options, probe.training,
        )),
    )  # fmt: skip


@pytest.fixture
def look_is_on() -> Iterator[None]:
    with opfuser.register_forward_fusion(Fusion("look", "forward", (Probe,), FusedForward, look)):
        yield


def seen(plan: opfuser.Plan | None) -> str:
    assert plan is not None
    ((_, refusal),) = plan.record("look").refusals
    return refusal.detail


class Call:
    """A Sequential of one probe and what it is called with; cases change one of these."""

    def __init__(self) -> None:
        self.seq = opfuser.Sequential(Identity(), Probe())
        self.probe: Probe = self.seq[1]
        self.x = torch.ones(2)
        self.extra = torch.ones(2)
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self) -> str:
        """What the fusion saw when the plan that this call follows was made."""
        with self.context():
            self.seq(self.x, self.extra)
        return seen(self.seq.last_plan)

    def truth(self) -> str:
        """What a fusion would see now."""
        fresh = opfuser.Sequential(Identity(), self.probe)
        with self.context():
            return seen(fresh.plan(self.x, self.extra))

    def move(self, device: str) -> None:
        self.seq.to(device)
        self.x, self.extra = self.x.to(device), self.extra.to(device)


def data(value: torch.Tensor) -> Callable[[Call], None]:
    return lambda call: setattr(call.probe.weight, "data", value)


def attribute(name: str, value: Any) -> Callable[[Call], None]:
    return lambda call: setattr(call.probe, name, value)


def context(value: Callable[[], AbstractContextManager[Any]]) -> Callable[[Call], None]:
    return lambda call: setattr(call, "context", value)


CHANGES: dict[str, Callable[[Call], Any]] = {
    "a flag": attribute("flag", True),
    "a list": attribute("sizes", [1, 3]),
    "a dict": attribute("options", {"a": 2}),
    "a parameter of another dtype": attribute("weight", nn.Parameter(torch.ones(2).double())),
    "a parameter of another shape": attribute("weight", nn.Parameter(torch.ones(3))),
    "data of another dtype": data(torch.ones(2).half()),
    "data of another shape": data(torch.ones(3)),
    "a buffer of another dtype": attribute("table", torch.ones(2).half()),
    "a buffer of another shape": attribute("table", torch.ones(3)),
    "a module inside": attribute("inner", nn.Linear(3, 2)),
    "evaluation mode": lambda call: call.seq.eval(),
    "the dtype of the sequence": lambda call: call.seq.to(torch.bfloat16),
    "the dtype of the input": lambda call: setattr(call, "x", call.x.double()),
    "the device": lambda call: call.move("meta"),
    "an input that requires grad": lambda call: call.x.requires_grad_(),
    "a frozen sequence": lambda call: call.seq.requires_grad_(False),
    "no_grad": context(torch.no_grad),
    "inference mode": context(torch.inference_mode),
    "autocast": context(lambda: torch.autocast("cpu", torch.bfloat16)),
    "a recipe": context(lambda: opfuser.autocast(recipe=DelayedScaling())),
    "another autocast": context(lambda: torch.autocast("cpu", torch.float16)),
}
OF_A_FROZEN_ONE: dict[str, Callable[[Call], Any]] = {
    "an input that requires grad": lambda call: call.x.requires_grad_(),
    "an extra input that requires grad": lambda call: call.extra.requires_grad_(),
}


@pytest.mark.usefixtures("look_is_on")
@pytest.mark.parametrize(
    ("change", "frozen"),
    [*((change, False) for change in CHANGES), *((change, True) for change in OF_A_FROZEN_ONE)],
)
def test_what_a_fusion_may_read_is_in_the_key(change: str, frozen: bool) -> None:
    call = Call()
    if frozen:
        call.seq.requires_grad_(False)
    before = call()
    (OF_A_FROZEN_ONE if frozen else CHANGES)[change](call)
    after = call()
    assert after == call.truth(), "the plan was made for something else"
    assert after != before, "this case changes nothing that the fusion sees"


@pytest.mark.usefixtures("look_is_on")
@pytest.mark.parametrize("other", [torch.ones(2).double(), torch.ones(3)], ids=["dtype", "shape"])
def test_parameters_of_functional_call_are_in_the_key(other: torch.Tensor) -> None:
    call = Call()
    facts = repr((other.dtype, other.shape))[1:-1]
    assert facts not in call()
    functional_call(call.seq, {"1.weight": other}, (call.x, call.extra))
    assert facts in seen(call.seq.last_plan)


@pytest.fixture
def pair() -> Iterator[None]:
    with opfuser.register_forward_fusion(
        Fusion("pair", "forward", (Identity, Identity), FusedForward)
    ):
        yield


def pairs(seq: opfuser.Sequential) -> int:
    return seq.plan(torch.ones(2)).fused("forward").get("pair", 0)


@pytest.mark.usefixtures("pair")
def test_a_hook_changes_the_plan_and_so_does_its_removal() -> None:
    """Hazard 16: the record says why."""
    seq = opfuser.Sequential(Identity(), Identity())
    assert pairs(seq) == 1
    hook = seq[1].register_forward_hook(lambda *_: None)
    assert pairs(seq) == 0
    ((at, why),) = seq.plan(torch.ones(2)).record("pair").refusals
    assert (at, str(why)) == (0, "HOOK: Identity carries hooks")
    hook.remove()
    assert pairs(seq) == 1
