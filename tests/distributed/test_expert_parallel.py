"""Experts on several ranks against all of them on one: losses, every gradient, errors."""

from __future__ import annotations

import copy
import math
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from opfuser import (
    AddExtraInput,
    Combine,
    ConstantScale,
    Dispatch,
    GroupedLinear,
    Permute,
    PrivateChannel,
    ScaledSwiGLU,
    Sequential,
    StartCombine,
    TopKRouter,
    Unpermute,
    autocast,
)
from opfuser.errors import ArgumentError, InputError, NotSupportedError
from opfuser.models import DecoderConfig, MoEConfig, decoder_lm, experts
from opfuser.models.parallel import parallelize
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Recipe,
)
from tests.distributed.ranks import Check, Outcomes, assert_passed, outcomes_of

pytestmark = pytest.mark.distributed

D, F, E, K = 6, 5, 8, 3
CHECKS: dict[str, Check] = {}
MOE = MoEConfig(D, F, E, K, dtype=torch.float64, init_std=0.5)
MIXTURES = {
    "softmax": MOE,
    "capacity": replace(MOE, capacity_factor=0.8),
    "capacity in fp32": replace(MOE, capacity_factor=0.8, dtype=torch.float32),
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


def by_hand(
    ranks: int, dtype: torch.dtype, dim: int = D, ffn: int = F
) -> tuple[Sequential, Sequential]:
    """Experts of this rank, and all of them, with the same weights and without a router."""
    torch.manual_seed(3)

    def made(number: int, *, exchanged: bool) -> Sequential:
        row_map, sizes, weights, received, exchange, own_sizes, own_weights = map(
            PrivateChannel, "row_map sizes weights received exchange own_sizes own_weights".split()
        )
        permute, unpermute, act = Permute(E), Unpermute(), ScaledSwiGLU()
        how: dict[str, Any] = {"dtype": dtype, "single_grouped_weight": True}
        how["single_grouped_bias"] = True
        up = GroupedLinear(number, dim, 2 * ffn, **how)
        down = GroupedLinear(number, ffn, dim, **how)
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


WIDE = 128  # a block of scales
# Steps until the scales are those of all ranks: the first ones are of the own values of a rank, and
# what the second GEMM then takes has other largest values.
FP8: dict[Recipe, int] = {
    Float8RowwiseScaling(): 1,
    Float8BlockScaling(): 1,
    MXFP8BlockScaling(): 1,
    DelayedScaling(amax_history_len=1): 3,
}
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
def in_fp8(rank: int, ranks: int) -> None:
    """Scales of rows and of blocks are those of one process, and kept ones where ranks agree."""
    warnings.filterwarnings("ignore", ".* is emulated")
    for recipe, steps in FP8.items():
        group = dist.group.WORLD if steps > 1 else None
        for name in ROUTINGS if ranks == 2 else ["experts of one rank"]:
            ours, one = by_hand(ranks, torch.float32, WIDE, WIDE)
            indices = routing(name, ranks)
            rows = [len(i) for i in indices]
            for step in range(steps):
                xs = [torch.randn(n, WIDE) * 3.0 ** (r + step) for r, n in enumerate(rows)]
                ws, dys = [torch.rand(i.shape) for i in indices], [torch.randn_like(x) for x in xs]
                x, w = (t.clone().requires_grad_() for t in (xs[rank], ws[rank]))
                x_all, w_all = (torch.cat(t).requires_grad_() for t in (xs, ws))
                for model in (ours, one):
                    model.zero_grad()
                with autocast(recipe=recipe, amax_reduction_group=group):
                    y = ours(x, indices[rank], w)
                y.backward(dys[rank])
                with autocast(recipe=recipe):
                    exact = one(x_all, torch.cat(indices), w_all)
                exact.backward(torch.cat(dys))
            what = f"{type(recipe).__name__}, {name}"
            assert [len(m.last_plan.quantized) for m in (ours, one)] == [2, 2], what
            close(y, exact.split(rows)[rank], what)
            close(x.grad, x_all.grad.split(rows)[rank], what)
            close(w.grad, w_all.grad.split(rows)[rank], what)
            for p, q in zip(ours.parameters(), one.parameters(), strict=True):
                close(p.grad, q.grad.chunk(ranks)[rank], what)


def near(ours: Tensor | None, exact: Tensor | None, what: str) -> None:
    """But for single codes of FP8 that other roundings in fp32 before them have changed."""
    assert ours is not None, what
    assert exact is not None, what
    distance = (ours - exact).norm() / exact.norm()
    assert distance < 2e-3, f"{what}: {distance}"


@check
def models_in_fp8(rank: int, ranks: int) -> None:
    """Mixtures with recipes whose scales no other rows change, and a decoder; on two ranks."""
    if ranks > 2:
        return  # they compute as above, and emulation is slow
    warnings.filterwarnings("ignore", ".* is emulated")
    for recipe in (Float8RowwiseScaling(), Float8BlockScaling()):
        what = type(recipe).__name__
        one = experts(MoEConfig(WIDE, WIDE, E, K, init_std=0.2, recipe=recipe))
        ours = parallelize(copy.deepcopy(one), expert_parallel=everyone(ranks))
        xs = torch.randn(ranks, 9, WIDE)
        x, mine = xs.clone().requires_grad_(), xs[rank].clone().requires_grad_()
        exact, y = one(x.flatten(0, 1)).unflatten(0, (ranks, 9)), ours(mine)
        assert len(ours.last_plan.quantized) == 2, what
        exact.square().sum().backward()
        y.square().sum().backward()
        near(y.detach(), exact[rank].detach(), what)
        near(mine.grad, x.grad[rank], what)
        for (name, p), q in zip(ours.named_parameters(), one.parameters(), strict=True):
            near(average(p.grad) * ranks, q.grad, f"{what}: {name}")
    moe = MoEConfig(WIDE, WIDE, E, K, init_std=0.2)
    # Of the experts alone.
    config = DecoderConfig(31, WIDE, 2, 4, moe=moe, recipe=Float8RowwiseScaling())
    model = decoder_lm(config)
    ours = parallelize(copy.deepcopy(model), expert_parallel=everyone(ranks))
    batch = torch.randint(31, (2, 2 * ranks, 8))
    model(*batch).backward()
    ours(*batch.chunk(ranks, 1)[rank]).backward()
    for (name, p), q in zip(ours.named_parameters(), model.parameters(), strict=True):
        near(average(p.grad), q.grad, name)


@check
def kept_scales_go_along(rank: int, ranks: int) -> None:
    """So that a checkpoint that is read afterwards is asked for them."""
    warnings.filterwarnings("ignore", ".* is emulated")
    moe, mesh = MoEConfig(32, 32, E, K, shared_ffn_dim=32), everyone(ranks)
    config = DecoderConfig(31, 32, 2, 4, moe=moe, moe_layers=(1,), recipe=DelayedScaling())
    for meshes in ({"expert_parallel": mesh}, {"mesh": mesh, "expert_parallel": mesh}):
        model = decoder_lm(config)
        model(*torch.randint(31, (2, ranks, 4 * ranks))).backward()
        wanted = scales(model)
        assert len(wanted) == 3 * 10  # in attention 2 each, in the block 2, of the experts 4
        assert any(t.max() > 1 for t in wanted.values())
        found = scales(parallelize(model, **meshes))
        assert {*found} == {*wanted}
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


def scales(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items() if ".quantization." in k}


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
        xs = torch.randn(ranks, 2, 9, D, dtype=config.dtype)
        mine = xs[rank].clone().requires_grad_()
        got = ours(mine)
        x = xs.clone().requires_grad_()
        wanted = [one(part) for part in x]
        losses = [sum(t.square().sum() for t in _floats(out)) for out in wanted]
        for a, b in zip(_all(got), _all(wanted[rank]), strict=True):
            assert a.shape == b.shape
            close(a.to(config.dtype), b.to(config.dtype), name)
        sum(t.square().sum() for t in _floats(got)).backward()
        (sum(losses) / ranks).backward()
        close(mine.grad / ranks, x.grad[rank], name)
        for (key, p), q in zip(ours.named_parameters(), one.parameters(), strict=True):
            close(average(p.grad), q.grad, f"{name}: {key}")


class _Products(TorchDispatchMode):
    """Notes the matrix products that have a dimension of a size."""

    def __init__(self, size: int, seen: list[str]) -> None:
        super().__init__()
        self.size, self.seen = size, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        products = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear
        shapes = [t.shape for t in args if isinstance(t, Tensor)]
        if func.overloadpacket in products and any(
            {self.size, 2 * self.size} & {*s} for s in shapes
        ):
            self.seen.append("product")
        return func(*args, **(kwargs or {}))


class _Late(NamedTuple):
    """An exchange that brings rows no sooner than it is waited for."""

    out: Tensor
    rows: Tensor
    seen: list[str]

    def wait(self) -> None:
        self.seen.append("wait")
        self.out.copy_(self.rows)


@check
def a_shared_expert_computes_meanwhile(rank: int, ranks: int) -> None:
    """Two products in forward, four in backward; and nothing reads rows before they come."""
    seen: list[str] = []
    exchange = dist.all_to_all_single

    def late(out: Tensor, x: Tensor, *sizes: Any, group: Any, async_op: bool = False) -> Any:
        if not async_op:
            return exchange(out, x, *sizes, group=group)
        seen.append("begin")
        rows = torch.empty_like(out)
        exchange(rows, x, *sizes, group=group)
        return _Late(out.fill_(math.nan), rows, seen)

    for change in ({}, {"shared_gate": True}, {"capacity_factor": 0.8}):
        one = experts(replace(MOE, shared_ffn_dim=11, **change))
        xs = torch.randn(ranks, 9, D, dtype=torch.float64)
        wanted, x = one(mine := xs[rank].clone().requires_grad_()), xs[rank].clone()
        wanted.square().sum().backward()
        for overlap in (True, False):
            ours = parallelize(
                copy.deepcopy(one), expert_parallel=everyone(ranks), overlap_shared=overlap
            )
            assert [n for n, _ in ours.named_parameters()] == [n for n, _ in one.named_parameters()]
            x = xs[rank].clone().requires_grad_()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "all_to_all_single", late)
                with _Products(11, seen), torch.no_grad():
                    close(ours(x), wanted)
                forward = ["begin", *["product"] * 2, "wait"] if overlap else ["product"] * 2
                assert seen == forward, seen
                seen.clear()
                backward = ["begin", *["product"] * 4, "wait"] if overlap else ["product"] * 4
                for run in (ours, partial(checkpoint, ours, use_reentrant=False)):
                    x.grad = None
                    with _Products(11, seen):
                        y = run(x)
                        assert seen == forward
                        y.square().sum().backward()
                    assert seen == [*forward, *(forward if run is not ours else []), *backward]
                    seen.clear()
            close(x.grad, mine.grad)


