"""What FSDP2 adds to the host time of a model: Python calls and plans are counted, on two ranks.

Time itself is measured by benchmarks/host_sharded.py. What is no change of an operation, and what
is: tests/planning/test_replaced_parameters.py.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import opfuser
from opfuser.core.change_tracking import Clock
from opfuser.events import PlanCreated, subscribe
from tests.distributed.ranks import DEVICES, Checks, Outcomes, assert_passed

pytestmark = pytest.mark.distributed

RANKS = 2
UNITS = 6
DIM = 8
CHECKS = check = Checks()
PACKAGE = str(Path(opfuser.__file__).parent)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def device() -> torch.device:
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")


def model() -> opfuser.Sequential:
    to: Any = {"device": device()}
    torch.manual_seed(1)
    return opfuser.Sequential(
        *(
            opfuser.Residual(
                opfuser.RMSNorm(DIM, **to),
                opfuser.Linear(DIM, 2 * DIM, **to),
                opfuser.SwiGLU(),
                opfuser.Linear(DIM, DIM, **to),
            )
            for _ in range(UNITS)
        )
    )


def sharded(seq: opfuser.Sequential, **arguments: Any) -> opfuser.Sequential:
    mesh = init_device_mesh(device().type, (RANKS,))
    for block in seq:
        fully_shard(block, mesh=mesh, **arguments)
    return fully_shard(seq, mesh=mesh, **arguments)


def step_of(seq: opfuser.Sequential) -> Callable[[], None]:
    x = torch.randn(3, DIM, device=device())

    def step() -> None:
        seq(x).square().sum().backward()
        seq.zero_grad()

    return step


def python_calls(step: Callable[[], None]) -> int:
    """Of functions of the library, in a step that is not the first one."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    with opfuser.replay("off"):  # which first measures whether it gains anything
        for _ in range(4):  # plans, and is recorded
            step()
        sys.setprofile(profile)
        try:
            step()
        finally:
            sys.setprofile(None)
    return count


@check
def python_calls_of_a_step(rank: int, ranks: int) -> None:
    """No more than those of modules with hooks of their own; swaps of parameters cost none.

    Each unit is a group, with a node of its own in the graph of autograd: 27 calls.
    """
    hooked = model()
    for block in hooked:
        block.register_forward_pre_hook(lambda module, args: None)
    one_group = python_calls(step_of(model()))
    as_groups = python_calls(step_of(hooked))
    for arguments in ({}, {"mp_policy": BF16}, {"reshard_after_forward": False}):
        calls = python_calls(step_of(sharded(model(), **arguments)))
        assert calls <= as_groups, (arguments, calls, as_groups)
        assert (calls - one_group) / UNITS <= 30, (arguments, calls, one_group)


@contextmanager
def unchanged() -> Iterator[None]:
    """Raises if any operation counts as changed, or a plan is made."""
    plans: list[Any] = []
    before = Clock.now
    with subscribe(plans.append, only=PlanCreated):
        yield
    assert Clock.now == before
    assert not plans


@check
def plans_of_later_steps(rank: int, ranks: int) -> None:
    """None is made, nor does anything count as changed; also for other dtypes than are stored."""
    for arguments in ({}, {"mp_policy": BF16}):
        seq = sharded(model(), **arguments)
        step = step_of(seq)
        step()
        with unchanged():
            step()
            with torch.no_grad():
                for p in seq.parameters():
                    p.mul_(0.5)
            step()


@check
def changes_between_steps(rank: int, ranks: int) -> None:
    """What is frozen, or set by the user, is noticed; gradients are those of one process."""
    one, seq = model(), sharded(model())
    x = torch.randn(RANKS, 3, DIM, device=device())
    step_of(seq)()

    def compare() -> None:
        one.zero_grad()
        seq.zero_grad()
        one(x.flatten(0, 1)).square().sum().div(RANKS).backward()
        seq(x[rank]).square().sum().backward()
        for p, q in zip(seq.parameters(), one.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5)

    compare()
    for m in (one, seq):
        m[2][2].weight.requires_grad_(False)
        m[3][1].eps = 0.1
    compare()
    with unchanged():
        compare()
    for m in (one, seq):
        m[2][2].weight.requires_grad_()
    compare()


class Told(opfuser.Bias):
    """A user's operation that is to see each of its parameters."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self.__dict__.setdefault("told", []).append(type(param))


class Guards(opfuser.Bias):
    """One that is to see each of its attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.setdefault("told", []).append(type(value))
        super().__setattr__(name, value)


class Scaled(opfuser.Bias):
    """One that derives its settings from its parameter."""

    def make_settings(self) -> tuple[torch.dtype]:
        return (self.bias.dtype,)


@check
def operations_of_users(rank: int, ranks: int) -> None:
    """They see the parameters that are swapped, since nothing is known of what they do then."""
    for cls in (Told, Guards):
        op = cls(DIM, device=device())
        seq = sharded(opfuser.Sequential(opfuser.Sequential(op)))
        step_of(seq)()
        before = len(op.told)
        step_of(seq)()
        assert {nn.Parameter, DTensor} <= set(op.told[before:])
    op = Scaled(DIM, device=device())
    seq = sharded(opfuser.Sequential(opfuser.Sequential(op)), mp_policy=BF16)
    assert op.settings == (torch.float32,)
    seen = []
    op.register_forward_hook(lambda module, args, y: seen.append(op.settings))
    step_of(seq)()
    assert seen == [(torch.bfloat16,)]


def distributed(parameter: Tensor) -> nn.Parameter:
    mesh = init_device_mesh(device().type, (RANKS,))
    return nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None))


@check
def attributes_of_sharded_operations(rank: int, ranks: int) -> None:
    """What lets torch write into ``_parameters`` hides no other change, and is in no copy."""
    op = opfuser.RMSNorm(DIM, device=device())
    weight = op.weight
    op.weight = distributed(weight)
    assert op.__setattr__.__func__ is nn.Module.__setattr__
    op.weight = weight
    seq, x = opfuser.Sequential(op), torch.randn(3, DIM, device=device())
    for eps in (0.5, 0.25):
        op.__setattr__("eps", eps)
        torch.testing.assert_close(seq(x), nn.functional.rms_norm(x, (DIM,), weight, eps))
    op.__setattr__("weight", nn.Parameter(weight.detach() * 2))
    torch.testing.assert_close(seq(x), nn.functional.rms_norm(x, (DIM,), weight * 2, eps))
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op)), copy.copy(op)):
        assert "__setattr__" not in twin.__dict__
        twin.eps = 0.1
        assert op.eps == 0.25


@check
def codes_are_registered(rank: int, ranks: int) -> None:
    with opfuser.quantized_model_init(recipe=opfuser.recipe.Float8CurrentScaling()):
        op = opfuser.Linear(16, 16, device=device())
    assert op.weight.itemsize == 1
    op.weight = distributed(op.weight)
    assert "__setattr__" not in op.__dict__
    assert op.weight.grad_dtype == op.weight_format.dtype


@pytest.mark.parametrize("outcomes", DEVICES, indirect=True, scope="module")
@pytest.mark.parametrize("name", CHECKS)
def test_sharded_host(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
