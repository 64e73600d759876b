"""Every optimizer of torch on masters, bit for bit as on fp32 masters that are kept by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

import opfuser
from opfuser.errors import NotSupportedError
from opfuser.optim import MasterWeights

from .masters_by_hand import BF16, ByHand, Make, give_gradients, model, saved, values

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

_OPTIONS: dict[type[Optimizer], list[dict[str, Any]]] = {
    Adadelta: [{}, {"weight_decay": 0.1, "maximize": True}],
    Adafactor: [{"lr": 0.1}, {"lr": 0.1, "maximize": True, "weight_decay": 0.1}],
    Adagrad: [{}, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}, {"fused": True}],
    Adam: [{}, {"amsgrad": True, "weight_decay": 0.1}, {"fused": True}],
    Adamax: [{}, {"weight_decay": 0.1, "maximize": True}],
    AdamW: [{}, {"amsgrad": True}, {"fused": True, "maximize": True}, {"lr": torch.tensor(0.01)}],
    ASGD: [{"t0": 1}, {"weight_decay": 0.1, "maximize": True}],
    NAdam: [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    RAdam: [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    RMSprop: [{}, {"centered": True, "momentum": 0.9}],
    Rprop: [{}, {"etas": (0.4, 1.3), "maximize": True}],
    SGD: [
        {},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "fused": True},
    ],
}


def _cases() -> dict[str, Make]:
    made: dict[str, Make] = {}
    for kind, options in _OPTIONS.items():
        for given in options:
            both: list[dict[str, Any]] = [{}] if "fused" in given else [{"foreach": False}]
            if not given:  # of each kind once
                both.append({"foreach": True})
            for how in both:
                arguments = {"lr": 0.01, **given, **how}
                name = ", ".join(f"{key}={value}" for key, value in {**given, **how}.items())
                made[f"{kind.__name__}({name})"] = partial(kind, **arguments)
    return made


CASES = _cases()
# Either kind of weight with every other case, and both with each kind of optimizer.
every_optimizer = pytest.mark.parametrize(
    ("case", "fp8"), [(case, bool(n % 2)) for n, case in enumerate(CASES)]
)
each_kind = pytest.mark.parametrize(
    ("case", "fp8"),
    [
        (next(case for case in CASES if case.startswith(f"{kind.__name__}(")), bool(n % 2))
        for n, kind in enumerate(_OPTIONS)
    ],
)
in_bf16_and_fp8 = pytest.mark.parametrize("fp8", [False, True])
STARTS_WITH_STATE = "Adagrad"


def new(fp8: bool, make: Make, seed: int = 0) -> tuple[opfuser.Sequential, MasterWeights]:
    seq = model(fp8, seed)
    return seq, MasterWeights(seq, make)


def two_steps(seq: nn.Module, optimizer: Optimizer, start: int = 0) -> None:
    for n in range(start, start + 2):
        give_gradients(seq.parameters(), n)
        optimizer.step()


@every_optimizer
def test_steps(case: str, fp8: bool) -> None:
    """One parameter gets its first gradient late, another one has none in between."""
    seq = model(fp8)
    groups: Any = [([1, 2], {}), ([0, 3], {"lr": 0.03})]
    hand = ByHand(seq, CASES[case], groups)
    params = list(seq.parameters())
    optimizer = MasterWeights(
        seq, CASES[case], [{"params": [params[n] for n in ns], **how} for ns, how in groups]
    )
    updated = set(params) if case.startswith(STARTS_WITH_STATE) else set()
    assert bool(optimizer.state) == bool(updated)
    # torch's SGD(fused=True) takes no parameters with momentum beside those that have none yet.
    late = () if case == "SGD(momentum=0.9, fused=True)" else (1,)
    for n, without in enumerate([late, (), (2,), ()]):
        give_gradients(params, n, without)
        updated |= {p for p in params if p.grad is not None}
        optimizer.step()
        hand.step()
        hand.check()
        hand.check_state(optimizer, updated)
    for group, theirs in zip(optimizer.param_groups, hand.optimizer.param_groups):
        assert {**group, "params": 0} == {**theirs, "params": 0}


@each_kind
def test_closures(case: str, fp8: bool) -> None:
    seq, other = model(fp8), model(fp8)
    optimizer, hand = MasterWeights(seq, CASES[case]), ByHand(other, CASES[case])

    def of(m: nn.Module, then: Callable[[], Any]) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            assert torch.is_grad_enabled()
            m.zero_grad()
            loss = m(torch.linspace(-1, 1, 64, dtype=BF16).view(4, 16)).float().square().mean()
            loss.backward()
            then()
            return loss

        return closure

    for _ in range(3):
        loss = optimizer.step(of(seq, lambda: None))
        with torch.no_grad():
            want = hand.optimizer.step(of(other, hand.take_gradients))
        assert torch.equal(loss, want)
        round_to(other, hand)
        hand.check(seq)


def round_to(seq: nn.Module, hand: ByHand) -> None:
    """Loads masters into the parameters."""
    names = [name for name, _ in seq.named_parameters()]
    masters = dict(zip(names, (m.detach() for m in hand.masters)))
    seq.load_state_dict({**seq.state_dict(), **masters})


@every_optimizer
def test_state_dicts(case: str, fp8: bool) -> None:
    seq, optimizer = new(fp8, CASES[case])
    two_steps(seq, optimizer)
    state = saved([seq.state_dict(), optimizer.state_dict()])
    other, resumed = new(fp8, CASES[case], seed=1)
    other.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    assert_continues((seq, optimizer), (other, resumed))


@each_kind
@pytest.mark.parametrize("copied", [copy.deepcopy, partial(saved, weights_only=False)])
def test_copies(case: str, fp8: bool, copied: Callable[[Any], Any]) -> None:
    """Of the optimizer alone, before or after the model, and of what has taken no step."""
    seq, optimizer = new(fp8, CASES[case])
    fresh = copied({"optimizer": optimizer, "model": seq})
    two_steps(seq, optimizer)
    two_steps(fresh["model"], fresh["optimizer"])
    later = copied((seq, optimizer))
    alone = copied(optimizer)
    assert_continues((seq, optimizer), (fresh["model"], fresh["optimizer"]), later)
    ours = [p for group in alone.param_groups for p in group["params"]]
    for n in (5, 6):
        give_gradients(ours, n)
        alone.step()
    for p, q in zip(ours, seq.parameters()):
        assert torch.equal(p.float(), q.float())


def assert_continues(exact: Any, *others: Any) -> None:
    """From equal parameters, further steps are equal, with the states that they leave."""
    for seq, optimizer in (exact, *others):
        two_steps(seq, optimizer, start=5)
        for name, t in exact[0].state_dict().items():
            assert torch.equal(seq.state_dict()[name].float(), t.float())
        state, want = optimizer.state_dict()["state"], exact[1].state_dict()["state"]
        assert state.keys() == want.keys()
        for number, kept in want.items():
            torch.testing.assert_close(state[number], kept, rtol=0, atol=0)


def takes_groups_later(make: Any) -> bool:
    """Whether torch's own does: before 2.13, Adagrad has no state for what comes later."""
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = make([p])
    optimizer.add_param_group({"params": [q]})
    p.grad = q.grad = torch.ones(2)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def steps_with_a_group_more(seq: nn.Module, make: Make) -> tuple[ByHand, MasterWeights]:
    params = list(seq.parameters())
    hand, optimizer = ByHand(seq, make, [([1, 2], {})]), MasterWeights(seq, make, params[1:3])
    for n in range(4):
        if n == 2:
            optimizer.add_param_group({"params": [params[0], params[3]], "lr": 0.03})
            added = [hand.masters[0], hand.masters[3]]
            hand.optimizer.add_param_group({"params": added, "lr": 0.03})
        give_gradients(params, n)
        optimizer.step()
        hand.step()
    hand.check()
    return hand, optimizer


