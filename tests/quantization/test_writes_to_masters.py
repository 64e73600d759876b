"""What else than an optimizer with masters writes to parameters, and to its state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, Adagrad, Adam

import opfuser
from opfuser.basic import _master
from opfuser.errors import ArgumentError, MasterWeightError
from opfuser.optim import MasterWeights

from .masters_by_hand import BF16, ByHand, assert_same, assert_stored, give_gradients, model, values

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

Write = Callable[[Any, Tensor], Any]
"""Writes codes or values to a parameter or buffer."""


def _in_place(t: Any, new: Tensor) -> None:
    with torch.no_grad():
        t.copy_(new)


def _behind(t: Any, new: Tensor) -> None:
    t.data.copy_(new)


def _in_other_memory(t: Any, new: Tensor) -> None:
    t.data = new.clone()


def _by_numpy(t: Any, new: Tensor) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize]
    t.detach().view(bits).numpy()[...] = new.view(bits).numpy()


def _as_a_vector(t: Any, new: Tensor) -> None:
    vector_to_parameters(new.flatten(), [t])


WRITES: dict[str, Write] = {
    "copy_": _in_place,
    "data.copy_": _behind,
    "data =": _in_other_memory,
    "numpy": _by_numpy,
    "vector_to_parameters": _as_a_vector,
}
PLACES = {
    "values": (False, "1.weight"),
    "codes": (True, "1.weight"),
    "scale": (True, "1.weight_scale"),
}


def stepped(fp8: bool, make: Any = Adam) -> tuple[opfuser.Sequential, MasterWeights]:
    seq = model(fp8)
    optimizer = MasterWeights(seq, make, lr=0.05)
    give_gradients(seq.parameters(), 0)
    optimizer.step()
    return seq, optimizer


def place_of(seq: nn.Module, name: str) -> Any:
    return {**dict(seq.named_parameters()), **dict(seq.named_buffers())}[name]


def clones(seq: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in seq.state_dict().items()}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", PLACES)
def test_writes_are_noticed(write: str, place: str) -> None:
    fp8, name = PLACES[place]
    seq, optimizer = stepped(fp8)
    before, state = clones(seq), copy.deepcopy(optimizer.state_dict())
    t = place_of(seq, name)
    new = (t.float() / 2).to(t.dtype)  # twice the largest code would be NaN before torch 2.13
    WRITES[write](t, new)
    for _ in range(2):  # also when the step is tried again
        with pytest.raises(MasterWeightError) as error:
            optimizer.step()
    assert str(error.value) == (
        "Parameters with master weights are written to by their optimizer alone (MasterWeights). "
        "Received: 1.weight of shape (32, 16), which was written to since. Call read_parameters(), "
        "or load the optimizer's state after that of the model."
    )
    assert_same(clones(seq), {**before, name: new})
    assert_same(optimizer.state_dict(), state)
    optimizer.read_parameters()
    read = [optimizer.state[p].get("master_param", p) for p in seq.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(read, values(seq)))
    optimizer.step()
    optimizer.step()
    assert_stored(seq, [optimizer.state[p].get("master_param", p) for p in seq.parameters()])


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", PLACES)
def test_the_same_values_are_no_error(write: str, place: str) -> None:
    fp8, name = PLACES[place]
    (seq, optimizer), (other, exact) = stepped(fp8), stepped(fp8)
    for n in (1, 2):
        t = place_of(seq, name)
        WRITES[write](t, t.detach().clone())
        for m, o in ((seq, optimizer), (other, exact)):
            give_gradients(m.parameters(), n)
            o.step()
    assert_same(clones(seq), clones(other))


@pytest.mark.parametrize("shape", [(), (3,), (33, 65), (4096,), (5, 7, 11)])
def test_every_part_of_a_parameter_is_sampled(shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.randn(shape).bfloat16())
    optimizer = MasterWeights(nn.Identity(), SGD, [weight], lr=0.5)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    for part in weight.data.view(-1).chunk(16):
        before = part.clone()
        part.add_(1)
        with pytest.raises(MasterWeightError, match="a parameter of shape"):
            optimizer.step()
        part.copy_(before)
    optimizer.step()


@pytest.mark.parametrize("how", [lambda t: t.t(), lambda t: t[:, 1:-1], lambda t: t[::2]])
def test_parameters_that_are_not_contiguous(how: Callable[[Tensor], Tensor]) -> None:
    weight = nn.Parameter(how(torch.randn(40, 30).bfloat16()))
    empty = nn.Parameter(torch.empty(0, 3, dtype=BF16))
    optimizer = MasterWeights(nn.Identity(), SGD, [weight, empty], lr=0.5)
    for _ in range(3):
        weight.grad, empty.grad = torch.ones_like(weight), torch.ones_like(empty)
        optimizer.step()
    weight.data += 1
    with pytest.raises(MasterWeightError, match="a parameter of shape"):
        optimizer.step()


def test_nan_and_a_round_trip_through_a_vector_are_no_writes() -> None:
    seq, optimizer = stepped(False)
    params = list(seq[1].parameters())
    for _ in range(2):
        vector_to_parameters(parameters_to_vector(params), params)
        optimizer.step()
    for p in seq.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    seq.load_state_dict(clones(seq))
    optimizer.step()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("write", ["copy_", "data.copy_", "data ="])
def test_before_the_first_update_anything_writes(fp8: bool, write: str) -> None:
    """As a model that is loaded after its optimizer was made."""
    seq, other = model(fp8, preserve=fp8), model(fp8, seed=1)
    optimizer = MasterWeights(seq, SGD, lr=0.05)
    for t, new in zip(seq.state_dict(keep_vars=True).values(), other.state_dict().values()):
        WRITES[write](t, new)
    hand = ByHand(other, lambda groups: SGD(groups, lr=0.05))
    for n in range(2):
        for m in (seq, other):
            give_gradients(m.parameters(), n)
        optimizer.step()
        hand.step()
        hand.check(seq)


def test_what_has_no_gradient_is_written_to() -> None:
    seq = model(False)
    optimizer = MasterWeights(seq, Adam)
    for n in range(3):
        give_gradients(seq.parameters(), n, without=[1])
        seq[1].weight.data.fill_(n)
        optimizer.step()
        assert (seq[1].weight == n).all()
    give_gradients(seq.parameters(), 3)
    optimizer.step()
    assert (optimizer.state[seq[1].weight]["master_param"] - 2).abs().max() <= 1.1e-3


def test_groups_that_are_added_hide_no_write() -> None:
    seq = model(False)
    for make in (Adam, Adagrad):
        optimizer = MasterWeights(seq, make, [seq[1].weight])
        give_gradients(seq.parameters(), 0)
        if make is Adam:  # Adagrad has masters from the start
            optimizer.step()
        seq[1].weight.data += 1
        optimizer.add_param_group({"params": [seq[3].weight]})
        with pytest.raises(MasterWeightError, match=r"1\.weight"):
            optimizer.step()


@pytest.mark.parametrize("fp8", [False, True])
def test_copies_hide_no_write(fp8: bool) -> None:
    seq, optimizer = stepped(fp8)
    copy.deepcopy((seq, optimizer))[1].step()
    place_of(seq, "1.weight_scale" if fp8 else "1.weight").data.mul_(2)
    with pytest.raises(MasterWeightError, match=r"1\.weight"):
        copy.deepcopy((seq, optimizer))[1].step()


@pytest.mark.parametrize("fp8", [False, True])
def test_where_the_host_does_not_wait(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a step compares, a later one or the state dict tells."""
    # Only the type of the device tells which of the two there is.
    monkeypatch.setattr(_master, "_COMPARED_AT_ONCE", ())
    error: Any = pytest.raises(
        MasterWeightError, match=r"1\.weight .*a step has overwritten .*Write it again"
    )
    for tell in ("step", "state_dict", "add"):
        seq, optimizer = stepped(fp8)
        optimizer.step()
        before = seq[1].weight.detach().clone()
        seq[1].weight.data.copy_((before.float() * 2).to(before.dtype))
        optimizer.step()
        with error:
            if tell == "add":  # another parameter begins, and the sample is another one
                optimizer.add_param_group({"params": [new := nn.Parameter(before.bfloat16())]})
                new.grad = torch.ones_like(new)
            getattr(optimizer, "step" if tell == "add" else tell)()
        optimizer.read_parameters()
        optimizer.step()
        optimizer.step()
        assert optimizer.state_dict()


