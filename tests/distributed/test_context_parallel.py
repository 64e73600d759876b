"""Attention with a part of the sequence on each process, as torch's ``context_parallel`` has it."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

# torch has no other place for context_parallel_unshard.
from torch.distributed.tensor.experimental import _attention as torchs
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser import DotProductAttention, KVCache, PositionEmbedding, RotaryEmbedding
from opfuser.errors import NotSupportedError
from opfuser.models import DecoderConfig, attention_block, decoder_layers
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from tests.distributed.ranks import Checks, Outcomes, assert_passed, on_two_gpus

pytestmark = pytest.mark.distributed

RANKS = 2
CHECKS = check = Checks()
CONFIG = DecoderConfig(29, 16, 1, 4, num_kv_heads=2, dtype=torch.float64)


class Gathered(torch.autograd.Function):
    """The parts of all processes, one behind another along dimension 2; they may differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.lengths = lengths = lengths_of_all(x)
        parts = [x.new_zeros(*x.shape[:2], n, x.shape[3]) for n in lengths]
        parts[dist.get_rank()].copy_(x)
        whole = torch.cat(parts, 2)
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dy = dy.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dy)
        return dy.split(ctx.lengths, 2)[dist.get_rank()]


def lengths_of_all(x: Tensor) -> list[int]:
    lengths = torch.zeros(RANKS, dtype=torch.int64)
    lengths[dist.get_rank()] = x.shape[2]
    dist.all_reduce(lengths)
    return [int(n) for n in lengths]


sdpa = F.scaled_dot_product_attention


def attention_of_all(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None
) -> Tensor:
    """What torch puts in place of its function, which has no kernels for it on a CPU."""
    first = sum(lengths_of_all(q)[: dist.get_rank()])
    k, v = Gathered.apply(k), Gathered.apply(v)
    places = torch.arange(first, first + q.shape[2])[:, None]
    mask = places >= torch.arange(k.shape[2]) if is_causal else None
    return sdpa(q, k, v, mask, scale=scale)


@contextlib.contextmanager
def context_parallel() -> Iterator[None]:
    """As torch's, for a CPU; tensors are not cut."""

    def function(*args: Any, **kwargs: Any) -> Tensor:
        return attention_of_all(*args, **kwargs)

    function.__module__ = "torch.distributed.tensor.experimental._context_parallel"
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


class Model(nn.Module):
    """Two layers of a decoder, with the positions of a part."""

    def __init__(self, dim: int, dtype: torch.dtype, recompute: str | None = None) -> None:
        super().__init__()
        config = DecoderConfig(29, dim, 2, 4, num_kv_heads=2, dtype=dtype, recompute=recompute)
        self.layers = decoder_layers(config)
        self.positions = torch.arange(0)

    def forward(self, x: Tensor) -> Any:
        ropes = [op for op in self.layers.modules() if isinstance(op, RotaryEmbedding)]
        return self.layers(x, op_kwargs={rope: {"positions": self.positions} for rope in ropes})


def as_it_is(model: nn.Module, x: Tensor) -> Any:
    return model(x)


def recomputed(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False)


def reentrant(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=True)


def steps(model: Model, given: Any, call: Any, reduce: bool, recipe: Any = None) -> list[Tensor]:
    """Outputs, gradients and weights of two steps of two micro-batches."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for micro_batches in given:
        for whole, dy, model.positions in micro_batches:
            x = whole.clone().requires_grad_()
            with opfuser.autocast(recipe is not None, recipe=recipe):
                y = call(model, x)
            y.backward(dy)
            found += [y.detach(), x.grad]
        for p in model.parameters():
            if reduce:
                dist.all_reduce(p.grad)
            found.append(p.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
        found += [p.detach().clone() for p in model.parameters()]
    return found


def batches(dim: int, dtype: torch.dtype, lengths: Sequence[int]) -> Any:
    """Inputs, gradients and positions of whole sequences."""
    torch.manual_seed(2)
    n = sum(lengths)
    return [
        [(*torch.randn(2, 2, n, dim).to(dtype).unbind(), torch.arange(n)) for _ in range(2)]
        for _ in range(2)
    ]


def part_of(given: Any, lengths: Sequence[int], rank: int) -> Any:
    return [
        [tuple(t.split(lengths, -2 if t.dim() == 3 else 0)[rank] for t in one) for one in step]
        for step in given
    ]


def of_rank(whole: list[Tensor], lengths: Sequence[int], rank: int) -> list[Tensor]:
    return [t.split(lengths, 1)[rank] if t.dim() == 3 else t for t in whole]


@check
def training(rank: int, ranks: int) -> None:
    """Steps of accumulated micro-batches, recomputed or not, with parts that differ in length."""
    lengths = [4, 3]
    given = batches(16, torch.float64, lengths)
    torch.manual_seed(1)
    one = Model(16, torch.float64)
    start = copy.deepcopy(one.state_dict())
    expected = of_rank(steps(one, given, as_it_is, reduce=False), lengths, rank)
    for call, recompute in (
        (as_it_is, None),
        (as_it_is, "mlp"),
        (recomputed, None),
        (reentrant, None),
    ):
        model = Model(16, torch.float64, recompute)
        model.load_state_dict(start)
        with context_parallel():
            found = steps(model, part_of(given, lengths, rank), call, reduce=True)
        torch.testing.assert_close(found, expected)


@check
def in_fp8(rank: int, ranks: int) -> None:
    """Recomputed, bit for bit what is not. The error is that of one process, at most twice it."""
    warnings.filterwarnings("ignore", "FP8 is emulated")
    lengths = [16, 16]
    given = batches(128, torch.bfloat16, lengths)[:1]
    torch.manual_seed(1)
    start = Model(128, torch.bfloat16)
    wide = [[tuple(t.double() if t.dim() == 3 else t for t in one) for one in given[0]]]
    exact = steps(copy.deepcopy(start).double(), wide, as_it_is, reduce=False)
    for recipe in DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling():
        alone = steps(copy.deepcopy(start), given, as_it_is, False, recipe)
        own = part_of(given, lengths, rank)
        with context_parallel():
            plain, others = (
                steps(copy.deepcopy(start), own, call, True, recipe)
                for call in (as_it_is, recomputed)
            )
        torch.testing.assert_close(others, plain, rtol=0, atol=0)
        cut = (of_rank(results, lengths, rank) for results in (alone, exact))
        for ours, theirs, right in zip(plain, *cut, strict=True):
            assert (ours - right).norm() <= 2 * (theirs - right).norm(), recipe


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
        mock.patch(f"{__name__}.lengths_of_all", return_value=[5]),
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


def balanced(rank: int) -> None:
    """Torch's own, which cuts and reorders the sequence for balance; error against fp64."""
    device = torch.device("cuda", rank)
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


@pytest.mark.gpu
@pytest.mark.slow
def test_on_two_gpus(tmp_path: Path) -> None:
    on_two_gpus(tmp_path, balanced)