@each_kind
def test_add_param_group(case: str, fp8: bool) -> None:
    if not takes_groups_later(CASES[case]):
        pytest.skip("torch's own optimizer takes no parameters later")
    steps_with_a_group_more(model(fp8), CASES[case])


@in_bf16_and_fp8
def test_lbfgs(fp8: bool) -> None:
    """It moves masters several times in a step, to where gradients are taken next."""
    seq, other = model(fp8), model(fp8)
    make = partial(LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    optimizer, hand = MasterWeights(seq, make), ByHand(other, make)
    x = torch.linspace(-1, 1, 64, dtype=BF16).view(4, 16)
    seen: tuple[list[float], list[float]] = [], []

    def ours() -> Tensor:
        optimizer.zero_grad()
        loss = seq(x).float().square().mean()
        loss.backward()
        seen[0].append(loss.item())
        return loss

    def theirs() -> Tensor:
        round_to(other, hand)
        other.zero_grad()
        loss = other(x).float().square().mean()
        loss.backward()
        seen[1].append(loss.item())
        hand.take_gradients()
        return loss

    for step in range(3):
        optimizer.step(ours)
        hand.optimizer.step(theirs)
        assert seen[0] == seen[1]
        hand.check(seq)
        if step == 1:
            state = saved([seq.state_dict(), optimizer.state_dict()])
            seq, optimizer = new(fp8, make, seed=1)
            seq.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
    assert len(seen[0]) > 6


@in_bf16_and_fp8
def test_muon(fp8: bool) -> None:
    """It takes matrices alone."""
    seq, other = model(fp8), model(fp8, seed=1)
    optimizer, resumed = (MasterWeights(m, Muon, [m[1].weight, m[3].weight]) for m in (seq, other))
    hand = ByHand(seq, Muon, [([1, 3], {})])
    two_steps(seq, optimizer)
    for n in range(2):
        give_gradients(seq.parameters(), n)
        hand.step()
    hand.check()
    other.load_state_dict(saved(seq.state_dict()))
    resumed.load_state_dict(saved(optimizer.state_dict()))
    assert_continues((seq, optimizer), (other, resumed))


def test_sparse_gradients() -> None:
    weight = nn.Embedding(6, 4, sparse=True, dtype=BF16).weight
    master = nn.Parameter(weight.detach().float())
    optimizer = MasterWeights(nn.Identity(), SparseAdam, [weight], lr=0.1)
    hand = SparseAdam([master], lr=0.1)
    for n in range(3):
        index = torch.tensor([n, 1, n + 2])
        optimizer.zero_grad()
        torch.nn.functional.embedding(index, weight, sparse=True).float().square().sum().backward()
        master.grad = weight.grad.float()
        optimizer.step()
        hand.step()
        assert torch.equal(weight, master.bfloat16())
        assert torch.equal(optimizer.state[weight]["master_param"], master)


def test_parameters_that_need_no_master() -> None:
    """A complex one has no fp32 copy, which would lose its imaginary part."""
    params = [nn.Parameter(torch.randn(3).to(d)) for d in (torch.complex64, torch.float64)]
    plain = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer, exact = MasterWeights(nn.Identity(), Adam, params), Adam(plain)
    for p, q in zip(params, plain):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    optimizer.step()
    exact.step()
    assert all(torch.equal(p, q) for p, q in zip(params, plain))
    assert all("master_param" not in state for state in optimizer.state.values())


def test_derivatives_of_steps_are_refused() -> None:
    message = (
        "Rounding a master to its parameter has no derivative (MasterWeights). Received: "
        "differentiable=True; 1.weight of torch.bfloat16. Leave it off, or keep parameters in fp32."
    )
    seq = model(False)
    with pytest.raises(NotSupportedError) as error:
        MasterWeights(seq, Adam, differentiable=True)
    assert str(error.value) == message
    optimizer = MasterWeights(seq, Adam, [seq[0].weight])
    with pytest.raises(NotSupportedError) as error:
        optimizer.add_param_group({"params": [seq[1].weight], "differentiable": True})
    assert str(error.value) == message
    assert len(optimizer.param_groups) == len(optimizer.optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [seq[1].weight]})
    before = values(seq)
    two_steps(seq, optimizer)
    assert [torch.equal(a, b) for a, b in zip(before, values(seq))] == [False, False, True, True]


