"""Sequence-parallel products by a provider that a group has chosen: all checks in one start."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.utils.checkpoint import checkpoint

from opfuser import (
    BasicLinear,
    Linear,
    RMSNorm,
    Sequential,
    SwiGLU,
    async_tensor_parallel,
    autocast,
)
from opfuser.async_tensor_parallel import Overlap, choose, register
from opfuser.errors import ArgumentError, InputError
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PredictedScaling,
)
from tests.distributed.ranks import Check, Outcomes, assert_passed, outcomes_of

pytestmark = pytest.mark.distributed

RANKS = 2
IN, OUT, ROWS = 8, 12, 3  # rows per rank
WIDTH = 128
MODES = "column", "row"
CHECKS: dict[str, Check] = {}
calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def gather_multiply(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """In pieces, each gathered by itself, as those are that overlap."""
    assert x.is_contiguous()
    calls.append(("gather_multiply", tuple(x.shape), tuple(w.shape)))
    pieces = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(pieces, x, group=group)
    return torch.cat(pieces), torch.cat([piece @ w for piece in pieces])


def multiply_scatter(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
    assert x.is_contiguous()
    calls.append(("multiply_scatter", tuple(x.shape), tuple(w.shape)))
    pieces = [piece @ w for piece in x.chunk(group.size())]
    for piece in pieces:
        dist.all_reduce(piece, group=group)
    return pieces[group.rank()]


def refuses(x: Tensor) -> str | None:
    return "it has no fp32" if x.dtype == torch.float32 else None


@contextlib.contextmanager
def pieces(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Within it, a group has chosen the functions above."""
    if "pieces" not in async_tensor_parallel.names():
        register(Overlap("pieces", refuses, gather_multiply, multiply_scatter))
    calls.clear()
    choose("pieces", group)
    try:
        yield
    finally:
        choose("torch", group)


