"""Attention with a part of the sequence on each process, as torch's ``context_parallel`` has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as torchs
from torch.multiprocessing import spawn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from opfuser import DotProductAttention, KVCache, PositionEmbedding, RotaryEmbedding
from opfuser.errors import NotSupportedError
from opfuser.models import DecoderConfig, attention_block
from tests.distributed.ranks import Check, Outcomes, assert_passed, outcomes_of

pytestmark = pytest.mark.distributed

RANKS = 2
CHECKS: dict[str, Check] = {}
CONFIG = DecoderConfig(29, 16, 1, 4, num_kv_heads=2, dtype=torch.float64)


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


class Gathered(torch.autograd.Function):
    """The parts of all processes, one behind another along dimension 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dy = dy.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dy)
        return dy.chunk(RANKS, 2)[dist.get_rank()]


sdpa = F.scaled_dot_product_attention


def attention_of_all(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None
) -> Tensor:
    """What torch puts in place of its function, which has no kernels for it on a CPU."""
    k, v = Gathered.apply(k), Gathered.apply(v)
    first = dist.get_rank() * q.shape[2]
    places = torch.arange(first, first + q.shape[2])[:, None]
    mask = places >= torch.arange(k.shape[2]) if is_causal else None
    return sdpa(q, k, v, mask, scale=scale)


@contextlib.contextmanager
def context_parallel() -> Iterator[None]:
    """As torch's, for a CPU; tensors are not cut."""

    def function(*args: Any, **kwargs: Any) -> Tensor:
        return attention_of_all(*args, **kwargs)

    function.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    with mock.patch.object(F, "scaled_dot_product_attention", function):
        yield


def compare(run: Any, block: nn.Module, x: Tensor, y: Tensor, rank: int) -> None:
    """``run`` of this process' part, and the gradients, are those of the whole, with output y."""
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(y, [x, *block.parameters()], dy)
    part = x.detach().chunk(RANKS, 1)[rank].clone().requires_grad_()
    with context_parallel():
        mine = run(part)
        torch.testing.assert_close(mine, y.chunk(RANKS, 1)[rank])
        for _ in range(2):  # the graph may be kept
            grads = torch.autograd.grad(
                mine, [part, *block.parameters()], dy.chunk(RANKS, 1)[rank], retain_graph=True
            )
    torch.testing.assert_close(grads[0], wanted[0].chunk(RANKS, 1)[rank])
    for ours, theirs in zip(grads[1:], wanted[1:], strict=True):
        dist.all_reduce(ours)
        torch.testing.assert_close(ours, theirs)


@check
def block_of_a_decoder(rank: int, ranks: int) -> None:
    """Fewer key heads, rotary embedding with the positions of the part; also checkpointed."""
    torch.manual_seed(1)
    block = attention_block(CONFIG)
    (rope,) = (op for op in block.modules() if isinstance(op, RotaryEmbedding))
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(6).chunk(RANKS)[rank]

    def run(part: Tensor) -> Tensor:
        return block(part, op_kwargs={rope: {"positions": positions}})

    compare(run, block, x, block(x), rank)
    attention = next(op for op in block.modules() if isinstance(op, DotProductAttention))
    assert str(attention.last_choice) == "context_parallel"
    compare(lambda part: checkpoint(run, part, use_reentrant=False), block, x, block(x), rank)


@check
def separate_inputs(rank: int, ranks: int) -> None:
    op = DotProductAttention(2, causal=False, scale=0.3, layout="separate")
    q, k, v = given = torch.randn(3, 2, 6, 8, dtype=torch.float64, requires_grad=True).unbind()
    parts = [t.detach().chunk(RANKS, 1)[rank].clone().requires_grad_() for t in given]
    y = op(q, k, v)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(y, given, dy)
    with context_parallel():
        mine = op(*parts)
        mine.backward(dy.chunk(RANKS, 1)[rank])
    torch.testing.assert_close(mine, y.chunk(RANKS, 1)[rank])
    for part, whole in zip(parts, wanted):
        torch.testing.assert_close(part.grad, whole.chunk(RANKS, 1)[rank])


