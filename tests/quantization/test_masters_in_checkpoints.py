"""State dicts of masters: through torch.distributed.checkpoint, and those of other optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import SGD, Adagrad, Adam

import opfuser
from opfuser.errors import ArgumentError
from opfuser.optim import MasterWeights

from .masters_by_hand import ByHand, Make, assert_same, give_gradients, model, values

pytestmark = [
    pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # no_dist
]

Training = tuple[opfuser.Sequential, MasterWeights]
OPTIONS: dict[str, dict[str, bool]] = {
    "as it is": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True, "cpu_offload": True},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
}


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(
    fp8: bool, steps: int, make: Make = Adam, seed: int = 0, preserve: bool = False
) -> Training:
    seq = model(fp8, seed, preserve)
    groups = [
        {"params": [seq[1].weight, seq[1].bias], "lr": 0.03},
        {"params": [seq[3].weight, seq[0].weight]},
    ]
    optimizer = MasterWeights(seq, make, groups, lr=0.05)
    for n in range(steps):
        give_gradients(seq.parameters(), n + seed)
        optimizer.step()
    optimizer.zero_grad()
    return seq, optimizer


def model_first(training: Training, states: Any, options: StateDictOptions) -> None:
    set_model_state_dict(training[0], states[0], options=options)
    set_optimizer_state_dict(*training, states[1], options=options)


def optimizer_first(training: Training, states: Any, options: StateDictOptions) -> None:
    set_optimizer_state_dict(*training, states[1], options=options)
    set_model_state_dict(training[0], states[0], options=options)


def together(training: Training, states: Any, options: StateDictOptions) -> None:
    set_state_dict(
        *training, model_state_dict=states[0], optim_state_dict=states[1], options=options
    )


def assert_continues(exact: Training, other: Training) -> None:
    assert_equal(exact, other)
    for n in (5, 6):
        for seq, optimizer in (exact, other):
            give_gradients(seq.parameters(), n)
            optimizer.step()
    assert_equal(exact, other)


def assert_equal(exact: Training, other: Training) -> None:
    for own, wanted in zip(other, exact):
        assert_same(dict(own.state_dict()), dict(wanted.state_dict()))


@pytest.mark.parametrize(
    ("options", "fp8"),  # gloo broadcasts no codes of the model
    [(name, fp8) for name in OPTIONS for fp8 in (False, True) if not fp8 or name != "from rank 0"],
)
@pytest.mark.parametrize(
    ("order", "steps"), [(model_first, 0), (optimizer_first, 1), (together, 0), (model_first, 1)]
)
def test_checkpoints(
    options: str, order: Callable[..., None], steps: int, fp8: bool, tmp_path: Path
) -> None:
    given = StateDictOptions(**OPTIONS[options])
    exact = trained(fp8, 2)
    for p in exact[0].parameters():
        assert p.grad is None
    weights = get_model_state_dict(exact[0], options=given)
    moments = get_optimizer_state_dict(*exact, options=given)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path, no_dist=True)
    other = trained(fp8, steps, seed=1)
    states = {
        "model": get_model_state_dict(other[0], options=given),
        "optimizer": get_optimizer_state_dict(*other, options=given),
    }
    assert states["optimizer"].keys() == moments.keys()
    dcp.load(states, checkpoint_id=tmp_path, no_dist=True)
    other = trained(fp8, steps, seed=1)
    order(other, (states["model"], states["optimizer"]), given)
    assert_continues(exact, other)


@pytest.mark.parametrize(
    ("options", "fp8", "preserve"),
    [("as it is", False, True), ("as it is", True, False), ("flat", True, True)],
)
@pytest.mark.parametrize("make", [SGD, partial(SGD, momentum=0.9), Adagrad])
def test_checkpoints_of_other_optimizers(
    make: Make, options: str, fp8: bool, preserve: bool
) -> None:
    given = StateDictOptions(**OPTIONS[options])
    exact, other = trained(fp8, 2, make), trained(fp8, 0, make, 1, preserve)
    states = copy.deepcopy(get_state_dict(*exact, options=given))
    model_first(other, states, given)
    assert_continues(exact, other)


@pytest.mark.parametrize("fp8", [False, True])
def test_asking_for_a_fresh_state_moves_nothing(fp8: bool) -> None:
    """torch makes the state by a step of zero gradients, in the dtype of the parameter."""
    seq, optimizer = trained(fp8, 0)
    before = values(seq)
    state = get_optimizer_state_dict(seq, optimizer)
    for a, b in zip(values(seq), before):
        torch.testing.assert_close(a, b, rtol=2e-7, atol=0)  # scales are made once more
    assert set(state["state"]) == {name for name, _ in seq.named_parameters()}
    assert "master_param" in state["state"]["1.weight"]
    if fp8:
        assert seq[1].weight.grad_dtype is None
        seq.to(torch.float16)
        assert seq[1].weight.grad_dtype is None
        seq(torch.ones(2, 16, dtype=torch.float16)).sum().backward()
        assert seq[1].weight.grad.dtype == torch.float16


@pytest.mark.parametrize("fp8", [False, True])
def test_a_state_dict_of_the_optimizer_alone(fp8: bool) -> None:
    """Masters begin with the values of the parameters, and moments are in fp32."""
    seq = model(fp8)
    plain = [nn.Parameter(v) for v in values(seq)]
    exact = Adam(plain, lr=0.05)
    for p in plain:
        p.grad = torch.randn_like(p)
    exact.step()
    state = exact.state_dict()
    hand, optimizer = ByHand(seq, lambda groups: Adam(groups, lr=0.05)), MasterWeights(seq, Adam)
    hand.optimizer.load_state_dict(copy.deepcopy(state))
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[seq[1].weight]["exp_avg"], exact.state[plain[1]]["exp_avg"])
    hand.optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.05
    for n in (1, 2):
        give_gradients(seq.parameters(), n)
        optimizer.step()
        hand.step()
        hand.check()


def test_masters_of_parameters_that_took_no_step() -> None:
    """As earlier versions saved them."""
    exact, other = trained(False, 2), trained(False, 0, seed=1)
    state = exact[1].state_dict()
    masters = {
        n: {"master_param": s["master_param"]}
        for n, s in state["state"].items()
        if "master_param" in s
    }
    other[0].load_state_dict(exact[0].state_dict())
    other[1].load_state_dict({**state, "state": masters})
    hand = ByHand(
        exact[0], lambda groups: Adam(groups, lr=0.05), [([1, 2], {"lr": 0.03}), ([3, 0], {})]
    )
    for p, master in zip(exact[0].parameters(), hand.masters):
        master.data.copy_(exact[1].state[p].get("master_param", p))
    give_gradients(other[0].parameters(), 5)
    for p, q in zip(exact[0].parameters(), other[0].parameters()):
        p.grad = q.grad
    other[1].step()
    hand.step()
    hand.check(other[0])


@pytest.mark.parametrize("fp8", [False, True])
def test_masters_for_a_model_in_fp32(fp8: bool) -> None:
    """It goes on from the masters, not from what they were rounded to."""
    exact = trained(fp8, 2)
    want = [exact[1].state[p].get("master_param", p.detach()) for p in exact[0].parameters()]
    seq = model(False).float()
    params = list(seq.parameters())
    optimizer = MasterWeights(
        seq, Adam, [{"params": params[1:3]}, {"params": [params[3], params[0]]}]
    )
    seq.load_state_dict(exact[0].state_dict())
    optimizer.load_state_dict(exact[1].state_dict())
    assert all(torch.equal(p, master) for p, master in zip(params, want))
    assert all("master_param" not in state for state in optimizer.state.values())


def _with_master(state: Any, master: Any) -> None:
    state["state"][1]["master_param"] = master


def _without_step(state: Any) -> None:
    state["state"][1]["step"] = 1
    del state["state"][0]["step"]


SHAPE = (
    "The state has a master of the shape of its parameter (MasterWeights). Received: "
    '"master_param" of {} for 1.bias of shape (32,). Load what was saved of the same model, or '
    "delete the state of this parameter, which then begins with its value."
)
GROUPS = (
    "A state dict has the groups of the optimizer, with as many parameters each (MasterWeights). "
    "Received: groups of [2, 1] parameters for those of [2, 2]. Make the optimizer with the groups "
    "that were saved."
)
MISFITS: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "shape": (lambda s: _with_master(s, torch.ones(9)), ArgumentError, SHAPE.format("shape (9,)")),
    "type": (lambda s: _with_master(s, 3.0), ArgumentError, SHAPE.format("3.0")),
    "groups": (lambda s: s["param_groups"][1]["params"].pop(), ArgumentError, GROUPS),
    "state": (_without_step, KeyError, "'step'"),  # Adam's own
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("fp8", [False, True])
def test_what_does_not_fit_changes_nothing(misfit: str, fp8: bool) -> None:
    change, error, text = MISFITS[misfit]
    (seq, optimizer), other = trained(fp8, 2), trained(fp8, 2)
    state = copy.deepcopy(trained(fp8, 3, seed=1)[1].state_dict())
    for group in state["param_groups"]:
        group["lr"] = 7.0
    change(state)
    with pytest.raises(error) as raised:
        optimizer.load_state_dict(state)
    assert str(raised.value) == text
    assert_continues(other, (seq, optimizer))


def test_a_state_dict_is_not_changed_by_loading_or_training() -> None:
    exact, other = trained(True, 2), trained(True, 0)
    state = copy.deepcopy(exact[1].state_dict())
    want = copy.deepcopy(state)
    other[1].load_state_dict(state)
    assert_same(state, want)
    masters: list[Tensor] = [
        s["master_param"] for s in state["state"].values() if "master_param" in s
    ]
    give_gradients(other[0].parameters(), 1)
    other[1].step()
    kept = [s["master_param"] for s in want["state"].values() if "master_param" in s]
    assert all(torch.equal(a, b) for a, b in zip(masters, kept))
