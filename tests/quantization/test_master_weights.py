"""fp32 copies of parameters, which any optimiser of torch updates."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import opfuser
from opfuser.errors import ArgumentError, MasterWeightError
from opfuser.optim import MasterWeights
from opfuser.recipe import Float8BlockScaling, Float8CurrentScaling, Recipe

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


def give_gradients(model: nn.Module, seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    made = []
    for p in model.parameters():
        dtype = BF16 if p.itemsize == 1 else p.dtype
        p.grad = torch.randn(p.shape).to(dtype)
        made.append(p.grad.double())
    return made


def values(model: nn.Module) -> list[Tensor]:
    """In fp64."""
    linears = {
        m.weight: m for m in model.modules() if isinstance(m, (opfuser.Linear, opfuser.BasicLinear))
    }
    return [
        linears[p].read_weight(torch.float64) if p in linears else p.detach().double()
        for p in model.parameters()
    ]


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
    masters = [nn.Parameter(v) for v in start]
    optimizer, exact = MasterWeights(seq, make), make(masters)
    for n in range(5):
        for master, grad in zip(masters, give_gradients(seq, n)):
            master.grad = grad
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


def test_small_steps_add_up() -> None:
    """Each is far below half the distance between two codes."""
    with opfuser.quantized_model_init(recipe=CURRENT):
        linear = opfuser.BasicLinear(16, 16)
    linear.initialize_weight(nn.init.ones_)
    linear.write_weight(torch.where(torch.arange(16)[:, None] == 0, 2.0, 1.0).expand(16, 16))
    optimizer = MasterWeights(linear, torch.optim.SGD, lr=1.0)
    for _ in range(100):
        linear.weight.grad = torch.full((16, 16), -0.005)
        optimizer.step()
    assert linear.read_weight()[1:].mean().item() == pytest.approx(1.5, rel=2**-4)


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


def test_groups() -> None:
    seq = model()
    linears = [seq[1].weight, seq[3].weight]
    groups = [{"params": linears, "lr": 0.5}, {"params": [seq[1].bias]}]
    optimizer = MasterWeights(seq, sgd, groups, lr=0.25)
    optimizer.add_param_group({"params": [seq[0].weight], "lr": 0.125})
    assert [group["params"] for group in optimizer.param_groups] == [
        linears,
        [seq[1].bias],
        [seq[0].weight],
    ]
    assert [(g["lr"], g["momentum"]) for g in optimizer.param_groups] == [
        (0.5, 0.9),
        (0.25, 0.9),
        (0.125, 0.9),
    ]
    assert optimizer.defaults["lr"] == 0.25
    before = [m.detach().double() for m in masters(optimizer)]
    names = {id(p): g for p, g in zip(seq.parameters(), give_gradients(seq))}
    optimizer.param_groups[0]["lr"] = 0.0625
    optimizer.step()
    for group in optimizer.param_groups:
        for p in group["params"]:
            k = [id(q) for q in [*linears, seq[1].bias, seq[0].weight]].index(id(p))
            want = before[k] - group["lr"] * names[id(p)]
            torch.testing.assert_close(masters(optimizer)[k].double(), want, rtol=1e-5, atol=1e-6)


def masters(optimizer: MasterWeights) -> list[Tensor]:
    return [p.detach().clone() for g in optimizer.optimizer.param_groups for p in g["params"]]


def test_what_has_no_gradient_is_left_alone() -> None:
    seq = model()
    optimizer = MasterWeights(seq, adam)
    give_gradients(seq)
    seq[1].weight.grad = None
    seq[3].weight.requires_grad_(False)
    seq[3].weight.grad = None
    before = {name: t.clone() for name, t in seq.state_dict().items()}
    version = seq[1].weight._version
    optimizer.step()
    after = seq.state_dict()
    same = [name for name, t in before.items() if torch.equal(t.float(), after[name].float())]
    assert sorted(same) == ["1.weight", "1.weight_scale", "3.weight", "3.weight_scale"]
    assert seq[1].weight._version == version
    optimizer.zero_grad()
    assert all(p.grad is None for p in seq.parameters())


def test_main_grads() -> None:
    how: Any = {"dtype": BF16, "accumulate_into_main_grad": True}
    with opfuser.quantized_model_init(recipe=CURRENT):
        linear = opfuser.BasicLinear(128, 128, **how)
    weight: Any = linear.weight
    weight.main_grad = torch.zeros(128 * 128)
    optimizer = MasterWeights(linear, torch.optim.SGD, lr=0.5)
    (before,) = masters(optimizer)
    linear(torch.randn(4, 128, dtype=BF16)).sum().backward()
    optimizer.step()
    want = before - 0.5 * weight.main_grad.view(128, 128)
    assert weight.main_grad.abs().max() > 0
    torch.testing.assert_close(masters(optimizer)[0], want)


def test_a_closure() -> None:
    """That of an optimiser which moves the masters several times in one step."""
    with opfuser.quantized_model_init(recipe=CURRENT):
        linear = opfuser.BasicLinear(16, 16)
    optimizer = MasterWeights(linear, torch.optim.LBFGS, lr=0.5, max_iter=8)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (linear(torch.eye(16)) - 1).square().sum()
        loss.backward()
        seen.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == seen[0]
    assert len(seen) > 2
    assert seen[-1] < 0.05 * seen[0]


def stored(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


@pytest.mark.parametrize("make", [adam, sgd])
def test_training_goes_on_from_a_checkpoint(make: Callable[..., torch.optim.Optimizer]) -> None:
    seq = model()
    optimizer = MasterWeights(seq, make)
    give_gradients(seq)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    state = stored({"model": seq.state_dict(), "optimizer": optimizer.state_dict()})
    assert set(state["optimizer"]) == {"state", "param_groups"}
    with_master = [n for n, s in state["optimizer"]["state"].items() if "master_param" in s]
    assert with_master == [1, 2, 3]
    other = model()
    resumed = MasterWeights(other, make)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert resumed.param_groups[0]["lr"] == 0.05
    for m, o in ((seq, optimizer), (other, resumed)):
        for seed in (2, 3):
            give_gradients(m, seed)
            o.step()
    for ours, want in zip(masters(resumed), masters(optimizer)):
        assert torch.equal(ours, want)
    for name, t in seq.state_dict().items():
        assert torch.equal(other.state_dict()[name].float(), t.float())


def test_a_checkpoint_of_torch_distributed() -> None:
    """It names parameters, and loads a model behind its optimiser."""

    def trained(steps: int) -> tuple[nn.Module, MasterWeights]:
        seq = opfuser.Sequential(opfuser.Linear(16, 16, dtype=BF16), opfuser.GELU())
        optimizer = MasterWeights(seq, adam)
        for seed in range(steps):
            give_gradients(seq, seed)
            optimizer.step()
        optimizer.zero_grad()
        return seq, optimizer

    made, other = trained(2), trained(0)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(*made))
    set_state_dict(*other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for seq, optimizer in (made, other):
        give_gradients(seq, 3)
        optimizer.step()
    for ours, want in zip(masters(other[1]), masters(made[1]), strict=True):
        assert torch.equal(ours, want)


def test_a_checkpoint_without_masters_or_steps() -> None:
    """Masters begin with what parameters hold, as that of the optimiser alone leaves them."""
    seq = model()
    optimizer = MasterWeights(seq, adam)
    fresh = stored(optimizer.state_dict())
    assert fresh["state"] == {}
    give_gradients(seq)
    optimizer.step()
    stepped = stored(optimizer.state_dict())
    for state in stepped["state"].values():
        state.pop("master_param", None)
    for loaded, step in (fresh, 1), (stepped, 2):
        seq[1].write_weight(torch.ones(256, 128))
        optimizer.load_state_dict(loaded)
        give_gradients(seq)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        assert optimizer.state[seq[1].weight]["step"] == step
        assert (optimizer.state[seq[1].weight]["master_param"] == 1).all()


@pytest.mark.parametrize("lost", [False, True])
def test_initial_values_are_saved_before_the_first_step(lost: bool) -> None:
    """They exist nowhere else. Once the parameter is another one they are of no use."""
    seq, other = model(preserve=True), model()
    optimizer, resumed = MasterWeights(seq, adam), MasterWeights(other, adam)
    if lost:
        seq[1].write_weight(torch.ones(256, 128))
    other.load_state_dict(seq.state_dict())
    resumed.load_state_dict(stored(optimizer.state_dict()))
    assert not optimizer.state
    for m, o in ((seq, optimizer), (other, resumed)):
        give_gradients(m)
        o.step()
    for ours, want in zip(masters(resumed), masters(optimizer)):
        assert torch.equal(ours, want)


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
    """``to_empty`` replaces parameters; an optimiser that has those of before does nothing."""
    with torch.device("meta"):
        seq = model(recipe)
    for name, p in seq.named_parameters():
        with pytest.raises(ArgumentError) as error:
            MasterWeights(seq, adam, [p])
        assert str(error.value) == (
            "Parameters have values, which masters begin with (MasterWeights). Received: "
            f"{name} of {p.dtype} and shape {tuple(p.shape)} on the meta device. "
            "Materialise the model first: to_empty replaces its parameters."
        )
    seq.to_empty(device="cpu")
    for op in seq:
        if hasattr(op, "reset_parameters"):
            op.reset_parameters()
    before, optimizer = values(seq), MasterWeights(seq, adam)
    give_gradients(seq)
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
    give_gradients(seq)
    before = values(seq)
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, values(seq))]
    assert changed == [True] + [False] * (len(changed) - 1)


@pytest.mark.parametrize("steps", [0, 1])
def test_weights_in_fp8_that_were_replaced(steps: int) -> None:
    seq, other = model(), model()
    optimizer = MasterWeights(seq, adam)
    for _ in range(steps):
        give_gradients(seq)
        optimizer.step()
    seq.load_state_dict(other.state_dict(), assign=True)
    give_gradients(seq)
    before, state = values(seq), copy.deepcopy(optimizer.state_dict()["state"])
    for _ in range(2):
        with pytest.raises(MasterWeightError) as error:
            optimizer.step()
        assert str(error.value) == (
            "A weight in FP8 stays the parameter that its optimiser was made for (MasterWeights). "
            "Received: 1.weight, in whose place the operation has another one. Make the optimiser "
            "after what replaces parameters, as load_state_dict(assign=True) does."
        )
        optimizer.read_parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, values(seq)))
    assert optimizer.state_dict()["state"].keys() == state.keys()
    optimizer = MasterWeights(seq, adam)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, values(seq)))


def test_initial_values_are_freed() -> None:
    seq = model(preserve=True)
    weight: Any = seq[1].weight
    value = weight.get_high_precision_init_val()
    optimizer = MasterWeights(seq, adam)
    assert torch.equal(masters(optimizer)[1], value.float())
    assert weight.get_high_precision_init_val() is None


def test_a_gradient_scaler() -> None:
    seq, other = model(), model()
    optimizer, plain = MasterWeights(seq, sgd), MasterWeights(other, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    grads = give_gradients(seq)
    give_gradients(other)
    for p in seq.parameters():
        p.grad = 4 * p.grad  # type: ignore[operator]
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)
    scaler.update()
    plain.step()
    assert len(grads) == 4
    for ours, want in zip(masters(optimizer), masters(plain)):
        torch.testing.assert_close(ours, want)
