"""When a plan is made, and when one that was made before is used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import opfuser
from opfuser.fusion import Fusion, Refusal
from opfuser.op import BasicOperation, OperationContext
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
        self, basic_op_ctxs: list[OperationContext], input_: Tensor, **kwargs: Any
    ) -> Any:
        return input_ + 0, [()]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **kwargs: Any) -> Any:
        return grad_output, [tuple(None for _ in self.parameter_slots())], [(None,)]


def look(probe: Probe, *, env: Any) -> Refusal:
    """Declines, and says all that it saw."""
    return Refusal(
        "SHAPE",
        repr((
            env.device, env.dtype, env.autocast_dtype, env.grad_enabled, env.needs_backward,
            probe.weight.dtype, probe.weight.shape, probe.weight.device,
            probe.table.dtype, probe.table.shape,
            probe.inner.weight.shape, probe.inner.training,
            probe.flag, probe.sizes, probe.options, probe.training,
        )),
    )  # fmt: skip


LOOK = Fusion("look", "forward", (Probe,), FusedForward, refuses=look)


class Call:
    """A Sequential of one probe and what it is called with; cases change one of these."""

    def __init__(self) -> None:
        self.seq = opfuser.Sequential(opfuser.Identity(), Probe())
        self.probe: Probe = self.seq[1]
        self.x = torch.ones(2)
        self.extra = torch.ones(2)
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self) -> str:
        """What the fusion saw when the plan that this call follows was made."""
        with self.context():
            self.seq(self.x, self.extra)
            (group,) = self.seq._module_groups
        ((_, refusal),) = group.last_plan.record("look").refusals
        return refusal.detail

    def truth(self) -> str:
        """What a fusion would see now."""
        fresh = opfuser.Sequential(opfuser.Identity(), self.probe)
        with self.context():
            return fresh.plan(self.x, self.extra).record("look").refusals[0][1].detail


def set_flag(call: Call) -> None:
    call.probe.flag = True


def set_new_flag(call: Call) -> None:
    call.probe.sizes = [1, 3]


def set_options(call: Call) -> None:
    call.probe.options = {"a": 2}


def switch_to_eval(call: Call) -> None:
    call.seq.eval()


def cast_everything(call: Call) -> None:
    call.seq.to(torch.bfloat16)
    call.x = call.x.bfloat16()


def cast_the_operation(call: Call) -> None:
    call.seq.to(torch.bfloat16)


def cast_the_input(call: Call) -> None:
    call.x = call.x.double()


def move_to_meta(call: Call) -> None:
    call.seq.to("meta")
    call.x, call.extra = call.x.to("meta"), call.extra.to("meta")


def cast_data(call: Call) -> None:
    call.probe.weight.data = call.probe.weight.data.half()


def replace_parameter(call: Call) -> None:
    call.probe.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))


def reshape_parameter(call: Call) -> None:
    call.probe.weight = nn.Parameter(torch.ones(3))


def reshape_data(call: Call) -> None:
    call.probe.weight.data = torch.ones(3)


def cast_buffer(call: Call) -> None:
    call.probe.table = call.probe.table.half()


def reshape_buffer(call: Call) -> None:
    call.probe.table = torch.ones(3)


def replace_inner(call: Call) -> None:
    call.probe.inner = nn.Linear(3, 2)


def require_input_grad(call: Call) -> None:
    call.x.requires_grad_()


def freeze(call: Call) -> None:
    call.seq.requires_grad_(False)


def require_extra_grad(call: Call) -> None:
    call.extra.requires_grad_()


def without_grad(call: Call) -> None:
    call.context = torch.no_grad


def in_inference_mode(call: Call) -> None:
    call.context = torch.inference_mode


def under_autocast(call: Call) -> None:
    call.context = lambda: torch.autocast("cpu", torch.bfloat16)


def under_another_autocast(call: Call) -> None:
    call.context = lambda: torch.autocast("cpu", torch.float16)


def load_other_values(call: Call) -> None:
    call.probe.weight.data = torch.zeros(2, dtype=torch.float64)


CHANGES = [
    set_flag, set_new_flag, set_options, switch_to_eval, cast_everything, cast_the_operation,
    cast_the_input, move_to_meta, cast_data, replace_parameter, reshape_parameter, reshape_data,
    cast_buffer, reshape_buffer, replace_inner, require_input_grad, freeze, without_grad,
    in_inference_mode, under_autocast, under_another_autocast, load_other_values,
]  # fmt: skip


@pytest.fixture
def look_is_on() -> Iterator[None]:
    with opfuser.register_forward_fusion(LOOK):
        yield


@pytest.mark.usefixtures("look_is_on")
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_fusion_may_read_is_in_the_key(change: Callable[[Call], None]) -> None:
    check_key(Call(), change)


@pytest.mark.usefixtures("look_is_on")
@pytest.mark.parametrize("change", [require_input_grad, require_extra_grad])
def test_gradients_of_inputs_are_in_the_key(change: Callable[[Call], None]) -> None:
    call = Call()
    freeze(call)
    check_key(call, change)


def check_key(call: Call, change: Callable[[Call], None]) -> None:
    before = call()
    change(call)
    after = call()
    assert after == call.truth(), "the plan was made for something else"
    assert after != before, "this case changes nothing that the fusion sees"


@pytest.mark.usefixtures("look_is_on")
@pytest.mark.parametrize(
    "other", [torch.ones(2, dtype=torch.float64), torch.ones(3)], ids=["dtype", "shape"]
)
def test_parameters_of_functional_call_are_in_the_key(other: Tensor) -> None:
    call = Call()
    assert "float64" not in call()
    functional_call(call.seq, {"1.weight": other}, (call.x, call.extra))
    (group,) = call.seq._module_groups
    seen = group.last_plan.record("look").refusals[0][1].detail
    assert repr((other.dtype, other.shape))[1:-1] in seen


@pytest.mark.usefixtures("look_is_on")
def test_parametrising_changes_the_key() -> None:
    """The class is another one afterwards: never matched as what it was."""
    call = Call()
    call()
    parametrize.register_parametrization(call.probe, "weight", nn.Softplus())
    call.seq(call.x, call.extra)
    (group,) = call.seq._module_groups
    assert group.last_plan.record("look").status == "unmatched"
    parametrize.remove_parametrizations(call.probe, "weight")
    assert call() == call.truth()


def test_a_hook_changes_the_plan_and_so_does_its_removal() -> None:
    fusion = Fusion("pair", "forward", (opfuser.Identity, opfuser.Identity), FusedForward)
    seq = opfuser.Sequential(opfuser.Identity(), opfuser.Identity())
    x = torch.ones(2)
    with opfuser.register_forward_fusion(fusion):
        assert seq.plan(x).fused("forward") == {"pair": 1}
        hook = seq[1].register_forward_hook(lambda *_: None)
        made = seq.plan(x)
        assert made.fused("forward") == {}
        assert [(at, no.code) for at, no in made.record("pair").refusals] == [(0, "HOOK")]
        hook.remove()
        assert seq.plan(x).fused("forward") == {"pair": 1}


def test_changing_the_list_changes_the_plan() -> None:
    fusion = Fusion("pair", "forward", (opfuser.Identity, opfuser.Identity), FusedForward)
    seq = opfuser.Sequential(opfuser.Identity(), opfuser.Identity())
    x = torch.ones(2)
    with opfuser.register_forward_fusion(fusion):
        assert seq.plan(x).fused("forward") == {"pair": 1}
        seq[0] = opfuser.ConstantScale(2.0)
        assert seq.plan(x).fused("forward") == {}
        seq.append(opfuser.Identity())
        assert seq.plan(x).fused("forward") == {"pair": 1}
        del seq[0]
        seq.insert(1, opfuser.ConstantScale(2.0))
        assert seq.plan(x).fused("forward") == {}
        nested = opfuser.Sequential(opfuser.Identity())
        outer = opfuser.Sequential(nested)
        assert outer.plan(x).fused("forward") == {}
        nested.append(opfuser.Identity())
        assert outer.plan(x).fused("forward") == {"pair": 1}