def test_hooks() -> None:
    """All of them, as those of the optimizer itself; what a hook returns is used."""

    def log_of(make: Callable[[nn.Module], Optimizer]) -> list[str]:
        seq = opfuser.Sequential(opfuser.Linear(4, 4, dtype=BF16))
        optimizer, log = make(seq), []
        optimizer.register_step_pre_hook(lambda o, args, kwargs: log.append("before step"))
        optimizer.register_step_post_hook(lambda o, args, kwargs: log.append("after step"))
        optimizer.register_state_dict_pre_hook(lambda o: log.append("before saving"))
        optimizer.register_state_dict_post_hook(
            lambda o, state: log.append("after saving") or {**state, "more": 1}
        )

        def before_loading(o: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            log.append(f"before loading {state.pop('more')}, lr {o.param_groups[0]['lr']}")
            groups = [{**group, "lr": 0.25} for group in state["param_groups"]]
            return {**state, "param_groups": groups}

        optimizer.register_load_state_dict_pre_hook(before_loading)
        optimizer.register_load_state_dict_post_hook(
            lambda o: log.append(f"after loading, lr {o.param_groups[0]['lr']}")
        )
        two_steps(seq, optimizer)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert state["more"] == 1  # hooks get a copy
        return log

    ours = log_of(lambda seq: MasterWeights(seq, AdamW, lr=0.5))
    assert ours == log_of(lambda seq: AdamW(seq.parameters(), lr=0.5))
    assert ours[-2:] == ["before loading 1, lr 0.5", "after loading, lr 0.25"]


class _MakesStateOfAll(SGD):
    """Makes its state whenever there is a group more, as optimizers of other packages do."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.ones_like(p)
        self.state.setdefault("groups", {"count": len(self.param_groups)})


@in_bf16_and_fp8
def test_an_optimizer_that_makes_its_state_early(fp8: bool) -> None:
    """And keeps something that is no parameter's."""
    make = partial(_MakesStateOfAll, lr=0.01, momentum=0.9)
    seq = model(fp8)
    hand, optimizer = steps_with_a_group_more(seq, make)
    hand.check_state(optimizer, set(seq.parameters()))
    assert optimizer.state_dict()["state"]["groups"] == {"count": 1}
    other = model(fp8, seed=1)
    resumed = MasterWeights(other, make, list(other.parameters())[1:3])
    resumed.add_param_group({"params": [other[0].weight, other[3].weight]})
    other.load_state_dict(saved(seq.state_dict()))
    resumed.load_state_dict(saved(optimizer.state_dict()))
    assert_continues((seq, optimizer), (other, resumed))