@check
def without_gradients(rank: int, ranks: int) -> None:
    op = DotProductAttention(2)
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    with torch.inference_mode():
        y = op(x)
        with context_parallel():
            mine = op(x.chunk(RANKS, 1)[rank])
    torch.testing.assert_close(mine, y.chunk(RANKS, 1)[rank])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes_of(__name__, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_parts(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)


@pytest.mark.parametrize(
    ("arguments", "keywords", "named"),
    [
        ({"window": 2}, {}, "a window"),
        ({"softcap": 2.0, "kernel": "blockwise"}, {}, "soft-capping, kernel='blockwise'"),
        ({"sinks": True}, {"mask": torch.ones(2, 5) > 0}, "a mask, sinks"),
        ({"dropout_p": 0.5, "alibi": True}, {}, "ALiBi, dropout"),
        ({}, {"cache": KVCache()}, "a cache"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], keywords: dict[str, Any], named: str) -> None:
    op = DotProductAttention(2, **arguments)
    with context_parallel(), pytest.raises(NotSupportedError) as error:
        op(torch.randn(2, 5, 24), **keywords)
    assert str(error.value) == (
        "Attention across processes has causality and a scale, and nothing else "
        "(DotProductAttention within torch's context_parallel). "
        f"Received: {named}. Leave it out, or run without context_parallel."
    )


@pytest.mark.parametrize("op", [RotaryEmbedding(2, 4), PositionEmbedding(9, 24)])
def test_positions_that_are_counted_are_refused(op: Any) -> None:
    """A part of a sequence begins elsewhere. Given ones are those of the tokens."""
    x, positions = torch.randn(2, 3, 24), torch.tensor([4, 1, 2])
    y = op(x, positions=positions)
    kind = type(op).__name__
    with context_parallel():
        torch.testing.assert_close(op(x, positions=positions), y)
        with pytest.raises(NotSupportedError) as error:
            op(x)
    assert str(error.value) == (
        f"Positions in a part of a sequence do not begin at 0 ({kind} within torch's "
        "context_parallel). Received: no positions. Pass positions through op_kwargs, and have "
        "context_parallel cut them as it cuts the tokens."
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # Dynamo's
def test_traced_calls() -> None:
    """Where Dynamo traces operations, since a call has keywords, it traces the question too."""
    block = attention_block(CONFIG)
    (rope,) = (op for op in block.modules() if isinstance(op, RotaryEmbedding))
    x, positions = torch.randn(2, 6, 16, dtype=torch.float64), torch.arange(6) + 3

    def call(given: Tensor) -> Tensor:
        return block(given, op_kwargs={rope: {"positions": positions}})

    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))
    torch._dynamo.reset()


def test_backward_outside_is_refused() -> None:
    x = torch.randn(2, 5, 24, requires_grad=True)
    with (
        mock.patch.object(Gathered, "apply", lambda t: t),
        mock.patch.object(dist, "get_rank", return_value=0),
        context_parallel(),
    ):
        y = DotProductAttention(2)(x)
    with pytest.raises(NotSupportedError) as error:
        y.sum().backward()
    assert str(error.value) == (
        "Backward exchanges keys and values as forward did (DotProductAttention within torch's "
        "context_parallel). Received: a backward pass outside of it. Call backward within "
        "context_parallel."
    )


def on_a_gpu(rank: int, store: str) -> None:
    """Torch's own, which cuts and reorders the sequence for balance; error against fp64."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        mesh = init_device_mesh("cuda", (RANKS,))
        torch.manual_seed(1)
        op = DotProductAttention(4, 2)
        x = torch.randn(2, 512, 8 * 64, device=device, dtype=torch.bfloat16)
        dy = torch.randn(2, 512, 4 * 64, device=device, dtype=torch.bfloat16)

        def whole(dtype: torch.dtype) -> list[Tensor]:
            given = x.to(dtype, copy=True).requires_grad_()
            q, k, v = given.unflatten(2, (8, 64)).transpose(1, 2).split([4, 2, 2], 1)
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            y = sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            return [y.detach(), *torch.autograd.grad(y, given, dy.to(dtype))]

        exact, plain = whole(torch.float64), whole(torch.bfloat16)
        x_part, dy_part = x.clone(), dy.clone()
        with torchs.context_parallel(mesh, buffers=[x_part, dy_part], buffer_seq_dims=[1, 1]):
            part = x_part.clone().requires_grad_()
            y = op(part)
            y.backward(dy_part.clone())
            assert part.grad is not None
            assert str(op.last_choice) == "context_parallel"
            ours = torchs.context_parallel_unshard(mesh, [y.detach(), part.grad], [1, 1])
        for mine, theirs, right in zip(ours, plain, exact):
            error, allowed = ((t.double() - right).abs().max() for t in (mine, theirs))
            assert error <= 2 * allowed
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.slow
def test_on_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two CUDA devices")
    spawn(on_a_gpu, (str(tmp_path / "store"),), nprocs=RANKS)
