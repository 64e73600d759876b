from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser import BasicLinear, CrossEntropy, Embedding, Sequential
from opfuser.errors import ArgumentError
from opfuser.fused import _loss_chunks
from opfuser.testing import check_fusion
from tests.fused.losses import (
    NAME,
    D,
    V,
    check,
    check_against,
    chunked,
    chunks,
    gradients,
    head,
    some_targets,
    truth_of,
)
from tests.fused.pairings import DTYPES, error, magnitude

__all__ = ["chunks"]  # a fixture


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.2, "z_loss": 1e-3}], ids=str)
def test_check_fusion(
    terms: dict[str, float], reduction: Any, chunks: int, device: torch.device
) -> None:
    ops = [op.to(device) for op in head(reduction=reduction, **terms)]
    x, targets = torch.randn(3, 11, D, device=device), some_targets(3, 11).to(device)
    # Without rows the mean is nan.
    check_fusion(NAME, ops, x, targets, dtypes=DTYPES, zero_rows=reduction == "sum")


@pytest.mark.parametrize("factor", [1.0, -0.3, 0.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_that_arrive(dtype: torch.dtype, factor: float, chunks: int) -> None:
    x = torch.randn(33, D).to(dtype).requires_grad_()
    check(head(dtype), x, some_targets(33), factor)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(D),
        torch.randn(1, D),
        torch.randn(D, 33).t(),
        torch.randn(33, 2 * D)[:, ::2],
        torch.randn(1, D).expand(33, D),
        torch.randn(D, 11, 3).permute(2, 1, 0),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)
def test_layouts(x: Tensor, chunks: int) -> None:
    check(head(), x.detach().requires_grad_(), torch.randint(0, V, x.shape[:-1]))


def test_targets_of_any_layout_and_of_int32(chunks: int) -> None:
    x = torch.randn(3, 11, D, requires_grad=True)
    targets = some_targets(11, 3).t()
    check(head(), x, targets)
    check(head(), x, targets.int())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_counts(rows: int, dtype: torch.dtype, reduction: Any, chunks: int) -> None:
    x = torch.randn(rows, D).to(dtype).requires_grad_()
    loss, dx, dw = gradients(head(dtype, reduction=reduction), x, torch.full((rows,), -100))
    assert loss is not None
    assert dx is not None
    assert dw is not None
    assert loss.isnan() if reduction == "mean" else loss == 0
    assert dx.shape == x.shape
    assert not dx.any()
    assert not dw.any()


@pytest.mark.parametrize(("input_grad", "weight_grad"), [(True, False), (False, True)])
def test_only_the_gradients_that_are_needed(
    input_grad: bool, weight_grad: bool, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq = head()
    seq[0].weight.requires_grad_(weight_grad)
    x, targets = torch.randn(32, D, requires_grad=input_grad), some_targets(32)
    check(seq, x, targets)
    shapes: list[tuple[int, ...]] = []
    whole = torch.mm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        shapes.append(tuple(whole(*args, **kwargs).shape))
        return whole(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", counted)
    seq(x, targets)
    assert sum(shape[1] == V for shape in shapes) == chunks  # logits
    assert sum(shape[1] == D and shape[0] != V for shape in shapes) == chunks * input_grad
    assert sum(shape == (V, D) for shape in shapes) == weight_grad  # the others are added in place


def test_gradients_add_up(chunks: int) -> None:
    seq = head()
    x, targets = torch.randn(33, D, requires_grad=True), some_targets(33)
    for _ in range(2):
        (0.5 * seq(x, targets)).backward()
    _, dx, dw = gradients(seq, x, targets, fused=False)
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(seq[0].weight.grad, dw)


def test_tied_to_an_embedding(chunks: int) -> None:
    embedding, linear = Embedding(V, D), BasicLinear(D, V)
    linear.weight = embedding.weight
    seq = Sequential(embedding, linear, CrossEntropy())
    tokens, targets = torch.randint(0, V, (3, 11)), some_targets(3, 11)
    grads = []
    for fused in (True, False):
        with nullcontext() if fused else opfuser.disable(NAME):
            assert seq.plan(tokens, targets).fused("backward") == ({NAME: 1} if fused else {})
            grads += torch.autograd.grad(seq(tokens, targets), embedding.weight)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_sums_the_gradient_of_the_weight_in_fp32(dtype: torch.dtype, chunks: int) -> None:
    seq = head()
    x, targets = torch.randn(33, D, requires_grad=True), some_targets(33)
    with torch.autocast("cpu", dtype):
        ours = gradients(seq, x, targets, 0.5)
        theirs = gradients(seq, x, targets, 0.5, fused=False)
    check_against(ours, theirs, truth_of(seq, x, targets, 0.5))
    dw = ours[2]
    assert dw is not None
    assert dw.dtype == torch.float32
    if chunks > 1:
        assert not torch.equal(dw, dw.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("overwrite", [False, True])
def test_main_grad(overwrite: bool, dtype: torch.dtype, chunks: int) -> None:
    x, targets = torch.randn(33, D).to(dtype).requires_grad_(), some_targets(33)
    seq, start = head(dtype), torch.randn(V, D)
    seq[0].accumulate_into_main_grad = True
    weight = seq[0].weight
    weight.overwrite_main_grad = overwrite
    sums = []
    for fused in (True, False):
        weight.main_grad = start.clone()
        weight.grad_added_to_main_grad = False
        weight.grad = None
        with nullcontext() if fused else opfuser.disable(NAME):
            (0.5 * seq(x, targets)).backward()
        assert weight.grad_added_to_main_grad
        assert weight.grad is not None
        assert weight.grad.dtype == dtype
        assert not weight.grad.any()
        sums.append(weight.main_grad - (0 if overwrite else start))
    seq[0].accumulate_into_main_grad = False
    truth = truth_of(seq, x, targets, 0.5)[2]
    assert truth is not None
    # The sum with what was there is rounded in fp32.
    floor = 8e-7 + 2 * torch.finfo(dtype).eps * magnitude(truth)
    assert error(sums[0], truth) <= 2 * error(sums[1], truth) + floor


def test_torch_autograd_grad_leaves_main_grad_alone(chunks: int) -> None:
    x, targets = torch.randn(33, D).double().requires_grad_(), some_targets(33)
    seq = head(torch.float64)
    plain = check(seq, x, targets)
    seq[0].accumulate_into_main_grad = True
    seq[0].weight.main_grad = start = torch.randn(V, D)
    before = start.clone()
    with_weight = gradients(seq, x, targets)
    (dx,) = torch.autograd.grad(seq(x, targets), x)
    assert torch.equal(start, before)
    assert not hasattr(seq[0].weight, "grad_added_to_main_grad")
    for got, want in zip([*with_weight, dx], [*plain, plain[1]]):
        torch.testing.assert_close(got, want)


def test_main_grad_is_asked_for_and_missing() -> None:
    seq = head()
    seq[0].accumulate_into_main_grad = True
    loss = seq(torch.randn(3, D), torch.tensor([0, 1, 2]))
    with pytest.raises(ArgumentError, match="needs a main_grad of the parameter's shape"):
        loss.backward()


def test_fp16_gradients_are_divided_by_the_count_when_they_are_scaled() -> None:
    """1 / 4096, divided by 64 in fp16, would have 6 bits left when the scale arrives."""
    linear = BasicLinear(D, 4096, dtype=torch.float16)
    torch.nn.init.zeros_(linear.weight)
    x = torch.ones(64, D, dtype=torch.float16).requires_grad_()
    _, _, dw = check(Sequential(linear, CrossEntropy()), x, torch.zeros(64).long(), 4096.0)
    assert dw is not None
    torch.testing.assert_close(dw[1:], torch.ones_like(dw[1:]), rtol=1e-3, atol=0)


def test_fp16_weight_gradients_are_summed_where_they_do_not_overflow(chunks: int) -> None:
    seq = head(torch.float16)
    torch.nn.init.zeros_(seq[0].weight)
    x = torch.full((33, D), 6e4, dtype=torch.float16).requires_grad_()
    _, _, dw = check(seq, x, torch.full((33,), 3))
    assert dw is not None
    assert dw.isfinite().all()


@pytest.mark.parametrize(
    ("rows", "large", "sum_dtype"),
    [(64, 1 << 40, torch.bfloat16), (16, 16 * 32 * 2, torch.float32)],
)
def test_sums_over_chunks(
    rows: int, large: int, sum_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 over four, in fp32 over more."""
    chunked(monkeypatch, rows, large)
    linear = BasicLinear(D, 32, dtype=torch.bfloat16)
    x = torch.randn(256, D).bfloat16().requires_grad_()
    assert _loss_chunks.split(x, linear.weight, torch.bfloat16) == (rows, sum_dtype)
    check(Sequential(linear, CrossEntropy()), x, torch.randint(0, 32, (256,)))


def test_checkpointed(chunks: int) -> None:
    seq = head()
    x, targets = torch.randn(33, D, requires_grad=True), some_targets(33)
    loss = checkpoint(seq, x, targets, use_reentrant=False)
    grads = torch.autograd.grad(2 * loss, [x, seq[0].weight])
    _, *expected = gradients(seq, x, targets, 2.0)
    for got, want in zip(grads, expected):
        torch.testing.assert_close(got, want)


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_whole(dtype: torch.dtype, chunks: int) -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    seq = head(dtype)
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    x, targets = torch.randn(33, D).to(dtype).requires_grad_(), some_targets(33)
    loss = compiled(x, targets)
    grads = torch.autograd.grad(loss, [x, seq[0].weight], loss.new_tensor(0.5))
    theirs = gradients(seq, x, targets, 0.5, fused=False)
    check_against([loss.detach(), *grads], theirs, truth_of(seq, x, targets, 0.5))


@pytest.mark.gpu
def test_nothing_waits_for_the_device(no_waiting: Any) -> None:
    seq = head().cuda()
    x, targets = torch.randn(8, D, device="cuda", requires_grad=True), some_targets(8).cuda()
    (2 * seq(x, targets)).backward()
    with no_waiting():
        (2 * seq(x, targets)).backward()
