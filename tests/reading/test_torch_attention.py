"""Attention of torch.nn and of others who put the sequence first, or join batch and heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser.reading.construction import build
from opfuser.reading.grammar import read
from opfuser.reading.kept import KeptError
from opfuser.reading.operations import Attention, CrossAttention, Mask, Transpose
from opfuser.reading.tracer import trace

from .families import stream
from .mutations import outcomes_of
from .recomputed import Example, assert_recomputed, operation_in, operations_in, read_of
from .tiny import WIDTH, randomized

HEADS = 4
SHAPES = [(3, 7), (7, 3), (4, 4), (1, 5), (5, 1), (1, 1)]


class Attends(nn.Module):
    """A residual sum of ``nn.MultiheadAttention``."""

    def __init__(self, batch_first: bool = True, p: float = 0.0, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, p, batch_first=batch_first)
        self.norm, self.options = nn.LayerNorm(WIDTH), options
        randomized(self)

    def forward(self, x: Tensor, mask: Any = None, padding: Any = None) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, padding, attn_mask=mask, **self.options)[0]


def masks(batch: int, length: int, kind: str) -> tuple[Any, Any]:
    """A causal mask, and one of keys at the end of sequences."""
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    padding = torch.arange(length).expand(batch, length) > torch.arange(batch)[:, None] + 1
    if kind == "numbers":
        causal, padding = (  # type: ignore[assignment]
            torch.zeros(m.shape, dtype=torch.float64).masked_fill(m, -math.inf)
            for m in (causal, padding)
        )
    return causal, padding


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_self_attention(need_weights: bool, batch_first: bool, shape: tuple[int, int]) -> None:
    x = stream(*shape, WIDTH).requires_grad_()
    module = Attends(batch_first, need_weights=need_weights)
    reading = assert_recomputed(Example(module, (x,)))
    turns = [op for op in operations_in(reading.operations) if op == Transpose()]
    assert shape == (1, 1) or len(turns) == (0 if batch_first else 2)


@pytest.mark.parametrize("which", ["causal", "padding", "both"])
@pytest.mark.parametrize("kind", ["bool", "numbers"])
@pytest.mark.parametrize(
    ("need_weights", "batch_first", "shape"),
    [(True, True, (3, 7)), (True, False, (4, 4)), (False, True, (4, 4)), (False, False, (7, 3))],
)
def test_masks(
    need_weights: bool, batch_first: bool, shape: tuple[int, int], kind: str, which: str
) -> None:
    causal, padding = masks(*(shape if batch_first else shape[::-1]), kind)
    given = (None if which == "padding" else causal), (None if which == "causal" else padding)
    module = Attends(batch_first, need_weights=need_weights)
    reading = assert_recomputed(Example(module, (stream(*shape, WIDTH).requires_grad_(), *given)))
    attention = operation_in(reading, Attention)
    wanted = [
        Mask(number, tuple(m.shape), kind == "bool", m is padding)
        for number, m in enumerate((m for m in given if m is not None), 1)
    ]
    assert sorted(attention.masks, key=lambda m: m.input) == wanted


# Of the shapes, one has a size that torch's code names.
@pytest.mark.parametrize("shape", [(3, 7), (5, 7)])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_trace_holds_for_all_sizes(
    need_weights: bool, batch_first: bool, shape: tuple[int, int]
) -> None:
    given = masks(*(shape if batch_first else shape[::-1]), "bool")
    module = Attends(batch_first, need_weights=need_weights)
    assert trace(module, (stream(*shape, WIDTH), *given), {}).guards == ()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_mask_for_each_head(need_weights: bool, batch: int) -> None:
    module = Attends(need_weights=need_weights)
    for mask in (torch.randn(batch * HEADS, 7, 7), torch.randn(batch * HEADS, 7, 7) > 0):
        given = mask.double() if mask.is_floating_point() else mask
        x = stream(batch, 7, WIDTH).requires_grad_()
        reading = assert_recomputed(Example(module, (x, given)))
        attention = operation_in(reading, Attention)
        assert [mask.folded for mask in attention.masks] == [HEADS]


def test_dropout_and_causality_are_arguments_of_attention() -> None:
    causal, _ = masks(3, 7, "bool")
    for need_weights in (True, False):
        module = Attends(p=1.0, need_weights=need_weights, is_causal=True).train()
        example = Example(module, (stream(3, 7, WIDTH).requires_grad_(), causal))
        reading = assert_recomputed(example)
        found = operation_in(reading, Attention)
        assert found.dropout_p == 1.0
        assert (found.causal, len(found.masks)) == (not need_weights, int(need_weights))


def test_weights_that_are_read_keep_the_module() -> None:
    class Weights(Attends):
        def forward(self, x: Tensor, *others: Any) -> Tensor:
            y, weights = self.attention(x, x, x)
            return y + weights.mean()  # type: ignore[no-any-return]

    with pytest.raises(KeptError, match="broadcasts by add"):
        read_of(Example(Weights(), (stream(),)))


class Cross(nn.Module):
    """Attention to a memory of another width, so that each projection has its own weight."""

    def __init__(self, batch_first: bool, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(
            WIDTH, HEADS, bias=False, kdim=24, vdim=24, batch_first=batch_first
        )
        self.options = options
        randomized(self)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.attention(x, memory, memory, **self.options)[0]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("lengths", [(7, 9), (1, 9), (9, 1), (5, 5)])
def test_attention_to_a_memory(
    lengths: tuple[int, int], need_weights: bool, batch_first: bool
) -> None:
    shapes = [(5, n) if batch_first else (n, 5) for n in lengths]
    x, memory = (stream(*s, w).requires_grad_() for s, w in zip(shapes, (WIDTH, 24)))
    module = Cross(batch_first, need_weights=need_weights)
    assert operation_in(assert_recomputed(Example(module, (x, memory))), CrossAttention)


class Joined(nn.Module):
    """As in fairseq: the sequence first, batch and heads in one dimension.

    Args:
        order: what is made of the batch and heads of the values, which is another order if given.
    """

    def __init__(self, order: Callable[[Tensor], Tensor] = lambda v: v) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.order = order
        randomized(self)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        s, b, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.contiguous().view(s, b * HEADS, -1).transpose(0, 1)

        q, k, v = heads(self.q(x) * 0.3), heads(self.k(x)), self.order(heads(self.v(x)))
        scores = torch.bmm(q, k.mT)
        weights = F.softmax(scores if mask is None else scores + mask, -1)
        return x + self.out((weights @ v).transpose(0, 1).reshape(s, b, -1))


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_and_heads_in_one_dimension(shape: tuple[int, int]) -> None:
    assert_recomputed(Example(Joined(), (stream(*shape, WIDTH).requires_grad_(),)))


@pytest.mark.parametrize("order", [lambda v: v.flip(0), lambda v: v.roll(1, 0), lambda v: v[:, :1]])
def test_values_of_other_heads_are_kept(order: Callable[[Tensor], Tensor]) -> None:
    for shape in ((5, 1), (5, 5)):
        with pytest.raises(KeptError):
            read_of(Example(Joined(order), (stream(*shape, WIDTH),)))


def test_a_mask_of_batch_and_heads() -> None:
    mask = torch.randn(3 * HEADS, 7, 7).double()
    assert_recomputed(Example(Joined(), (stream(7, 3, WIDTH).requires_grad_(), mask)))


@pytest.mark.parametrize("batch_first", [True, False])
def test_rounding_under_autocast_is_as_the_modules(batch_first: bool) -> None:
    module = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=batch_first).train()
    x = torch.randn(3, 7, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        reading = read(trace(module, (x,), {}).dataflow, torch.bfloat16)
        torch.testing.assert_close(build(reading, module)([x]), module(x), atol=0.05, rtol=0.05)


def windows(x: Tensor) -> Tensor:
    return x.view(6, 7, WIDTH).transpose(0, 1).reshape(3, 14, WIDTH)


EXCHANGED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "windows": (windows, "other rows than those of its input"),
    "and not back": (lambda x: x.transpose(0, 1).reshape(x.shape), "exchanges batch and sequence"),
    "in a branch": (lambda x: x + x.transpose(0, 1).reshape(x.shape), "in one branch alone"),
    "by names": (lambda x: x.transpose(dim0=0, dim1=1).reshape(x.shape), "computes transpose"),
    "by a permutation of all": (lambda x: x.permute(0, 2, 1).reshape(x.shape), "computes reshape"),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_rows_that_are_exchanged_otherwise_are_kept(name: str) -> None:
    function, reason = EXCHANGED[name]

    class Module(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(function(super().forward(x)))

    with pytest.raises(KeptError, match=reason):
        read_of(Example(Module(WIDTH, WIDTH).double(), (stream(3, 14, WIDTH),)))


def test_rows_that_are_exchanged_and_back_are_read() -> None:
    class Module(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x.transpose(0, 1)).relu()
            return x + y.permute(1, 0, 2)

    module = randomized(Module(WIDTH, WIDTH))
    assert_recomputed(Example(module, (stream(3, 14, WIDTH).requires_grad_(),)))


@pytest.mark.parametrize("module", [Attends(False), Attends(need_weights=False), Joined()])
def test_no_operation_is_overlooked(module: nn.Module) -> None:
    found = Example(module.eval(), (stream(3, 4, WIDTH),))
    assert outcomes_of(found, 0, 4)["recomputed"] > 0