# State that users set


def continued(seq: Any, optimizer: MasterWeights, hand: ByHand) -> None:
    for n in (5, 6):
        give_gradients(seq.parameters(), n)
        optimizer.step()
        hand.step()
        hand.check()


def by_hand(seq: nn.Module, optimizer: MasterWeights, make: Any = Adam) -> ByHand:
    """With equal masters and moments."""
    hand = ByHand(seq, lambda groups: make(groups, lr=0.05))
    for p, master in zip(seq.parameters(), hand.masters):
        state = copy.deepcopy(dict(optimizer.state[p]))
        master.data.copy_(state.pop("master_param", master))
        hand.optimizer.state[master] = state
    return hand


@pytest.mark.parametrize("fp8", [False, True])
def test_state_of_parameters(fp8: bool) -> None:
    seq, optimizer = stepped(fp8)
    assert set(optimizer.state) == set(seq.parameters())
    state = optimizer.state[seq[1].weight]
    assert set(state) == {"master_param", "step", "exp_avg", "exp_avg_sq"}
    master = state["master_param"]
    assert master is optimizer.optimizer.param_groups[0]["params"][1]
    assert master.dtype == torch.float32
    assert not torch.equal(master, master.bfloat16().float())
    optimizer.step()
    assert optimizer.state[seq[1].weight] is state  # as torch's keeps them
    hand = by_hand(seq, optimizer)
    continued(seq, optimizer, hand)


