"""Where a linear operation and a loss fuse, what is saved, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser import BasicLinear, CrossEntropy, Linear, Sequential
from opfuser.distributed.collectives import VocabularySlice
from opfuser.errors import InputError, NotSupportedError, OpKwargsError
from opfuser.fused import linear_cross_entropy
from opfuser.fused.linear_cross_entropy import LinearCrossEntropy
from opfuser.kernels.launch import runs
from opfuser.testing import assert_not_fused
from tests.fused.examples import BF16, F32, leaf, only, refused, saved_by
from tests.fused.losses import NAME, D, Largest, V, chunked, chunks, head, some_targets, split

__all__ = ["chunks"]  # a fixture


def test_saved_are_the_gradients_alone(chunks: int) -> None:
    x, targets = leaf(33, D), some_targets(33)
    assert sorted(tuple(t.shape) for t in saved_by(head(), x, targets)) == [(V, D), (33, D)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_never_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    chunked(monkeypatch, 30)
    linear = BasicLinear(2, 50, dtype=dtype)
    x, targets = torch.randn(120, 2).to(dtype).requires_grad_(), torch.randint(0, 50, (120,))
    with Largest() as largest:
        Sequential(linear, CrossEntropy())(x, targets).backward()
    # The exponentials of a chunk are in fp32, but on a GPU in registers.
    assert 30 * 50 * dtype.itemsize <= largest.bytes <= 30 * 50 * 4


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_second_backward(dtype: torch.dtype, chunks: int) -> None:
    """Whoever packed what was saved still holds it, and gradients are the caller's to write to."""
    seq, x, targets = head(dtype), leaf(33, D, dtype=dtype), some_targets(33)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = seq(x, targets)
    before = [t.clone() for t in saved]
    wrt = [x, seq[0].weight]
    first = torch.autograd.grad(loss, wrt, retain_graph=True)
    kept = [t.clone() for t in first]
    for t in first:
        t.mul_(7)
    for factor, retain in ((1.0, True), (4.0, True), (1.0, True), (2.0, False)):
        grads = torch.autograd.grad(loss, wrt, loss.new_tensor(factor), retain_graph=retain)
        for got, want in zip(grads, kept):
            assert torch.equal(got, factor * want)  # powers of two round nothing
    assert all(map(torch.equal, saved, before))


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize(("dtype", "factor"), [(F32, 2.0), (BF16, 1.0), (BF16, 2.0)], ids=str)
def test_what_is_saved_becomes_the_gradient_if_nobody_else_needs_it(
    dtype: torch.dtype, factor: float, retain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[tuple[int, int]] = []
    whole = linear_cross_entropy.scaled

    def noted(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = whole(x, *args, **kwargs)
        places.append((x.data_ptr(), y.data_ptr()))
        return y

    monkeypatch.setattr(linear_cross_entropy, "scaled", noted)
    seq = head(dtype)
    x, targets = leaf(33, D, dtype=dtype), some_targets(33)
    loss = seq(x, targets)
    loss.backward(loss.new_tensor(factor), retain_graph=retain)
    assert [before == after for before, after in places] == [not retain] * 2
    if not retain:
        assert x.grad is not None
        assert seq[0].weight.grad is not None
        assert [x.grad.data_ptr(), seq[0].weight.grad.data_ptr()] == [after for _, after in places]


META: dict[str, Any] = {"device": "meta"}


@pytest.mark.parametrize(
    ("rows", "classes", "dim", "dtype", "expected"),
    [
        (8192, 128256, 4096, torch.bfloat16, (2048, torch.bfloat16)),
        (8192, 128256, 4096, torch.float32, (2048, torch.float32)),
        (8192, 128256, 4096, torch.float16, (2048, torch.float32)),
        # Larger chunks rather than a second dW, until that is the smaller.
        (16384, 128256, 4096, torch.bfloat16, (4096, torch.bfloat16)),
        (131072, 128256, 4096, torch.bfloat16, (2304, torch.float32)),
        (16384, 128256, 4096, torch.float32, (2048, torch.float32)),
        (2048, 128256, 4096, torch.bfloat16, (1024, torch.bfloat16)),
        (4096, 32000, 4096, torch.bfloat16, (2048, torch.bfloat16)),
        (8192, 32000, 4096, torch.bfloat16, (2048, torch.bfloat16)),
        (8192, 1000, 4096, torch.bfloat16, (8192, torch.bfloat16)),
        (100, 128256, 4096, torch.bfloat16, (1024, torch.bfloat16)),
        (0, 128256, 4096, torch.bfloat16, (1024, torch.bfloat16)),
    ],
)
def test_the_rule_for_chunks(
    rows: int, classes: int, dim: int, dtype: torch.dtype, expected: tuple[int, torch.dtype]
) -> None:
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    x, w = torch.empty(rows, dim, dtype=half, **META), torch.empty(classes, dim, dtype=half, **META)
    found = split(x, w, dtype)
    assert found == expected
    if rows == 8192:
        assert found.rows * classes * 2 <= 0.6e9


def test_ranks_with_unequal_slices_make_the_same_chunks() -> None:
    """Each chunk is a collective: on its own, the smaller slice would make fewer of them."""
    x = torch.empty(16384, 64, dtype=torch.bfloat16, **META)
    for rows in (4097, 4096):
        own = VocabularySlice(None, 2, 8193, 0, rows)
        w = torch.empty(rows, 64, dtype=torch.bfloat16, **META)
        assert split(x, w, torch.bfloat16, own).rows == 8192
    assert split(x, w, torch.bfloat16).rows == 16384


def test_the_rule_for_chunks_on_a_cpu() -> None:
    x, w = torch.empty(1024, 8), torch.empty(32000, 8)
    assert split(x, w, torch.float32) == (256, torch.float32)
    assert split(x[:100], w, torch.float32).rows == 256


def test_where_it_matches() -> None:
    x, targets = leaf(3, D), some_targets(3)
    for linear in (BasicLinear(D, V), Linear(D, V, bias=False)):
        plan = Sequential(linear, CrossEntropy(reduction="sum")).plan(x, targets)
        assert plan.fused("forward") == plan.fused("backward") == {NAME: 1}
    assert_not_fused(Sequential(Linear(D, V), CrossEntropy()), NAME, x, targets)


def test_where_it_is_refused() -> None:
    x, targets = leaf(3, D), some_targets(3)
    each = Sequential(BasicLinear(D, V), CrossEntropy(reduction="none"))
    assert refused(each, NAME, x, targets) == [
        (0, 'SHAPE: with reduction="none" each row has a gradient that arrives in backward')
    ]
    frozen = head().requires_grad_(False)
    no_grad = [(0, "NO_GRAD: no gradient is needed, and forward would make them")]
    assert refused(frozen, NAME, x.detach(), targets) == no_grad
    with torch.no_grad():
        assert refused(head(), NAME, x, targets) == no_grad
    with pytest.raises(NotSupportedError, match=r'reduction="none" .*\(LinearCrossEntropy\)'):
        LinearCrossEntropy(linear=each[0], loss=each[1])


@torch.no_grad()
def test_placed_by_hand_without_gradients(chunks: int) -> None:
    linear, loss = head()
    x, targets = torch.randn(33, D), some_targets(33)
    y = LinearCrossEntropy(linear=linear, loss=loss)(x, targets)
    torch.testing.assert_close(y, loss.reference(linear.reference(x), targets))


@pytest.mark.parametrize(
    ("x", "targets", "text"),
    [
        (torch.ones(3, D), torch.ones(4).long(), r"Targets must have the shape.*logits \(3, 9\)"),
        (torch.ones(3, D), torch.ones(3), "Targets must be class indices of int32 or int64"),
    ],
)
def test_refuses_inputs(x: Tensor, targets: Tensor, text: str) -> None:
    seq = head()
    for on in ([NAME], []):
        with only(*on), pytest.raises(InputError, match=text):
            seq(x, targets)


@pytest.mark.parametrize("target", [V, -1])
def test_a_target_that_is_no_class_fails(target: int, device: torch.device) -> None:
    seq, x = head().to(device), torch.ones(1, D, device=device)
    targets = torch.tensor([target], device=device)
    if runs(x):  # kernels could only end the process
        assert seq(x, targets).isnan()
        return
    with pytest.raises((IndexError, RuntimeError)):
        seq(x, targets)


def test_refuses_keywords() -> None:
    with pytest.raises(OpKwargsError, match=r"CrossEntropy takes no keywords\. Received: weight"):
        head()(torch.ones(2, D), torch.tensor([0, 1]), op_kwargs={1: {"weight": 1}})
