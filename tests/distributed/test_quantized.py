"""Sharded linear operations on FP8 operands, against those of one rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import opfuser
from opfuser import BasicLinear, Bias, Sequential
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)
from tests.distributed.ranks import Checks, Outcomes, assert_passed

pytestmark = pytest.mark.distributed

IN, OUT, ROWS = 256, 512, 33  # rows per rank, twice; shards are whole blocks
RANKS = 2
RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "block": Float8BlockScaling(),
}
CHECKS = check = Checks()


class Tensors(NamedTuple):
    """Of a linear operation with a bias."""

    x: Tensor
    w: Tensor
    b: Tensor
    dy: Tensor


class Results(NamedTuple):
    y: Tensor
    dx: Tensor
    dw: Tensor
    db: Tensor


def whole_tensors(ranks: int) -> Tensors:
    """The same on every rank. The halves of each differ in size, and so do their scales."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        values[..., : shape[-1] // 2] *= 3
        values[: shape[0] // 2] *= 5
        return values

    rows = ranks * ROWS, 2
    return Tensors(random(*rows, IN), random(OUT, IN), random(OUT), random(*rows, OUT))


def part(full: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    return full.chunk(ranks, dim)[rank].contiguous()


@contextmanager
def region(recipe: Recipe) -> Iterator[None]:
    """Of calls, without the warning that there is no hardware."""
    with warnings.catch_warnings(), opfuser.autocast(recipe=recipe):
        warnings.filterwarnings("ignore", "FP8 is emulated")
        yield


def results(op: BasicLinear, given: Tensors, recipe: Recipe) -> Results:
    """Of the second of two calls, which has the scales of the first.

    Args:
        op: the operation, which gets the weight.
        given: its tensors; the bias is an operation of its own behind it.
        recipe: of the calls.
    """
    bias = Bias(len(given.b))
    seq = Sequential(op, bias)
    op.weight, bias.bias = nn.Parameter(given.w.clone()), nn.Parameter(given.b.clone())
    for _ in range(2):
        x = given.x.clone().requires_grad_()
        with region(recipe):
            y = seq(x)
        grads = torch.autograd.grad(y, [x, op.weight, bias.bias], given.dy)
    assert seq.last_plan is not None
    assert seq.last_plan.quantized == (0,)
    assert seq.last_plan.fused("forward") == {"quantized_linear": 1}
    return Results(y.detach(), *grads)


def far(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def sharded_check(mode: str, name: str, sequence: bool) -> None:
    recipe, column = RECIPES[name], mode == "column"

    def run(rank: int, ranks: int) -> None:
        given = whole_tensors(ranks)

        def rows(t: Tensor) -> Tensor:
            return part(t, rank, ranks, 0) if sequence else t

        def of_rank(n: int) -> Tensors:
            if column:
                w, b = (part(t, n, ranks, 0) for t in (given.w, given.b))
                return Tensors(given.x, w, b, part(given.dy, n, ranks, -1))
            x, w = (part(t, n, ranks, -1) for t in (given.x, given.w))
            return Tensors(x, w, torch.zeros_like(given.b), given.dy)

        # The same rank by rank, without communication: an input is encoded alike everywhere, and
        # outputs or the gradients of the input add up.
        sizes = (IN, OUT // ranks) if column else (IN // ranks, OUT)
        alone = [results(BasicLinear(*sizes), of_rank(n), recipe) for n in range(ranks)]
        single = results(BasicLinear(IN, OUT), given, recipe)
        mine, exact = of_rank(rank), alone[rank]
        if column:
            mine = mine._replace(x=rows(given.x))
            exact = exact._replace(dx=rows(torch.stack([one.dx for one in alone]).sum(0)))
            dw, db = (part(t, rank, ranks, 0) for t in (single.dw, single.db))
            of_one = Results(part(single.y, rank, ranks, -1), rows(single.dx), dw, db)
        else:
            mine = mine._replace(b=given.b, dy=rows(given.dy))
            # The bias is added to the sum, once; behind a scattered one each rank has its own rows.
            y, db = torch.stack([one.y for one in alone]).sum(0) + given.b, mine.dy.sum((0, 1))
            exact = exact._replace(y=rows(y), db=db)
            dx, dw = (part(t, rank, ranks, -1) for t in (single.dx, single.dw))
            of_one = Results(rows(single.y), dx, dw, db)
        op = BasicLinear(IN, OUT, tensor_parallel_mode=mode, sequence_parallel=sequence)
        own = results(op, mine, recipe)
        for ours, theirs in zip(own, exact):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max())
        compare(own, of_one, name)

    CHECKS[f"{mode}{', sequence' * sequence}, {name}"] = run


def compare(own: Results, single: Results, recipe: str) -> None:
    """With the operation on one rank: blocks lie in one shard, other scales are a shard's own.

    E4M3 rounds by up to 1/16 and E5M2 by up to 1/8, with either scale.
    """
    bounds = (1e-5,) * 4 if recipe == "block" else (1 / 16, 1 / 8, 1 / 8, 1e-5)
    for ours, theirs, bound in zip(own, single, bounds):
        assert far(ours, theirs) < bound


for _name in RECIPES:
    for _sequence in (False, True):
        for _mode in ("column", "row"):
            sharded_check(_mode, _name, _sequence)


@check
def a_block_of_both_modes(rank: int, ranks: int) -> None:
    """What stands before a column-wise one is left alone; a row-wise Linear is reduced apart."""

    def block(**how: Any) -> Sequential:
        column, row = ({"tensor_parallel_mode": mode, **how} for mode in ("column", "row"))
        return Sequential(
            opfuser.RMSNorm(IN),
            opfuser.Linear(IN, OUT, **(column if how else {})),
            opfuser.GELU(),
            opfuser.Linear(OUT, IN, bias=False, **(row if how else {})),
        )

    single, sharded = block(), block(sequence_parallel=True)
    for name, dim in (("1.weight", 0), ("1.bias", 0), ("3.weight", 1)):
        whole = single.get_parameter(name)
        nn.init.normal_(whole)
        sharded.get_parameter(name).data = part(whole.detach(), rank, ranks, dim)
    x, dy = torch.randn(ranks * ROWS, IN), torch.randn(ranks * ROWS, IN)
    found = []
    for seq in (single, sharded):
        local = seq is sharded
        mine = (part(x, rank, ranks, 0) if local else x.clone()).requires_grad_()
        with region(RECIPES["block"]):
            y = seq(mine)
        y.backward(part(dy, rank, ranks, 0) if local else dy)
        assert mine.grad is not None
        whole = [y.detach(), mine.grad]
        found.append(whole if local else [part(t, rank, ranks, 0) for t in whole])
        assert seq.last_plan is not None
        assert seq.last_plan.quantized == (1, 4)
    assert sharded.last_plan is not None
    assert sharded.last_plan.fused("forward") == {"quantized_linear": 1, "activation_linear": 1}
    for theirs, ours in zip(*found):
        assert far(ours, theirs) < 1e-4
    for name, dim in (("1.weight", 0), ("1.bias", 0), ("3.weight", 1)):
        ours, theirs = sharded.get_parameter(name).grad, single.get_parameter(name).grad
        assert ours is not None
        assert theirs is not None
        assert far(ours, part(theirs, rank, ranks, dim)) < 1e-4


@check
def no_rows(rank: int, ranks: int) -> None:
    for mode in ("column", "row"):
        for sequence in (False, True):
            op = BasicLinear(IN, OUT, tensor_parallel_mode=mode, sequence_parallel=sequence)
            for recipe in RECIPES.values():
                x = torch.randn(0, op.local_in_features, requires_grad=True)
                with region(recipe):
                    y = op(x)
                y.sum().backward()
                assert y.shape == (0, op.local_out_features)
                assert x.grad is not None
                assert op.weight.grad is not None
                assert not op.weight.grad.any()


@check
def ranks_agree_on_scales_where_asked(rank: int, ranks: int) -> None:
    given, recipe = whole_tensors(ranks), DelayedScaling()
    for group in (None, dist.group.WORLD):
        op = BasicLinear(IN, OUT, tensor_parallel_mode="column")
        op.weight = nn.Parameter(part(given.w, rank, ranks, 0))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FP8 is emulated")
            with opfuser.autocast(recipe=recipe, amax_reduction_group=group):
                y = op(given.x)
                quantizer = op.get_quantizer("forward", 0)
            assert quantizer is not None
            # Outside of the region it leaves the operation in its group.
            assert quantizer.amax == given.x.abs().max()
            quantizer(given.x)
            y.backward(part(given.dy, rank, ranks, -1))
            with opfuser.autocast(recipe=recipe, amax_reduction_group=group):
                pass
        seen = [given.x, given.w, given.dy]
        if group is None:
            seen[1:] = part(given.w, rank, ranks, 0), part(given.dy, rank, ranks, -1)
        tops = 448.0, 448.0, 57344.0
        exact = torch.stack([top / t.abs().max() for top, t in zip(tops, seen)])
        torch.testing.assert_close(op.quantization.scale, exact)


@check
def gathered_input_is_saved_local(rank: int, ranks: int) -> None:
    """Half precision of a rank's own rows takes less than codes of all, from three ranks on."""
    op = BasicLinear(IN, OUT, tensor_parallel_mode="column", sequence_parallel=True)
    x = torch.randn(128, IN)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), region(RECIPES["current"]):
        op(x)
    kept = [t for t in saved if t.data_ptr() != op.weight.data_ptr()]
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


@check
def calls_between_a_forward_and_its_backward(rank: int, ranks: int) -> None:
    """What is gathered again is rounded as in forward."""
    given, recipe = whole_tensors(ranks), DelayedScaling(amax_history_len=1)
    for mode in ("column", "row"):
        found = []
        for between in (False, True):
            op = BasicLinear(IN, OUT, tensor_parallel_mode=mode, sequence_parallel=True)
            nn.init.constant_(op.weight, 0.5)
            local, rows = slice(0, op.local_in_features), slice(rank * ROWS, (rank + 1) * ROWS)
            x = (given.x[rows] if mode == "column" else given.x[..., local]).clone()
            with region(recipe):
                y = op(x.requires_grad_())
            if between:
                for _ in range(2):
                    with torch.no_grad(), region(recipe):
                        op(x / 100)
            dy = given.dy[..., : op.local_out_features] if mode == "column" else given.dy[rows]
            found.append(torch.autograd.grad(y, [x, op.weight], dy))
        for ours, theirs in zip(*found):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@check
def products_in_high_precision(rank: int, ranks: int) -> None:
    """They take what was gathered too."""
    given = whole_tensors(ranks)
    recipe = Float8CurrentScaling(dgrad="bf16", wgrad="bf16")
    for mode in ("column", "row"):
        dim = 0 if mode == "column" else 1
        op = BasicLinear(IN, OUT, tensor_parallel_mode=mode, sequence_parallel=True)
        op.weight = nn.Parameter(part(given.w, rank, ranks, dim))
        sliced, whole = (given.dy, given.x) if mode == "column" else (given.x, given.dy)
        local, rows = part(sliced, rank, ranks, -1), part(whole, rank, ranks, 0)
        x, dy = (rows, local) if mode == "column" else (local, rows)
        x.requires_grad_()
        with region(recipe):
            y = op(x)
        dx, dw = torch.autograd.grad(y, [x, op.weight], dy)
        exact_dx, exact_dw = given.dy @ given.w, given.dy.flatten(0, 1).t() @ given.x.flatten(0, 1)
        assert far(dx, part(exact_dx, rank, ranks, dim and -1)) < 1e-5
        assert far(dw, part(exact_dw, rank, ranks, dim)) < 1e-5


@check
def main_grad_with_gathered_input(rank: int, ranks: int) -> None:
    given, recipe = whole_tensors(ranks), RECIPES["block"]
    op = BasicLinear(
        IN, OUT, tensor_parallel_mode="column", sequence_parallel=True,
        accumulate_into_main_grad=True,
    )  # fmt: skip
    op.weight = nn.Parameter(part(given.w, rank, ranks, 0))
    main_grad = op.weight.main_grad = torch.ones_like(op.weight)  # type: ignore[attr-defined]
    with region(recipe):
        y = op(part(given.x, rank, ranks, 0))
    y.backward(part(given.dy, rank, ranks, -1))
    single = results(BasicLinear(IN, OUT), given, recipe)
    assert far(main_grad, 1 + part(single.dw, rank, ranks, 0)) < 1e-5


@check
def stored_weights(rank: int, ranks: int) -> None:
    """The codes of each rank are multiplied, whatever ranks exchange around it."""
    given = whole_tensors(ranks)
    for name, recipe in RECIPES.items():
        for mode in ("column", "row"):
            how: Any = {"tensor_parallel_mode": mode, "sequence_parallel": True}
            with opfuser.quantized_model_init(recipe=recipe):
                op = BasicLinear(IN, OUT, **how)
            plain = BasicLinear(IN, OUT, **how)
            plain.weight = nn.Parameter(op.read_weight())
            local, rows = slice(0, op.local_in_features), slice(rank * ROWS, (rank + 1) * ROWS)
            if mode == "column":
                x, dy = given.x[rows], given.dy[..., : op.local_out_features]
            else:
                x, dy = given.x[..., local], given.dy[rows]
            found = []
            for linear in (op, plain):
                own = x.clone().requires_grad_()
                seq = Sequential(linear)
                with region(recipe):
                    y = seq(own)
                found.append([y, *torch.autograd.grad(y, [own, linear.weight], dy)])
                assert seq.last_plan is not None
                assert seq.last_plan.quantized == (0,)
            # Of delayed scaling the first scale of a plain weight is 1, that of codes its own.
            bound = 1 / 16 if name == "delayed" else 1e-5
            for ours, theirs in zip(*found, strict=True):
                assert far(ours, theirs) < bound


@pytest.mark.parametrize("name", CHECKS)
def test_sharded(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
