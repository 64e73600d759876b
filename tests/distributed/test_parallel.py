"""Sharded operations against the same operation on one rank: all checks in one start."""

from __future__ import annotations

import contextlib
import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import opfuser
from opfuser import (
    GELU,
    AllGather,
    AllReduce,
    BasicLinear,
    Bias,
    Linear,
    ReduceScatter,
    Sequential,
)
from opfuser.errors import ArgumentError, InputError, NotSupportedError
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.optim import MasterWeights
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from tests.contract.gradients import handed_over
from tests.distributed.ranks import Checks, Outcomes, assert_passed
from tests.distributed.sharded import assert_same, batches, gradients_of_one, shard, twins, whole
from tests.replay.recorded import replayed_on_a_cpu

pytestmark = pytest.mark.distributed

IN, OUT, ROWS = 8, 12, 3  # rows per rank
RANKS = 4  # two groups of two
CHECKS = check = Checks()


def part(full: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    return full.chunk(ranks, dim)[rank].contiguous()


class Whole:
    """A linear transformation on one rank: its tensors, the same everywhere, and its gradients."""

    def __init__(self, ranks: int, *, bias: bool, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.x = random(ranks * ROWS, 2, IN)
        self.dy = random(ranks * ROWS, 2, OUT)
        self.w = random(OUT, IN)
        self.b = random(OUT) if bias else None
        x, w = (t.detach().double().clone().requires_grad_() for t in (self.x, self.w))
        b = None if self.b is None else self.b.double().clone().requires_grad_()
        self.y = F.linear(x, w, b)
        self.y.backward(self.dy.double())
        self.dx, self.dw, self.db = x.grad, w.grad, None if b is None else b.grad


def close(ours: Tensor | None, exact: Tensor | None) -> None:
    assert ours is not None
    assert exact is not None
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[ours.dtype]
    scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=tolerance * scale)


def compare(op: Linear | BasicLinear, whole: Whole, rank: int, ranks: int) -> None:
    """Value and every gradient of ``op`` on this rank, with parameters cut out of ``whole``."""
    row = op.weight.shape != (OUT // ranks, IN)
    sequence = getattr(op, "sequence_parallel", False) or any(
        isinstance(p, ReduceScatter) or getattr(p, "sequence_parallel", False)
        for p in getattr(op, "basic_ops", ())
    )
    slice_dim = 1 if row else 0
    op.weight = nn.Parameter(part(whole.w, rank, ranks, slice_dim))
    bias = getattr(op, "bias", None)
    if bias is not None:
        assert whole.b is not None
        # In row mode the bias is the sum of those of the ranks, which need not be alike.
        mine = whole.b * (2 - ranks if rank == 0 else 1)
        op.bias = nn.Parameter(mine if row else part(whole.b, rank, ranks, 0))

    def local(t: Tensor, sliced_side: bool) -> Tensor:
        if sliced_side:
            return part(t, rank, ranks, -1)
        return part(t, rank, ranks, 0) if sequence else t

    x = local(whole.x, row).requires_grad_()
    y = Sequential(op)(x)
    close(y, local(whole.y.detach(), not row))
    y.backward(local(whole.dy, not row))
    assert whole.dx is not None
    assert whole.dw is not None
    close(x.grad, local(whole.dx, row))
    close(op.weight.grad, part(whole.dw, rank, ranks, slice_dim))
    if bias is not None:
        assert whole.db is not None
        close(op.bias.grad, whole.db if row else part(whole.db, rank, ranks, 0))


def linear_check(mode: str, sequence: bool, dtype: torch.dtype) -> None:
    """With a bias, and in other dtypes without."""

    def run(rank: int, ranks: int) -> None:
        whole = Whole(ranks, bias=dtype == torch.float64, dtype=dtype)
        how: Any = {"tensor_parallel_mode": mode, "sequence_parallel": sequence, "dtype": dtype}
        if whole.b is not None:
            compare(Linear(IN, OUT, **how), whole, rank, ranks)
            return
        op = BasicLinear(IN, OUT, **how)
        local = (OUT // ranks, IN) if mode == "column" else (OUT, IN // ranks)
        assert (op.local_out_features, op.local_in_features) == local
        assert op.tensor_parallel_size == ranks
        compare(op, whole, rank, ranks)

    CHECKS[f"linear {mode}{', sequence' * sequence}, {dtype}"] = run


for _mode in ("column", "row"):
    for _sequence in (False, True):
        for _dtype in (torch.float64, torch.float32, torch.bfloat16):
            linear_check(_mode, _sequence, _dtype)


@check
def column_then_row_in_one_sequence(rank: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x, w1, w2 = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((ranks * ROWS, IN), (OUT, IN), (IN, OUT))
    )
    leaves = [t.clone().requires_grad_() for t in (x, w1, w2)]
    y = F.linear(F.linear(leaves[0], leaves[1]).tanh(), leaves[2])
    dx, dw1, dw2 = torch.autograd.grad(y.square().sum(), leaves)
    for sequence in (False, True):
        kwargs = {"bias": False, "dtype": torch.float64, "sequence_parallel": sequence}
        model = Sequential(
            Linear(IN, OUT, tensor_parallel_mode="column", **kwargs),
            nn.Tanh(),
            Linear(OUT, IN, tensor_parallel_mode="row", **kwargs),
        )
        model[0].weight = nn.Parameter(part(w1, rank, ranks, 0))
        model[2].weight = nn.Parameter(part(w2, rank, ranks, 1))
        mine = (part(x, rank, ranks, 0) if sequence else x.clone()).requires_grad_()
        out = model(mine)
        out.square().sum().backward()
        close(out.detach(), part(y.detach(), rank, ranks, 0) if sequence else y.detach())
        close(mine.grad, part(dx, rank, ranks, 0) if sequence else dx)
        close(model[0].weight.grad, part(dw1, rank, ranks, 0))
        close(model[2].weight.grad, part(dw2, rank, ranks, 1))


@check
def main_grad_with_gathered_input(rank: int, ranks: int) -> None:
    whole = Whole(ranks, bias=False)
    op = BasicLinear(
        IN, OUT, dtype=torch.float64, tensor_parallel_mode="column", sequence_parallel=True,
        accumulate_into_main_grad=True,
    )  # fmt: skip
    op.weight.main_grad = torch.ones_like(op.weight)  # type: ignore[attr-defined]
    op(part(whole.x, rank, ranks, 0)).backward(part(whole.dy, rank, ranks, -1))
    assert whole.dw is not None
    close(op.weight.main_grad, 1 + part(whole.dw, rank, ranks, 0))


@check
def grad_with_gathered_input(rank: int, ranks: int) -> None:
    whole = Whole(ranks, bias=False)
    op = BasicLinear(
        IN, OUT, dtype=torch.float64, tensor_parallel_mode="column", sequence_parallel=True,
        accumulate_into_grad=True,
    )  # fmt: skip
    op.weight = nn.Parameter(part(whole.w, rank, ranks, 0))
    op.weight.grad = start = torch.ones_like(op.weight)
    y = op(part(whole.x, rank, ranks, 0))
    told = handed_over(y, op.weight)
    y.backward(part(whole.dy, rank, ranks, -1))
    assert whole.dw is not None
    assert told == [False]
    assert op.weight.grad is start
    close(start, 1 + part(whole.dw, rank, ranks, 0))


def replayable_pair() -> tuple[Sequential, nn.Sequential]:
    """A model whose calls are replayed, and the same in torch.nn."""
    torch.manual_seed(2)
    to = {"dtype": torch.float64}
    model = Sequential(Linear(IN, OUT, **to), GELU(), Linear(OUT, 5, **to), replay="on")
    twin = nn.Sequential(
        nn.Linear(IN, OUT, **to), nn.GELU(approximate="tanh"), nn.Linear(OUT, 5, **to)
    )
    for p, q in zip(twin.parameters(), model.parameters()):
        p.data = q.detach().clone()
    return model, twin


def train_both(models: list[nn.Module], wrapped: list[nn.Module], rank: int, ranks: int) -> None:
    """Steps with a different input on each rank, in which the models must remain equal."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for _ in range(6):
        x = torch.randn(ranks, ROWS, IN, dtype=torch.float64)[rank]
        ys = [m(x) for m in wrapped]
        close(ys[0], ys[1])
        for y, optimizer in zip(ys, optimizers):
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@check
def replayed_data_parallel(rank: int, ranks: int) -> None:
    """Also with ``no_sync``, and where gradients are views of the buckets."""
    for as_view in (False, True):
        models = replayable_pair()
        wrapped = [DistributedDataParallel(m, gradient_as_bucket_view=as_view) for m in models]
        with replayed_on_a_cpu():
            train_both(list(models), wrapped, rank, ranks)
            for _ in range(3):
                x = torch.randn(ranks, ROWS, IN, dtype=torch.float64)[rank]
                for sync in (False, False, True):
                    for m in wrapped:
                        with contextlib.nullcontext() if sync else m.no_sync():
                            m(x).square().sum().backward()
                    for p, q in zip(*(m.parameters() for m in models)):
                        close(p.grad, q.grad)
                for m in models:
                    m.zero_grad()
        plan = models[0].last_plan
        assert plan is not None
        assert [r.replayed > 12 for r in plan.replays] == [True]


@check
def replayed_fully_sharded(rank: int, ranks: int) -> None:
    """Parameters move: they are gathered for each pass."""
    for reshard in (False, True):
        models = replayable_pair()
        mesh = init_device_mesh("cpu", (ranks,))
        for m in models:
            fully_shard(m, mesh=mesh, reshard_after_forward=reshard)
        with replayed_on_a_cpu():
            train_both(list(models), list(models), rank, ranks)


@check
def sharded_over_some_ranks(rank: int, ranks: int) -> None:
    """Between the passes alone, or at all: groups of ranks then hold copies."""
    config = DecoderConfig(29, 16, 2, 2, dtype=torch.float64)
    halves = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "shards"))
    for arguments in ({"reshard_after_forward": ranks // 2}, {"mesh": halves}):
        one, ours = twins(partial(decoder_lm, config), partial(shard, **arguments))
        for tokens, targets in batches(ranks):
            gradients_of_one(one, [(tokens, targets)])
            ours(tokens[rank], targets[rank]).backward()
        assert_same(ours, one)


@check
def sharded_in_fp8(rank: int, ranks: int) -> None:
    """Each recipe, with masters: bit for bit ranks whose gradients are averaged by hand.

    Both sums are exact before they are rounded to bf16. A difference in the last bit of weights
    would not stay one: another amax, and every value is rounded anew.
    """
    warnings.filterwarnings("ignore", "FP8 is emulated")
    config = DecoderConfig(29, 128, 1, 2, dtype=torch.bfloat16, tied_head=False)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for recipe in (
        DelayedScaling(),
        Float8CurrentScaling(),
        Float8BlockScaling(),
    ):
        one, ours = twins(partial(decoder_lm, config), partial(shard, mp_policy=policy))
        optimizers = [MasterWeights(m, torch.optim.AdamW, lr=1e-2) for m in (one, ours)]
        for tokens, targets in batches(ranks, [2] * 2):
            losses = []
            for m in (one, ours):
                with opfuser.autocast(recipe=recipe):
                    losses.append(m(tokens[rank], targets[rank]))
                losses[-1].backward()
            assert torch.equal(*losses), recipe
            for p, q in zip(one.parameters(), ours.parameters(), strict=True):
                total = p.grad.double()
                dist.all_reduce(total)
                p.grad = (total / ranks).to(p.dtype)
                assert torch.equal(whole(q.grad), p.grad), recipe
            for m, optimizer in zip((one, ours), optimizers):
                optimizer.step()
                m.zero_grad()
            assert_same(ours, one, grads=False, bound=0)
        assert len(ours.last_plan.quantized) == len(one.last_plan.quantized) == 4, recipe


@check
def frozen_weight_and_plain_input(rank: int, ranks: int) -> None:
    whole = Whole(ranks, bias=False)
    assert whole.dx is not None
    assert whole.dw is not None
    op = BasicLinear(
        IN, OUT, dtype=torch.float64, tensor_parallel_mode="column", sequence_parallel=True
    )
    op.weight = nn.Parameter(part(whole.w, rank, ranks, 0), requires_grad=False)
    x = part(whole.x, rank, ranks, 0).requires_grad_()
    op(x).backward(part(whole.dy, rank, ranks, -1))
    close(x.grad, part(whole.dx, rank, ranks, 0))
    op.weight.requires_grad_(True)
    op(x.detach()).backward(part(whole.dy, rank, ranks, -1))
    close(op.weight.grad, part(whole.dw, rank, ranks, 0))


@check
def zero_rows(rank: int, ranks: int) -> None:
    for mode in ("column", "row"):
        for sequence in (False, True):
            op = Linear(IN, OUT, tensor_parallel_mode=mode, sequence_parallel=sequence)
            columns = IN // ranks if mode == "row" else IN
            x = torch.randn(0, columns, requires_grad=True)
            y = op(x)
            y.sum().backward()
            assert y.shape == (0, OUT // ranks if mode == "column" else OUT)
            assert x.grad is not None
            assert not op.weight.grad.any()
            assert not op.bias.grad.any()


@check
def a_group_of_its_own(rank: int, ranks: int) -> None:
    groups = [dist.new_group([2 * n, 2 * n + 1]) for n in range(ranks // 2)]
    group = groups[rank // 2]
    assert isinstance(group, dist.ProcessGroup)
    whole = Whole(2, bias=True)
    for mode in ("column", "row"):
        op = Linear(
            IN, OUT, dtype=torch.float64, tensor_parallel_mode=mode, tensor_parallel_group=group,
            sequence_parallel=True,
        )  # fmt: skip
        compare(op, whole, rank % 2, 2)
        parallel = next(p for p in op.basic_ops if isinstance(p, Bias))
        assert parallel.tensor_parallel_group is group
        compare(copy.deepcopy(op), whole, rank % 2, 2)


@check
def sharded_bias(rank: int, ranks: int) -> None:
    op = Bias(OUT, tensor_parallel=True)
    assert (op.local_size, op.tensor_parallel_size) == (OUT // ranks, ranks)
    assert repr(op) == f"Bias({OUT}, tensor_parallel=True)"
    assert op(torch.zeros(3, OUT // ranks)).shape == (3, OUT // ranks)


@check
def copies_and_text(rank: int, ranks: int) -> None:
    op = Linear(IN, OUT, tensor_parallel_mode="row", sequence_parallel=True)
    x = torch.randn(ranks, IN // ranks)
    assert torch.equal(copy.deepcopy(op)(x), op(x))
    text = repr(BasicLinear(IN, OUT, tensor_parallel_mode="column", sequence_parallel=True))
    assert "tensor_parallel_mode='column', sequence_parallel=True" in text
    assert repr(op.basic_ops[-1]) == f"ReduceScatter(ranks={ranks})"


@check
def all_reduce(rank: int, ranks: int) -> None:
    x = torch.full((3, 4), float(rank + 1)).t().requires_grad_()
    y = AllReduce()(x)
    assert torch.equal(y, torch.full((4, 3), ranks * (ranks + 1) / 2))
    assert torch.equal(x, torch.full((4, 3), float(rank + 1)))
    dy = torch.randn(4, 3)
    y.backward(dy)
    assert torch.equal(x.grad, dy)


@check
def all_gather(rank: int, ranks: int) -> None:
    full = torch.randn(ranks * 2, 3, generator=torch.Generator().manual_seed(3))
    x = part(full, rank, ranks, 0).requires_grad_()
    y = AllGather()(x)
    assert torch.equal(y, full)
    y.backward(full * (rank + 1))
    torch.testing.assert_close(x.grad, x.detach() * ranks * (ranks + 1) / 2)


@check
def reduce_scatter(rank: int, ranks: int) -> None:
    full = torch.randn(3, ranks * 2, generator=torch.Generator().manual_seed(4)).t()
    x = (full * (rank + 1)).requires_grad_()
    y = ReduceScatter()(x)
    torch.testing.assert_close(y, part(full, rank, ranks, 0) * ranks * (ranks + 1) / 2)
    y.backward(part(full, rank, ranks, 0))
    assert torch.equal(x.grad, full)


@check
def along_another_dimension(rank: int, ranks: int) -> None:
    """Each of the collectives and of the modes, with dimensions in front of the one that counts."""
    full = torch.randn(3, ranks * 2, 5, generator=torch.Generator().manual_seed(5))
    x = part(full, rank, ranks, 1).requires_grad_()
    y = AllGather(dim=1)(x)
    assert torch.equal(y, full)
    y.backward(full * (rank + 1))
    torch.testing.assert_close(x.grad, x.detach() * ranks * (ranks + 1) / 2)
    whole = (full * (rank + 1)).requires_grad_()
    y = ReduceScatter(dim=1)(whole)
    torch.testing.assert_close(y, part(full, rank, ranks, 1) * ranks * (ranks + 1) / 2)
    y.backward(part(full, rank, ranks, 1))
    assert torch.equal(whole.grad, full)
    assert repr(ReduceScatter(dim=1)) == f"ReduceScatter(ranks={ranks}, dim=1)"
    for mode, sides in (("column", (1, -1)), ("row", (-1, 1))):
        generator = torch.Generator().manual_seed(6)
        how: Any = {"generator": generator, "dtype": torch.float64}
        x, w, dy = (torch.randn(*s, **how) for s in ((3, 8, IN), (OUT, IN), (3, 8, OUT)))
        exact, mine = F.linear(x, w), [part(t, rank, ranks, d) for t, d in zip((x, dy), sides)]
        op = BasicLinear(
            IN, OUT, dtype=torch.float64, tensor_parallel_mode=mode, sequence_parallel=True,
            sequence_dim=1,
        )  # fmt: skip
        assert "sequence_parallel=True, sequence_dim=1" in repr(op)
        op.weight = nn.Parameter(part(w, rank, ranks, 0 if mode == "column" else 1))
        given = mine[0].requires_grad_()
        y = op(given)
        close(y.detach(), part(exact, rank, ranks, sides[1]))
        y.backward(mine[1])
        close(given.grad, part(dy @ w, rank, ranks, sides[0]))
        dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
        close(op.weight.grad, part(dw, rank, ranks, 0 if mode == "column" else 1))


@check
def errors(rank: int, ranks: int) -> None:
    with pytest.raises(ArgumentError, match=r"out_features must be a multiple.*in column mode"):
        BasicLinear(IN, 13, tensor_parallel_mode="column")
    with pytest.raises(ArgumentError, match=rf"in_features=9, {ranks} ranks"):
        Linear(9, OUT, tensor_parallel_mode="row")
    with pytest.raises(ArgumentError, match=rf"size 13, {ranks} ranks"):
        Bias(13, tensor_parallel=True)
    with pytest.raises(InputError, match=r"to scatter must be a multiple of the group size"):
        ReduceScatter()(torch.randn(ranks + 1, 2))
    with pytest.raises(InputError, match=r"Dimension 1 of a tensor to scatter.*shape \(4, 7\)"):
        ReduceScatter(dim=1)(torch.randn(4, 7))
    with pytest.raises(InputError, match=r"along dimension 1 needs a tensor that has one.*\(4,\)"):
        AllGather(dim=1)(torch.randn(4))
    for make in (AllGather, ReduceScatter):
        with pytest.raises(ArgumentError, match=r"^dim must not be negative .*dim=-1"):
            make(dim=-1)
    with pytest.raises(InputError, match=r"needs a tensor that has one"):
        AllGather()(torch.tensor(1.0))
    for op in (AllReduce(), AllGather(), ReduceScatter()):
        with pytest.raises(NotSupportedError, match=rf"covers one rank.*{ranks} ranks"):
            op.reference(torch.randn(ranks))
    with pytest.raises(NotSupportedError, match=r"covers one rank \(BasicLinear\)"):
        BasicLinear(IN, OUT, tensor_parallel_mode="row").reference(torch.randn(2, IN // ranks))


@pytest.mark.parametrize("name", CHECKS)
def test_sharded(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