@check
def rows_on_their_way_are_not_read(rank: int, ranks: int) -> None:
    """What reads them is NaN, and its gradient is refused."""
    rows, route = torch.randn(ranks, D), (torch.arange(ranks), torch.ones(2, ranks).long())
    start, combine = StartCombine(), Combine()
    assert start(rows, *route).isnan().all()
    rows.requires_grad_()
    scale = ConstantScale(2.0)
    y = Sequential(start, scale, combine)(rows, *route, *route)
    assert y.isnan().all()
    with pytest.raises(NotSupportedError, match=r"only be passed on, by SwapExtra.*another op"):
        y.sum().backward()
    y = Sequential(start, combine)(rows, *route, *route)
    y.square().sum().backward()
    close(y.float(), Combine()(rows, *route).float())
    close(rows.grad, 2 * rows)


@check
def what_reads_the_routed_result_stays(rank: int, ranks: int) -> None:
    """Only where nothing but the sum does, operations are moved."""
    for name, change in UNMOVED.items():
        one = experts(replace(MOE, shared_ffn_dim=4))
        change(one)
        ours = parallelize(copy.deepcopy(one), expert_parallel=everyone(ranks))
        assert not any(isinstance(op, StartCombine) for op in ours), name
        x = torch.randn(ranks, 9, D, dtype=torch.float64)[rank]
        for a, b in zip(_all(ours(x)), _all(one(x)), strict=True):
            close(a, b, name)


