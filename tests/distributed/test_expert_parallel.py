"""Experts on several ranks against all of them on one: losses, every gradient, errors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from opfuser import (
    Combine,
    Dispatch,
    GroupedLinear,
    Permute,
    PrivateChannel,
    ScaledSwiGLU,
    Sequential,
    Unpermute,
)
from opfuser.models import MoEConfig, experts
from opfuser.models.parallel import parallelize
from tests.distributed.ranks import Check, Outcomes, assert_passed, outcomes_of

pytestmark = pytest.mark.distributed

D, F, E, K = 6, 5, 8, 3
CHECKS: dict[str, Check] = {}
MOE = MoEConfig(D, F, E, K, dtype=torch.float64, init_std=0.5)
MIXTURES = {
    "softmax": MOE,
    "losses": replace(MOE, aux_loss=True, z_loss=True, tokens_per_expert=True),
    "DeepSeek-V3": replace(
        MOE,
        score_function="sigmoid",
        scaling_factor=2.5,
        score_correction_bias=True,
        num_groups=4,
        top_k_groups=2,
        shared_ffn_dim=4,
    ),
    "Qwen2-MoE": replace(MOE, shared_ffn_dim=4, shared_gate=True),
}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def everyone(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,))


def close(ours: Tensor | None, exact: Tensor | None, what: str = "") -> None:
    assert ours is not None, what
    assert exact is not None, what
    bound = {torch.float64: 1e-12, torch.float32: 1e-6}[ours.dtype]
    scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    torch.testing.assert_close(ours.detach(), exact.detach(), rtol=0, atol=bound * scale, msg=what)


def by_hand(ranks: int, dtype: torch.dtype) -> tuple[Sequential, Sequential]:
    """Experts of this rank, and all of them, with the same weights and without a router."""
    torch.manual_seed(3)

    def made(number: int, *, exchanged: bool) -> Sequential:
        row_map, sizes, weights, received, exchange, own_sizes, own_weights = map(
            PrivateChannel, "row_map sizes weights received exchange own_sizes own_weights".split()
        )
        permute, unpermute, act = Permute(E), Unpermute(), ScaledSwiGLU()
        how: dict[str, Any] = {"dtype": dtype, "single_grouped_weight": True}
        how["single_grouped_bias"] = True
        up, down = GroupedLinear(number, D, 2 * F, **how), GroupedLinear(number, F, D, **how)
        for n, channel in enumerate((row_map, sizes, weights)):
            permute.set_extra_output_channel(n, channel, output_to_caller=False)
        unpermute.set_extra_input_channel(0, row_map)
        ops = [permute, up, act, down, unpermute]
        if exchanged:
            dispatch, combine = Dispatch(E), Combine()
            for n, channel in enumerate((sizes, weights)):
                dispatch.set_extra_input_channel(n, channel)
            for n, channel in enumerate((received, exchange, own_sizes, own_weights)):
                dispatch.set_extra_output_channel(n, channel, output_to_caller=False)
            for n, channel in enumerate((received, exchange)):
                combine.set_extra_input_channel(n, channel)
            sizes, weights = own_sizes, own_weights
            ops = [permute, dispatch, up, act, down, combine, unpermute]
        for op in (up, down):
            op.set_extra_input_channel(0, sizes)
            nn.init.normal_(op.weight)
            nn.init.normal_(op.bias)
        act.set_extra_input_channel(0, weights)
        return Sequential(*ops)

    one, ours = made(E, exchanged=False), made(E // ranks, exchanged=True)
    for p, q in zip(ours.parameters(), one.parameters(), strict=True):
        p.data = q.detach().chunk(ranks)[dist.get_rank()].clone()
    return ours, one


def routing(name: str, ranks: int) -> list[Tensor]:
    """The experts of each rank's tokens, (T, k)."""
    lengths = {"uneven": range(1, ranks + 1), "no tokens": [0] * ranks}.get(name, [7] * ranks)
    if name == "tokens of one rank":
        lengths = [5, *[0] * (ranks - 1)]
    found = [torch.rand(n, E).topk(K).indices for n in lengths]
    if name == "one expert":
        found = [torch.full_like(x[:, :1], E - 1) for x in found]
    if name == "experts of one rank":
        found = [x[:, :1] % (E // ranks) for x in found]
    return found


ROUTINGS = "any", "uneven", "tokens of one rank", "one expert", "experts of one rank", "no tokens"


@check
def as_all_experts_on_one_rank(rank: int, ranks: int) -> None:
    for dtype in (torch.float64, torch.float32):
        for name in ROUTINGS:
            ours, one = by_hand(ranks, dtype)
            indices = routing(name, ranks)
            xs = [torch.randn(len(i), D, dtype=dtype) for i in indices]
            ws = [torch.rand(i.shape, dtype=dtype) for i in indices]
            dys = [torch.randn_like(x) for x in xs]
            x, w = (t.clone().requires_grad_() for t in (xs[rank], ws[rank]))
            y = ours(x, indices[rank], w)
            y.backward(dys[rank])
            x_all, w_all = (torch.cat(t).requires_grad_() for t in (xs, ws))
            exact = one(x_all, torch.cat(indices), w_all)
            exact.backward(torch.cat(dys))
            rows = [len(i) for i in indices]
            close(y, exact.split(rows)[rank], name)
            close(x.grad, x_all.grad.split(rows)[rank], name)
            close(w.grad, w_all.grad.split(rows)[rank], name)
            for p, q in zip(ours.parameters(), one.parameters(), strict=True):
                close(p.grad, q.grad.chunk(ranks)[rank], name)


@check
def what_needs_no_gradient(rank: int, ranks: int) -> None:
    """Frozen experts, and inputs that need none; without autograd nothing is saved."""
    ours, one = by_hand(ranks, torch.float64)
    indices = routing("any", ranks)
    xs, ws = torch.randn(ranks, 7, D, dtype=torch.float64), torch.rand(ranks, 7, K).double()
    exact = one(xs.flatten(0, 1), torch.cat(indices), ws.flatten(0, 1)).unflatten(0, (ranks, 7))
    with torch.no_grad():
        close(ours(xs[rank], indices[rank], ws[rank]), exact[rank])
    ours(xs[rank], indices[rank], ws[rank]).square().sum().backward()
    exact.square().sum().backward()
    for p, q in zip(ours.parameters(), one.parameters(), strict=True):
        close(p.grad, q.grad.chunk(ranks)[rank])
    for p in (*ours.parameters(), *one.parameters()):
        p.requires_grad_(False)
    w, v = ws[rank].clone().requires_grad_(), ws.flatten(0, 1).clone().requires_grad_()
    ours(xs[rank], indices[rank], w).square().sum().backward()
    one(xs.flatten(0, 1), torch.cat(indices), v).square().sum().backward()
    close(w.grad, v.grad.unflatten(0, (ranks, 7))[rank])


def full(p: Tensor | None) -> Tensor:
    assert p is not None
    return p.full_tensor() if isinstance(p, DTensor) else p


def average(p: Tensor) -> Tensor:
    """A gradient of what is replicated, as data parallelism reduces it."""
    if isinstance(p, DTensor):
        return p.full_tensor()
    out = p.clone()
    dist.all_reduce(out)
    return out / dist.get_world_size()


@check
def mixtures(rank: int, ranks: int) -> None:
    """Each rank's losses are those of its own tokens: the mean over ranks is what is trained."""
    for name, config in MIXTURES.items():
        one = experts(config)
        ours = parallelize(copy.deepcopy(one), expert_parallel=everyone(ranks))
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in one.named_parameters()]
        down = ours.get_parameter("down.weight")
        assert isinstance(down, DTensor)
        assert down.to_local().shape == (E // ranks, D, F)
        xs = torch.randn(ranks, 2, 9, D, dtype=torch.float64)
        mine = xs[rank].clone().requires_grad_()
        got = ours(mine)
        x = xs.clone().requires_grad_()
        wanted = [one(part) for part in x]
        losses = [sum(t.square().sum() for t in _floats(out)) for out in wanted]
        for a, b in zip(_all(got), _all(wanted[rank]), strict=True):
            close(a, b, name) if a.is_floating_point() else torch.equal(a, b)
        sum(t.square().sum() for t in _floats(got)).backward()
        (sum(losses) / ranks).backward()
        close(mine.grad / ranks, x.grad[rank], name)
        for (key, p), q in zip(ours.named_parameters(), one.parameters(), strict=True):
            close(average(p.grad), q.grad, f"{name}: {key}")


def _all(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _floats(out: Any) -> list[Tensor]:
    return [t for t in _all(out) if t.is_floating_point()]


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes_of(__name__, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_experts_on_several_ranks(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