@pytest.mark.parametrize("fp8", [False, True])
def test_steps_follow_the_state(fp8: bool) -> None:
    """What is changed in it in place, replaced, cleared and deleted."""
    seq, optimizer = stepped(fp8)
    hand = by_hand(seq, optimizer)
    weights = [seq[1].weight, seq[1].bias, seq[3].weight]
    numbers = [n for n, p in enumerate(seq.parameters()) if any(p is w for w in weights)]
    masters = [hand.masters[n] for n in numbers]
    first, second, third = (optimizer.state[w] for w in weights)
    first["master_param"].mul_(2)
    first["exp_avg"] = torch.ones_like(first["exp_avg"])
    masters[0].data.mul_(2)
    hand.optimizer.state[masters[0]]["exp_avg"].fill_(1)
    second["master_param"] = torch.full((32,), 0.3)
    masters[1].data.fill_(0.3)
    third.clear()
    hand.optimizer.state[masters[2]].clear()
    masters[2].data.copy_(values(seq)[numbers[2]])
    continued(seq, optimizer, hand)
    assert second["master_param"] is optimizer.optimizer.param_groups[0]["params"][numbers[1]]
    del optimizer.state[weights[0]]
    optimizer.state[weights[1]] = {**optimizer.state[weights[1]], "exp_avg": torch.ones(32)}
    del hand.optimizer.state[masters[0]]
    masters[0].data.copy_(values(seq)[numbers[0]])
    hand.optimizer.state[masters[1]]["exp_avg"].fill_(1)
    continued(seq, optimizer, hand)


def test_a_state_that_was_deleted_lets_the_parameter_be_written() -> None:
    seq, optimizer = stepped(False)
    del optimizer.state[seq[1].weight]
    seq[1].weight.data.fill_(1)
    optimizer.step()
    seq, optimizer = stepped(False)
    optimizer.state.clear()
    seq.load_state_dict(model(False, seed=1).state_dict())
    optimizer.step()


def test_a_master_of_another_shape() -> None:
    seq, optimizer = stepped(False)
    before = clones(seq)
    optimizer.state[seq[1].bias]["master_param"] = torch.ones(31)
    with pytest.raises(ArgumentError) as error:
        optimizer.step()
    assert str(error.value) == (
        "The state has a master of the shape of its parameter (MasterWeights). Received: "
        '"master_param" of shape (31,) for 1.bias of shape (32,). Load what was saved of the same '
        "model, or delete the state of this parameter, which then begins with its value."
    )
    assert_same(clones(seq), before)


def test_groups_that_were_changed() -> None:
    _, optimizer = stepped(False)
    weight = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups.append(
        {"params": [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]}
    )
    with pytest.raises(ArgumentError) as error:
        optimizer.step()
    assert str(error.value) == (
        "Parameters come into groups by add_param_group, and stay there (MasterWeights). Received: "
        "2 that are new and 1 that are gone. Make another optimizer and load the state dict of "
        "this one."
    )
    del optimizer.param_groups[1]
    optimizer.param_groups[0]["params"].append(weight)
    optimizer.step()