def results(op: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Output, and gradients of input and parameters."""
    x = x.clone().requires_grad_()
    y = Sequential(op)(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *op.parameters()], dy)]


def compare(mode: str, *, group: Any = None, dtype: Any = torch.float64, kind: Any = None) -> None:
    """With and without pieces, of a batch of sequences whose first dimension is cut."""
    torch.manual_seed(2)
    given: Any = {"tensor_parallel_mode": mode, "sequence_parallel": True, "dtype": dtype}
    op = (kind or BasicLinear)(IN, OUT, tensor_parallel_group=group, **given)
    rows, whole = (ROWS, 2), (ROWS * RANKS, 2)
    x_shape, dy_shape = ((*rows, IN), (*whole, OUT // RANKS))
    if mode == "row":
        x_shape, dy_shape = ((*whole, IN // RANKS), (*rows, OUT))
    x, dy = torch.randn(x_shape, dtype=dtype), torch.randn(dy_shape, dtype=dtype)
    expected = results(op, x, dy)
    with pieces(group):
        ours = results(op, x, dy)
    torch.testing.assert_close(ours, expected)


FORWARD = {
    "column": ("gather_multiply", (2 * ROWS, IN), (IN, OUT // RANKS)),
    "row": ("multiply_scatter", (2 * ROWS * RANKS, IN // RANKS), (IN // RANKS, OUT)),
}
BACKWARD = {
    "column": ("multiply_scatter", (2 * ROWS * RANKS, OUT // RANKS), (OUT // RANKS, IN)),
    "row": ("gather_multiply", (2 * ROWS, OUT), (OUT, IN // RANKS)),
}


@check
def operands(rank: int, ranks: int) -> None:
    """What the products are given, and that their results go where torch's went."""
    for mode in ("column", "row"):
        compare(mode)
        assert calls == [FORWARD[mode], BACKWARD[mode]]


@check
def compounds(rank: int, ranks: int) -> None:
    """In column mode the bias is the GEMM's, which then takes what was gathered before.

    In row mode the sum over ranks comes behind the bias, as an operation of its own.
    """
    compare("column", kind=Linear)
    assert calls == [BACKWARD["column"]]
    compare("row", kind=Linear)
    assert not calls


@check
def what_needs_no_gradient(rank: int, ranks: int) -> None:
    for mode, frozen in (("column", "input"), ("row", "input"), ("row", "weight")):
        op = BasicLinear(
            IN, OUT, tensor_parallel_mode=mode, sequence_parallel=True, dtype=torch.float64
        )
        rows = ROWS if mode == "column" else ROWS * RANKS
        x = torch.randn(rows, op.local_in_features, dtype=torch.float64)
        (op.weight if frozen == "weight" else x).requires_grad_(False)
        if frozen == "weight":
            x.requires_grad_()
        wanted = [t for t in (x, op.weight) if t.requires_grad]
        exact = torch.autograd.grad(op(x).square().sum(), wanted)
        with pieces():
            ours = torch.autograd.grad(op(x).square().sum(), wanted)
        torch.testing.assert_close(ours, exact)
        assert len(calls) == (1 if frozen == "input" else 2)


@check
def groups_that_chose_nothing(rank: int, ranks: int) -> None:
    """Another group, tensor parallelism alone, and a dtype that the provider refuses."""
    other = dist.new_group([0, 1])
    compare("column", group=other)
    assert len(calls) == 2
    with pieces():
        given: Any = {"tensor_parallel_mode": "column", "dtype": torch.float64}
        x = torch.randn(ROWS, IN, dtype=torch.float64)
        BasicLinear(IN, OUT, sequence_parallel=True, tensor_parallel_group=other, **given)(x)
        BasicLinear(IN, OUT, **given)(x)
        assert not calls
    compare("row", dtype=torch.float32)
    assert not calls


@check
def rows_that_cannot_be_cut(rank: int, ranks: int) -> None:
    """The error is that of the scatter; no rows are nothing to multiply."""
    op = BasicLinear(IN, OUT, tensor_parallel_mode="row", sequence_parallel=True)
    with pieces():
        with pytest.raises(InputError, match="must be a multiple of the group size"):
            op.double()(torch.randn(ROWS * RANKS + 1, IN // RANKS, dtype=torch.float64))
        assert op(torch.randn(0, IN // RANKS, dtype=torch.float64)).shape == (0, OUT)
        assert not calls


@check
def symmetric_memory_on_a_cpu(rank: int, ranks: int) -> None:
    """There is none: torch computes."""
    op = BasicLinear(IN, OUT, tensor_parallel_mode="column", sequence_parallel=True)
    x = torch.randn(ROWS, IN)
    exact = op(x)
    choose("symm_mem")
    torch.testing.assert_close(op(x), exact)
    choose("torch")


@check
def operators_of_torch(rank: int, ranks: int) -> None:
    """What symmetric memory is given, by operators of the same signature that are emulated."""
    group = dist.group.WORLD
    assert group is not None

    class Operators:
        @staticmethod
        def fused_all_gather_matmul(
            A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool
        ) -> tuple[Tensor, list[Tensor]]:
            assert (gather_dim, group_name, return_A) == (0, group.group_name, True)
            rows, y = gather_multiply(A, Bs[0], group)
            return rows, [y]

        @staticmethod
        def fused_matmul_reduce_scatter(
            A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
        ) -> Tensor:
            assert (reduce_op, scatter_dim, group_name) == ("sum", 0, group.group_name)
            return multiply_scatter(A, B, group)

    everywhere = async_tensor_parallel._providers["symm_mem"]._replace(refuses=lambda x: None)
    with (
        mock.patch.object(async_tensor_parallel, "symmetric_memory", return_value=Operators),
        mock.patch.dict(async_tensor_parallel._providers, pieces=everywhere),
    ):
        compare("column")
        assert calls == [FORWARD["column"], BACKWARD["column"]]
        compare("row")
        assert calls == [FORWARD["row"], BACKWARD["row"]]


def mlp(**sharded: Any) -> Sequential:
    """Norm, column, gated activation, row; sharded by its arguments."""
    column, row = ({"tensor_parallel_mode": mode, **sharded} if sharded else {} for mode in MODES)
    return Sequential(
        RMSNorm(WIDTH),
        BasicLinear(WIDTH, 4 * WIDTH, **column),
        SwiGLU(),
        BasicLinear(2 * WIDTH, WIDTH, **row),
    )


def sharded_twin(rank: int, dtype: torch.dtype) -> tuple[Sequential, Sequential]:
    """The layers of one process, and those of this rank. Gates and units are cut each."""
    torch.manual_seed(3)
    one = mlp().to(dtype)
    ours = mlp(sequence_parallel=True).to(dtype)
    with torch.no_grad():
        ours[0].weight.copy_(one[0].weight)
        ours[1].weight.copy_(rows_of(one[1].weight, rank))
        ours[3].weight.copy_(one[3].weight.chunk(RANKS, 1)[rank])
    return one, ours


def rows_of(w: Tensor, rank: int) -> Tensor:
    return torch.cat([half.chunk(RANKS)[rank] for half in w.chunk(2)])


def reentrant(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=True)


def recomputed(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False)


def as_it_is(model: nn.Module, x: Tensor) -> Any:
    return model(x)


def in_region(recipe: Any, call: Any, model: nn.Module, x: Tensor) -> Any:
    with autocast(recipe=recipe):
        return call(model, x)


def steps(model: Sequential, parts: Any, call: Any, reduce: bool, lr: float = 0.1) -> list[Tensor]:
    """Outputs, gradients and weights of two steps of two micro-batches.

    Args:
        model: to train.
        parts: input and gradient of each micro-batch.
        call: of the model.
        reduce: whether the gradient of the norm is a part of that of all ranks.
        lr: of the steps.
    """
    optimizer, found = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), []
    for micro_batches in parts:
        for given, dy in micro_batches:
            x = given.clone().requires_grad_()
            y = call(model, x)
            y.backward(dy)
            found += [y.detach(), x.grad]
        if reduce:
            dist.all_reduce(model[0].weight.grad)
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found += [p.detach().clone() for p in model.parameters()]
    return found


def micro_batches(dtype: torch.dtype, rows: int) -> Any:
    torch.manual_seed(4)
    return [
        [(torch.randn(rows, 2, WIDTH, dtype=dtype), torch.randn(rows, 2, WIDTH, dtype=dtype))
         for _ in range(2)]
        for _ in range(2)
    ]  # fmt: skip


def own_part(parts: Any, rank: int) -> Any:
    return [[tuple(t.chunk(RANKS)[rank] for t in pair) for pair in step] for step in parts]


def of_rank(whole: list[Tensor], rank: int) -> list[Tensor]:
    """What a rank has of the results of one process."""
    cut: list[Tensor] = []
    for t in whole:
        if t.dim() == 3:
            cut.append(t.chunk(RANKS)[rank])
        elif t.shape == (4 * WIDTH, WIDTH):
            cut.append(rows_of(t, rank))
        else:
            cut.append(t if t.dim() == 1 else t.chunk(RANKS, 1)[rank])
    return cut


@check
def training(rank: int, ranks: int) -> None:
    """Steps of accumulated micro-batches, recomputed or not, against one process."""
    parts = micro_batches(torch.float64, ROWS * RANKS)
    for call in (as_it_is, recomputed, reentrant):
        one, ours = sharded_twin(rank, torch.float64)
        with pieces():
            found = steps(ours, own_part(parts, rank), call, reduce=True)
        assert calls
        expected = of_rank(steps(one, parts, as_it_is, reduce=False), rank)
        torch.testing.assert_close(found, expected)


@check
def in_fp8(rank: int, ranks: int) -> None:
    """Scaled products are those of torch's collectives: results are equal, recomputed or not.

    They are near those of one process, whose scales may differ.
    """
    warnings.filterwarnings("ignore", "FP8 is emulated")
    dtype = torch.bfloat16
    parts = micro_batches(dtype, 16 * RANKS)
    for recipe in (
        DelayedScaling(), Float8PredictedScaling(), Float8CurrentScaling(), Float8BlockScaling(),
    ):  # fmt: skip
        within = partial(in_region, recipe)
        one, plain = sharded_twin(rank, dtype)
        expected = steps(plain, own_part(parts, rank), partial(within, as_it_is), True, 1e-3)
        alone = of_rank(steps(one, parts, partial(within, as_it_is), False, 1e-3), rank)
        for ours, theirs in zip(expected, alone, strict=True):
            assert (ours - theirs).norm() <= 0.1 * theirs.norm(), recipe
        for call in (recomputed, reentrant):
            _, model = sharded_twin(rank, dtype)
            with pieces():
                found = steps(model, own_part(parts, rank), partial(within, call), True, 1e-3)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"{recipe} {call}")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes_of(__name__, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_products(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)


def test_names() -> None:
    with pytest.raises(ArgumentError) as error:
        choose("sym_mem")
    assert str(error.value).startswith("A provider is one of torch, symm_mem")
    assert str(error.value).endswith(
        "(async_tensor_parallel.choose). Received: 'sym_mem'. Did you mean 'symm_mem'?."
    )
    with pytest.raises(ArgumentError) as error:
        register(Overlap("torch", refuses, gather_multiply, multiply_scatter))
    assert str(error.value) == (
        "The name of a provider is its own (async_tensor_parallel.register). Received: 'torch'. "
        "Register it once, under another name."
    )


def on_a_gpu(rank: int, store: str) -> None:
    """Symmetric memory against fp64; its error may be twice that of torch's collectives."""
    # Multicast binds memory of the whole host's switch; these products do not need it.
    os.environ.update(TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        torch.manual_seed(1)
        for mode in ("column", "row"):
            given: Any = {"tensor_parallel_mode": mode, "sequence_parallel": True}
            op = BasicLinear(512, 1024, device=device, dtype=torch.bfloat16, **given)
            whole, local = (RANKS * 256, 2), (256, 2)
            x_rows, dy_rows = (local, whole) if mode == "column" else (whole, local)
            how: Any = {"device": device, "dtype": torch.bfloat16}
            x = torch.randn(*x_rows, op.local_in_features, **how)
            dy = torch.randn(*dy_rows, op.local_out_features, **how)
            plain = results(op, x, dy)
            exact_op = BasicLinear(512, 1024, device=device, dtype=torch.float64, **given)
            exact_op.weight = nn.Parameter(op.weight.detach().double())
            exact = results(exact_op, x.double(), dy.double())
            choose("symm_mem")
            ours = results(op, x, dy)
            choose("torch")
            for mine, theirs, right in zip(ours, plain, exact, strict=True):
                error, allowed = ((t.double() - right).norm() for t in (mine, theirs))
                assert error <= 2 * allowed, mode
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.slow
def test_symmetric_memory(tmp_path: Path) -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two CUDA devices")
    spawn(on_a_gpu, (str(tmp_path / "store"),), nprocs=RANKS)
