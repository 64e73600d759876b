"""fp32 copies of parameters, which any optimizer of torch updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import ArgumentError, MasterWeightError
from opfuser.optim import MasterWeights
from opfuser.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe

from .masters_by_hand import give_gradients, saved, values

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CURRENT, BLOCKS = Float8CurrentScaling(), Float8BlockScaling()


def model(recipe: Recipe | None = CURRENT, preserve: bool = False) -> opfuser.Sequential:
    """Parameters in FP8, bf16 and fp32."""
    torch.manual_seed(0)
    with opfuser.quantized_model_init(recipe is not None, recipe, preserve):
        return opfuser.Sequential(
            opfuser.RMSNorm(128),
            opfuser.Linear(128, 256, dtype=BF16),
            opfuser.SiLU(),
            opfuser.BasicLinear(256, 128, dtype=BF16),
        )


def adam(params: Any, lr: float = 1e-2, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.1, **how)


def sgd(params: Any, lr: float = 1e-2, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9, **how)


@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS, None])
@pytest.mark.parametrize("make", [adam, sgd])
@pytest.mark.parametrize("preserve", [True, False])
def test_steps_are_those_in_fp64_rounded_once(
    make: Callable[..., torch.optim.Optimizer], recipe: Recipe | None, preserve: bool
) -> None:
    seq = model(recipe, preserve)
    start = values(model(None) if preserve and recipe else seq)
    masters = [nn.Parameter(v.double()) for v in start]
    optimizer, exact = MasterWeights(seq, make), make(masters)
    for n in range(5):
        give_gradients(seq.parameters(), n)
        for master, p in zip(masters, seq.parameters()):
            master.grad = None if p.grad is None else p.grad.double()
        optimizer.step()
        exact.step()
    updated = [optimizer.state[p].get("master_param", p.detach()) for p in seq.parameters()]
    for p, master, ours, want in zip(seq.parameters(), updated, values(seq), masters):
        torch.testing.assert_close(master.double(), want, rtol=1e-4, atol=1e-5)
        ulp = {E4M3: 2**-4, BF16: 2**-8, torch.float32: 1e-4}[p.dtype]
        spacing = 2**-9 if p.dtype == E4M3 else 0  # of the smallest codes, times the largest scale
        bound = ulp * want.abs() + spacing * want.abs().max() / 448 + 1e-5
        assert ((ours - want).abs() <= 1.001 * bound).all()
    for linear in (seq[1], seq[3]):
        again = model(recipe)[1 if linear is seq[1] else 3]
        again.write_weight(optimizer.state[linear.weight]["master_param"])
        assert torch.equal(again.weight.float(), linear.weight.float())
        if recipe is not None:
            assert torch.equal(again.weight_scale, linear.weight_scale)


def test_training_follows_that_in_fp32() -> None:
    seq = model(preserve=True)
    plain = model(None).float()
    optimizer, exact = MasterWeights(seq, adam), adam(plain.parameters())
    torch.manual_seed(2)
    x, target = torch.randn(64, 128), torch.randn(64, 128)
    losses = []
    for m, o, dtype in ((seq, optimizer, BF16), (plain, exact, torch.float32)):
        schedule = torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, 30)
        losses.append([])
        for _ in range(30):
            with opfuser.autocast(enabled=m is seq, recipe=CURRENT):
                loss = (m(x.to(dtype)).float() - target).square().mean()
            o.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            o.step()
            schedule.step()
            losses[-1].append(loss.item())
    ours, want = losses
    assert want[-1] < 0.1 * want[0]
    assert ours[-1] < want[-1] + 0.005 * want[0]


def masters(optimizer: MasterWeights) -> list[Tensor]:
    return [p.detach().clone() for g in optimizer.optimizer.param_groups for p in g["params"]]


@pytest.mark.parametrize("lost", [False, True])
def test_initial_values_are_saved_before_the_first_step(lost: bool) -> None:
    """They exist nowhere else. Once the parameter is another one they are of no use."""
    seq, other = model(preserve=True), model()
    weight: Any = seq[1].weight
    value = weight.get_high_precision_init_val()
    optimizer, resumed = MasterWeights(seq, adam), MasterWeights(other, adam)
    assert torch.equal(masters(optimizer)[1], value.float())
    assert weight.get_high_precision_init_val() is None, "it is freed"
    if lost:
        seq[1].write_weight(torch.ones(256, 128))
    other.load_state_dict(seq.state_dict())
    resumed.load_state_dict(saved(optimizer.state_dict()))
    assert not optimizer.state
    for m, o in ((seq, optimizer), (other, resumed)):
        give_gradients(m.parameters(), 1)
        o.step()
    assert all(map(torch.equal, masters(resumed), masters(optimizer)))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS])
def test_a_step_waits_for_no_gpu(recipe: Recipe, no_waiting: Any) -> None:
    seq = model(recipe).cuda()
    optimizer = MasterWeights(seq, adam)
    x = torch.randn(64, 128, dtype=BF16, device="cuda")
    for n in range(3):
        with no_waiting() if n else nullcontext():
            with opfuser.autocast(recipe=recipe):
                loss = seq(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(t.isfinite().all() for t in values(seq))


def test_a_weight_of_another_model() -> None:
    with pytest.raises(ArgumentError, match=r"weights of linear operations of the model .*float8"):
        MasterWeights(nn.Identity(), adam, model().parameters())


@pytest.mark.parametrize("recipe", [CURRENT, None])
def test_the_meta_device(recipe: Recipe | None) -> None:
    """``to_empty`` replaces parameters; an optimizer that has those of before does nothing."""
    with torch.device("meta"):
        seq = model(recipe)
    for name, p in seq.named_parameters():
        with pytest.raises(ArgumentError) as error:
            MasterWeights(seq, adam, [p])
        assert str(error.value) == (
            "Parameters have values, which masters begin with (MasterWeights). Received: "
            f"{name} of {p.dtype} and shape {tuple(p.shape)} on the meta device. "
            "Materialize the model first: to_empty replaces its parameters."
        )
    seq.to_empty(device="cpu")
    for op in seq:
        if hasattr(op, "reset_parameters"):
            op.reset_parameters()
    before, optimizer = values(seq), MasterWeights(seq, adam)
    give_gradients(seq.parameters(), 1)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, values(seq)))


def test_refused_parameters_change_nothing() -> None:
    """No initial value of others is taken, and no group is added."""
    seq, meta = model(preserve=True), nn.Parameter(torch.empty(2, device="meta"))
    weight: Any = seq[1].weight
    for groups in ([{"params": [weight]}, {"params": [meta]}], [weight, meta]):
        with pytest.raises(ArgumentError, match=r"a parameter of .* on the meta device"):
            MasterWeights(seq, adam, groups)
        assert weight.get_high_precision_init_val() is not None
    optimizer = MasterWeights(seq, adam, [seq[0].weight])
    with pytest.raises(ArgumentError, match=r"a parameter of .* on the meta device"):
        optimizer.add_param_group({"params": [weight, meta]})
    assert weight.get_high_precision_init_val() is not None
    give_gradients(seq.parameters(), 1)
    before = values(seq)
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, values(seq))]
    assert changed == [True] + [False] * (len(changed) - 1)


@pytest.mark.parametrize("steps", [0, 1])
def test_weights_in_fp8_that_were_replaced(steps: int) -> None:
    seq, other = model(), model()
    optimizer = MasterWeights(seq, adam)
    for _ in range(steps):
        give_gradients(seq.parameters(), 1)
        optimizer.step()
    seq.load_state_dict(other.state_dict(), assign=True)
    give_gradients(seq.parameters(), 1)
    before, state = values(seq), copy.deepcopy(optimizer.state_dict()["state"])
    for _ in range(2):
        with pytest.raises(MasterWeightError) as error:
            optimizer.step()
        assert str(error.value) == (
            "A weight in FP8 stays the parameter that its optimizer was made for (MasterWeights). "
            "Received: 1.weight, in whose place the operation has another one. Make the optimizer "
            "after what replaces parameters, as load_state_dict(assign=True) does."
        )
        optimizer.read_parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, values(seq)))
    assert optimizer.state_dict()["state"].keys() == state.keys()
    optimizer = MasterWeights(seq, adam)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, values(seq)))
