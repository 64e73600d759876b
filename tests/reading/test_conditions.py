"""Attention written out by hand, whose scores are -inf on conditions that its forward makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser.applying import report
from opfuser.errors import NotSupportedError
from opfuser.reading.construction import build
from opfuser.reading.kept import KeptError
from opfuser.reading.operations import Attention

from .families import stream
from .recomputed import Example, assert_equal_steps, assert_recomputed, operation_in, read_of
from .test_biases import HEADS, SIZE, WIDTH, Biased
from .tiny import BATCH, LENGTH

INF = float("-inf")
PADDING = torch.ones(BATCH, LENGTH, dtype=torch.long)
PADDING[:, LENGTH - 3 :] = 0
SEEN = torch.rand(BATCH, 1, LENGTH, LENGTH) > 0.4
SEEN[..., 0] = True
Hide = Callable[..., Tensor]


def by_hand(hide: Hide, flat: bool = False) -> Biased:
    """Self-attention, written out; ``hide`` is given scores, the module and the masks."""

    def attend(m: Biased, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *masks: Tensor) -> Tensor:
        b, s, _ = x.shape
        if flat:
            q, k, v = (t.reshape(b * HEADS, s, SIZE) for t in (q, k, v))
        scores = hide(q @ k.transpose(-2, -1) / math.sqrt(SIZE), m, *masks)
        return (scores.softmax(-1) @ v).view(b, HEADS, s, SIZE)

    return Biased(attend)


def after(s: Tensor) -> Tensor:
    """Where a key comes after the query."""
    return torch.triu(torch.ones(s.shape[-2:], device=s.device, dtype=torch.bool), 1)


def lower(s: Tensor, m: Any) -> Any:
    return m.lower[:, :, : s.shape[-2], : s.shape[-1]]


def written(s: Tensor, m: Any) -> Tensor:
    s.masked_fill_(lower(s, m) == 0, INF)
    return s


def by_padding(s: Tensor, m: Any, padding: Tensor) -> Tensor:
    s = s.masked_fill(lower(s, m) == 0, INF)
    return s.masked_fill(padding[:, None, None, :] == 0, -torch.inf)


READ: dict[str, tuple[Hide, tuple[Tensor, ...], int]] = {
    "of a buffer": (lambda s, m: s.masked_fill(lower(s, m) == 0, INF), (), 1),
    "of sizes": (lambda s, m: s.masked_fill(after(s), INF), (), 1),
    "where it is not": (lambda s, m: torch.where(lower(s, m).bool(), s, INF), (), 1),
    "in place": (written, (), 1),
    "given": (lambda s, m, seen: s.masked_fill(seen.logical_not(), INF), (SEEN,), 1),
    "given as it is": (lambda s, m, seen: torch.where(seen, s, INF), (SEEN,), 1),
    "of a buffer and of what is given": (by_padding, (PADDING,), 2),
    "of sizes, after a shift": (
        lambda s, m: (t := s.masked_fill(after(s), INF)) - t.max(-1, keepdim=True)[0], (), 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_keys_hidden_by_minus_infinity(name: str) -> None:
    hide, masks, count = READ[name]
    given = Example(by_hand(hide), (stream().requires_grad_(), *masks))
    reading = assert_recomputed(given)
    assert len(operation_in(reading, Attention).conditions) == count
    shorter = stream()[:, : LENGTH - 2].clone().requires_grad_()
    cut = [t[..., : LENGTH - 2] for t in masks]
    cut = [t[..., : LENGTH - 2, :] if t.dim() == 4 else t for t in cut]
    built = build(reading, given.module)
    assert_equal_steps(Example(given.module, (shorter, *cut)), built)


def test_a_buffer_is_read_at_every_call() -> None:
    hide, *_ = READ["of a buffer"]
    given = Example(by_hand(hide), (stream().requires_grad_(),))
    built = build(assert_recomputed(given), given.module)
    given.module.lower[..., 4, 1:3] = 0
    assert_equal_steps(given, built)
    given.module.lower = torch.tril(torch.ones(2 * LENGTH, 2 * LENGTH))[None, None]
    assert_equal_steps(given, built)


def test_queries_that_see_no_key() -> None:
    """They get 0 in place of NaN, and what sees keys gets the gradients of what sees keys."""
    module = by_hand(READ["given as it is"][0])
    seen = SEEN.clone()
    seen[:, :, 2] = False
    x = stream().requires_grad_()
    opfuser.apply(module, example=(x, SEEN))
    y = module(x, seen)
    torch.testing.assert_close(y[:, 2], module.out.bias.expand(BATCH, WIDTH))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert report(module).computed


KEPT: dict[str, tuple[Hide, tuple[Tensor, ...], str]] = {
    "a finite number": (
        lambda s, m: s.masked_fill(after(s), -1e9), (), "computes masked_fill",
    ),
    "plus infinity": (lambda s, m: s.masked_fill(after(s), math.inf), (), "computes masked_fill"),
    "other numbers elsewhere": (
        lambda s, m: torch.where(after(s), s, torch.full_like(s, INF)), (), "computes where",
    ),
    "of scores": (lambda s, m: s.masked_fill(s < -1, INF), (), "in a condition that hides keys"),
    "random": (
        lambda s, m: s.masked_fill(torch.rand(s.shape[-2:], device=s.device) > 0.9, INF),
        (),
        "in a condition that hides keys",
    ),
    "beside a mask": (
        lambda s, m, added: s.masked_fill(after(s), INF) + added,
        (torch.randn(BATCH, 1, LENGTH, LENGTH, dtype=torch.float64),),
        "adds masks of attention",
    ),
    "scaled afterwards": (
        lambda s, m: s.masked_fill(after(s), INF) * 2, (), "in the scores of attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name: str) -> None:
    hide, masks, reason = KEPT[name]
    with pytest.raises(KeptError, match=reason):
        read_of(Example(by_hand(hide), (stream().requires_grad_(), *masks)))


def test_batch_and_heads_in_one_dimension() -> None:
    assert_recomputed(Example(by_hand(READ["of sizes"][0], flat=True), (stream(),)))
    flat = by_hand(lambda s, m: s.masked_fill(lower(s, m)[0] == 0, INF), flat=True)
    with pytest.raises(KeptError, match="of batch and heads in one"):
        read_of(Example(flat, (stream(),)))


@pytest.mark.filterwarnings("ignore:opfuser.apply. under torch.compile")
def test_under_compile_what_is_made_of_sizes_is_in_the_graph() -> None:
    for name, is_computed in ("of sizes", True), ("of a buffer", False):
        module, x = by_hand(READ[name][0]), stream()
        want = module(x)
        opfuser.apply(module, example=x)
        with torch.no_grad():
            y = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(y, want)
        kept = [reason for done in report(module).computed for reason, _ in done.fell_back]
        assert any("made of a buffer" in reason for reason in kept) == (not is_computed)


def test_no_sequence_makes_conditions() -> None:
    with pytest.raises(NotSupportedError, match="hides keys on a condition that it computes"):
        opfuser.from_torch(by_hand(READ["of sizes"][0]), example=stream())