def _told_to_the_caller(model: Sequential) -> None:
    model.to_shared.set_extra_output_channel(0, "routed", output_to_caller=True)
    model.shared_add.set_extra_input_channel(0, "routed")


def _read_twice(model: Sequential) -> None:
    (channel,) = model.shared_add._extra_input_channels
    model.append(AddExtraInput())
    model[-1].set_extra_input_channel(0, channel)


def _scaled_before(model: Sequential) -> None:
    model.insert([n for n, _ in model.named_children()].index("to_shared"), ConstantScale(2.0))


UNMOVED = {"output": _told_to_the_caller, "twice": _read_twice, "scaled": _scaled_before}


def _all(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _floats(out: Any) -> list[Tensor]:
    return [t for t in _all(out) if t.is_floating_point()]


@check
def nothing_is_read_where_there_is_a_capacity(rank: int, ranks: int) -> None:
    """On the meta device any read of a value fails; only what ranks send is left out here."""
    sent: list[tuple[int, ...]] = []

    def step(factor: float | None) -> None:
        config = MoEConfig(16, 8, E, K, dtype=torch.bfloat16, capacity_factor=factor)
        model = parallelize(experts(config), expert_parallel=everyone(ranks))
        model(torch.randn(9, 16).bfloat16())  # ranks agree on the experts once
        x = torch.empty(9, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", lambda _, x, *__, **how: sent.append(x.shape))
            model.to("meta")(x).sum().backward()

    with pytest.raises(NotImplementedError, match="meta"):
        step(None)
    sent.clear()
    step(0.8)
    rows = E * math.ceil(0.8 * 9 * K / E)
    # Sizes; rows and weights there, rows back; and the gradients of these.
    assert sorted(sent[1:]) == [(rows,)] * 2 + [(rows, 16)] * 4


@check
def the_correction_follows_the_tokens_of_all_ranks(rank: int, ranks: int) -> None:
    router = TopKRouter(4, 1, score_correction_bias=True)
    tokens = torch.tensor([5, 0, 3, 0]) if rank else torch.tensor([0, 3 * ranks, ranks, 0])
    router.update_score_correction_bias(tokens, 0.5)
    total = 5 * (ranks - 1), 3 * ranks, 3 * (ranks - 1) + ranks, 0
    wanted = [0.5 * (sum(total) > 4 * n) - 0.5 * (sum(total) < 4 * n) for n in total]
    assert router.score_correction_bias is not None
    assert router.score_correction_bias.tolist() == wanted


def impatient() -> dist.ProcessGroup:
    """All ranks; one that waits for the others in vain fails within a minute."""
    return dist.new_group(timeout=timedelta(minutes=1))


@check
def a_token_of_nan_on_one_rank(rank: int, ranks: int) -> None:
    """It is that of one process: other tokens, and experts that it did not choose, see nothing."""
    for factor in (None, 4.0):
        one = experts(replace(MOE, capacity_factor=factor))
        ours = parallelize(copy.deepcopy(one), expert_parallel=everyone(ranks))
        xs = torch.randn(ranks, 9, D, dtype=torch.float64)
        xs[ranks - 1, 4, 2] = math.nan
        mine, x = xs[rank].clone().requires_grad_(), xs.clone().requires_grad_()
        got, wanted = ours(mine), torch.stack([one(part) for part in x])
        assert got.isnan().any(1).sum() == (rank == ranks - 1)
        got.square().sum().backward()
        wanted.square().sum().backward()
        compared = [(got, wanted[rank]), (mine.grad, x.grad[rank])]
        for (name, p), q in zip(ours.named_parameters(), one.parameters(), strict=True):
            assert q.grad.isnan().any(), name
            compared.append((average(p.grad) * ranks, q.grad))
        down = one.get_parameter("down.weight").grad
        assert down.isnan().flatten(1).any(1).sum() == K
        for found, exact in compared:
            torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12, equal_nan=True)


@check
def a_rank_that_fails_alone(rank: int, ranks: int) -> None:
    """The others wait for it until the timeout of the group, and no longer."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    permute, dispatch = Permute(E, weighted=False), Dispatch(E, group, weighted=False)
    indices, began = torch.full((3, K), E if rank == ranks - 1 else 0), time.monotonic()

    def sent() -> Any:
        rows, _, sizes = permute(torch.randn(3, D), indices)
        return dispatch(rows, sizes)

    with pytest.raises((InputError, RuntimeError)) as error:
        sent()
    assert isinstance(error.value, InputError) == (rank == ranks - 1)
    assert time.monotonic() - began < 60


def call(op: Dispatch, rows: int = 4, features: int = D, **how: Any) -> Any:
    x = torch.randn(rows, features, dtype=how.get("dtype"))
    sizes = torch.zeros(op.num_experts, dtype=torch.int64)
    sizes[how.get("expert", 0)] = how.get("size", rows)
    weights = [torch.rand(rows)] if op.weighted else []
    return op(x.requires_grad_(how.get("grad", False)), sizes, *weights)


@check
def ranks_that_disagree(rank: int, ranks: int) -> None:
    """Each of them says so, and the next call is answered."""
    group, other = impatient(), rank == ranks - 1
    plain = Dispatch(E, group, weighted=False)
    call(plain)
    for how, wrong in (
        ({"features": D + 1}, f"rank 0: {D} features of torch.float32.*: {D + 1} features"),
        ({"dtype": torch.bfloat16}, "features of torch.bfloat16"),
        ({"grad": True}, "gradients of nothing.*gradients of rows"),
        ({"size": 3}, f"negative, and add up.* others on rank {ranks - 1}"),
        ({"size": -4}, f"negative, and add up.* others on rank {ranks - 1}"),
    ):
        with pytest.raises(InputError, match=wrong):
            call(plain, **(how if other else {}))
        assert call(plain, rank)[3].shape == (E // ranks,)
    with pytest.raises(InputError, match=r"same call.* no weights.* weights of torch.float32"):
        call(Dispatch(E, group, weighted=other))
    padded = Dispatch(E, group, weighted=False, padded=True)
    even = torch.full((E,), 2)
    for how, wrong in (
        ({"rows": 3 * E}, f"rank 0: {2 * E} rows, .*: {3 * E} rows.*as many tokens"),
        ({"dtype": torch.bfloat16}, "features of torch.bfloat16"),
        ({"uneven": True}, f"as many as any other.* others on rank {ranks - 1}"),
    ):
        mine = how if other else {}
        rows = mine.get("rows", 2 * E)
        sizes = torch.full((E,), rows // E)
        sizes[:2] += torch.tensor([1, -1]) * mine.get("uneven", 0)
        with pytest.raises(InputError, match=wrong):
            padded(torch.randn(rows, D, dtype=mine.get("dtype")), sizes)
        y, _, exchanged, own = padded(torch.randn(2 * E, D), even)
        assert (len(y), own.tolist()) == (2 * E, [2 * ranks] * (E // ranks))
        assert exchanged.tolist() == [[2 * E // ranks] * ranks] * 2
    with pytest.raises(InputError, match=f"multiple of the {E} experts.*input .{E + 1}, {D}"):
        padded(torch.randn(E + 1, D), even)
    with pytest.raises(InputError, match=f"rank 0: {E} experts; .*{E} experts, padded"):
        call(Dispatch(E, group, weighted=False, padded=other), E)
    with pytest.raises(InputError, match=f"rank 0: {E} experts; .*{2 * E} experts"):
        call(Dispatch(2 * E if other else E, group, weighted=False))


@check
def models_that_differ(rank: int, ranks: int) -> None:
    """Also where those of one rank could not be distributed at all."""
    mesh = DeviceMesh.from_group(impatient(), "cpu")
    other = rank == ranks - 1
    for wrong in (replace(MOE, num_experts=E + 1), replace(MOE, dtype=torch.float32)):
        with pytest.raises(ArgumentError, match=r"same model.*differ in router.weight"):
            parallelize(experts(wrong if other else MOE), expert_parallel=mesh)
    parallelize(experts(MOE), expert_parallel=mesh)


@check
def experts_that_are_no_multiple_of_the_ranks(rank: int, ranks: int) -> None:
    with pytest.raises(ArgumentError, match=f"multiple of the ranks.*={E + 1}, {ranks} ranks"):
        Dispatch(E + 1)
    with pytest.raises(ArgumentError, match=f"num_groups={E + 1}, {ranks} ranks"):
        parallelize(experts(replace(MOE, num_experts=E + 1)), expert_parallel=everyone(ranks))


@check
def what_cannot_be_distributed(rank: int, ranks: int) -> None:
    mesh = everyone(ranks)
    with pytest.raises(ArgumentError, match=r"needs experts.*none in model"):
        parallelize(decoder_lm(DecoderConfig(31, 16, 1, 2)), expert_parallel=mesh)
    with pytest.raises(ArgumentError, match=r"over the same or alone.*mesh=None, expert_"):
        parallelize(experts(MOE))
    with pytest.raises(ArgumentError, match=r"once.*gate_up.weight, which is a DTensor"):
        parallelize(parallelize(experts(MOE), expert_parallel=mesh), expert_parallel=mesh)
    for change, text in CHANGES:
        model = experts(MOE)
        change(model)
        with pytest.raises(NotSupportedError, match=text):
            parallelize(model, expert_parallel=mesh)


def _separate(model: Sequential) -> None:
    up = GroupedLinear(E, D, 2 * F, bias=False, dtype=torch.float64)
    up.set_extra_input_channel(0, "sizes")
    model.gate_up = up


def _adding(model: Sequential) -> None:
    model.down.accumulate_into_grad = True


def _between(model: Sequential) -> None:
    model.insert(6, nn.Identity())


def _public(model: Sequential) -> None:
    model.permute = Permute(E)


def _twice(model: Sequential) -> None:
    model.append(Unpermute())


CHANGES = [
    (_separate, "a parameter for each expert.*single_grouped_weight=True"),
    (_adding, "adds gradients to the parameter itself"),
    (_between, "Identity between Permute and Unpermute"),
    (_public, "whose extra outputs are the caller's"),
    (_twice, "with Permute, Unpermute, Unpermute"),
]


@check
def not_while_torch_compile_traces(rank: int, ranks: int) -> None:
    ours, _ = by_hand(ranks, torch.float64)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    (indices,) = routing("any", 1)
    inputs = torch.randn(len(indices), D).double(), indices, torch.rand(indices.shape).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own
        with pytest.raises(Exception, match="which no graph holds"):
            compiled(*inputs)


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes_of(__name__, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_experts_on_several_ranks(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
