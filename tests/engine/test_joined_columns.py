"""What one operation joins and the next takes apart is neither joined nor saved when compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import opfuser
from opfuser import torch_internals as internals
from opfuser.runtime.tracing import columns, each_column, joined_columns

from .toys import grads

HEADS, KV_HEADS, SIZE, WIDTH = 4, 2, 6, 10
PACKED = (HEADS + 2 * KV_HEADS) * SIZE


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def projections(bias: bool, sizes: dict[str, int]) -> opfuser.MergedLinear:
    return opfuser.MergedLinear(WIDTH, sizes, bias=bias)


QKV = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}


def attention(*between: nn.Module, bias: bool = False) -> list[nn.Module]:
    heads = opfuser.DotProductAttention(HEADS, num_kv_heads=KV_HEADS, causal=True)
    return [projections(bias, QKV), *between, heads, opfuser.Linear(HEADS * SIZE, WIDTH)]


def rotary(**kwargs: Any) -> opfuser.RotaryEmbedding:
    return opfuser.RotaryEmbedding(HEADS, SIZE, num_kv_heads=KV_HEADS, **kwargs)


def normed(zero_centered: bool) -> opfuser.QKNorm:
    norm = opfuser.QKNorm(
        HEADS, SIZE, num_kv_heads=KV_HEADS, zero_centered_gamma=zero_centered
    ).double()
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(torch.randn_like(p))
    return norm


def gated(activation: nn.Module, bias: bool = False) -> list[nn.Module]:
    return [projections(bias, {"gate": 14, "up": 14}), activation, opfuser.Linear(14, WIDTH)]


LAYERS = {
    "attention": attention,
    "rotary": lambda: attention(rotary()),
    "rotary, part of a head": lambda: attention(rotary(rotary_dim=4)),
    "rotary, neighbors": lambda: attention(rotary(interleaved=True), bias=True),
    "norms": lambda: attention(normed(False)),
    "norms and rotary": lambda: attention(normed(True), rotary(), bias=True),
    "gated": lambda: gated(opfuser.SwiGLU()),
    "gated, with biases": lambda: gated(opfuser.GEGLU(), bias=True),
    "gated, scaled": lambda: gated(opfuser.ClampedSwiGLU(limit=0.5)),
}


def compiled(model: nn.Module) -> tuple[Any, list[torch.fx.GraphModule]]:
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    return torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=compiler)), graphs


def joined(graphs: list[torch.fx.GraphModule], widths: set[int]) -> list[Any]:
    """What is concatenated along the last dimension, of one of these widths."""
    cats = [n for g in graphs for n in g.graph.nodes if n.target is torch.ops.aten.cat.default]
    return [n for n in cats if n.meta["val"].shape[-1] in widths]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.slow
def test_nothing_is_joined(name: str) -> None:
    model = opfuser.Sequential(*LAYERS[name]()).double()
    run, graphs = compiled(model)
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    wrt = [x, *model.parameters()]
    ours, theirs = run(x), model(x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(grads(ours.sin(), wrt), grads(theirs.sin(), wrt))
    assert len(graphs) == 2
    assert not joined(graphs, {PACKED, (HEADS + KV_HEADS) * SIZE, 28})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.slow
def test_what_somebody_else_reads_is_joined() -> None:
    model = opfuser.Sequential(
        projections(False, {"gate": 14, "up": 14}), opfuser.MakeExtraOutput(), opfuser.SwiGLU()
    ).double()
    run, _ = compiled(model)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(run(x), model(x))


class TestColumns:
    def pair(self) -> tuple[Tensor, Tensor, Tensor]:
        a, b = torch.randn(3, 4), torch.randn(3, 2)
        with internals.compiling():
            return joined_columns([a, b]), a, b

    def test_are_those_that_were_joined(self) -> None:
        whole, a, b = self.pair()
        first, second = columns(whole, [4, 2])
        assert first is a
        assert second is b
        assert torch.equal(whole, torch.cat([a, b], -1))

    def test_of_other_sizes_are_views(self) -> None:
        whole, *_ = self.pair()
        found = columns(whole, [3, 3])
        assert [t._base is whole for t in found] == [True, True]

    @pytest.mark.parametrize("which", range(3))
    def test_once_written_to_are_views(self, which: int) -> None:
        tensors = self.pair()
        whole = tensors[0]
        tensors[which].mul_(2)
        assert torch.equal(torch.cat([*columns(whole, [4, 2])], -1), whole)
        assert torch.equal(each_column(torch.neg, whole), -whole)

    def test_of_eager_calls_are_views(self) -> None:
        whole = joined_columns([torch.ones(2, 1), torch.ones(2, 2)])
        assert not whole.__dict__
        assert columns(whole, [1, 2])[0]._base is whole

    def test_each_is_mapped(self) -> None:
        whole, a, b = self.pair()
        with internals.compiling():
            found = columns(each_column(torch.neg, whole), [4, 2])
        assert torch.equal(found[0], -a)
        assert torch.equal(found[1], -b)
