"""A linear operation and a loss in one joint fusion: values, in one chunk and in several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opfuser import BasicLinear, CrossEntropy, Sequential
from opfuser.errors import ArgumentError
from opfuser.testing import check_fusion
from tests.contract.tensors import as_exact
from tests.fused.examples import BF16, DTYPES, F32, F64, FP16, leaf, results
from tests.fused.losses import NAME, D, V, check, chunked, chunks, head, some_targets

__all__ = ["chunks"]  # a fixture


@pytest.mark.parametrize(
    ("reduction", "terms"),
    [("mean", {}), ("sum", {}), ("mean", {"label_smoothing": 0.2, "z_loss": 1e-3})],
    ids=str,
)
def test_values(reduction: Any, terms: dict[str, float], chunks: int, device: torch.device) -> None:
    ops = [op.to(device) for op in head(reduction=reduction, **terms)]
    x, targets = torch.randn(3, 11, D, device=device), some_targets(3, 11).to(device)
    # Without rows the mean is nan.
    check_fusion(NAME, ops, x, targets, dtypes=DTYPES, zero_rows=reduction == "sum")


@pytest.mark.parametrize(
    ("dtype", "factor"), [(F64, 1.0), (F32, -0.3), (F32, 0.0), (BF16, 0.0), (FP16, -0.3)], ids=str
)
def test_gradients_that_arrive(dtype: torch.dtype, factor: float, chunks: int) -> None:
    check(head(dtype), leaf(33, D, dtype=dtype), some_targets(33), factor)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(D),
        torch.randn(1, D).expand(33, D),
        torch.randn(D, 11, 3).permute(2, 1, 0),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)
def test_layouts(x: Tensor, chunks: int) -> None:
    check(head(), x.detach().requires_grad_(), torch.randint(0, V, x.shape[:-1]))


def test_targets_of_any_layout_and_of_int32(chunks: int) -> None:
    x, targets = leaf(3, 11, D), some_targets(11, 3).t()
    check(head(), x, targets)
    check(head(), x, targets.int())


@pytest.mark.parametrize(
    ("rows", "dtype", "reduction"),
    [(0, F32, "mean"), (5, FP16, "mean"), (0, BF16, "sum"), (5, F32, "sum")],
    ids=str,
)
def test_nothing_counts(rows: int, dtype: torch.dtype, reduction: Any, chunks: int) -> None:
    seq, x = head(dtype, reduction=reduction), leaf(rows, D, dtype=dtype)
    loss, dx, dw = results(seq, seq.parameters(), x, torch.full((rows,), -100))
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
    x, targets = leaf(32, D).requires_grad_(input_grad), some_targets(32)
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


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast_sums_the_gradient_of_the_weight_in_fp32(dtype: torch.dtype, chunks: int) -> None:
    seq, x, targets = head(), leaf(33, D), some_targets(33)
    with torch.autocast("cpu", dtype):
        check_fusion(NAME, list(seq), x, targets, zero_rows=False)
        (dw,) = torch.autograd.grad(seq(x, targets), seq[0].weight)
    assert dw.dtype == F32
    if chunks > 1:
        assert not torch.equal(dw, dw.to(dtype).float())


@pytest.mark.parametrize(
    ("dtype", "overwrite"), [(F32, False), (F32, True), (BF16, False), (FP16, True)], ids=str
)
def test_main_grad(dtype: torch.dtype, overwrite: bool, chunks: int) -> None:
    """That of one chunk is tested with those of other fusions (contract/test_weight_gradients)."""
    x, targets = leaf(33, D, dtype=dtype), some_targets(33)
    seq, start = head(dtype), torch.randn(V, D)
    seq[0].accumulate_into_main_grad = True
    weight = seq[0].weight
    weight.main_grad, weight.overwrite_main_grad = start.clone(), overwrite
    (0.5 * seq(x, targets)).backward()
    assert weight.grad_added_to_main_grad
    assert weight.grad.dtype == dtype
    assert not weight.grad.any()
    plain, exact = (
        torch.autograd.grad(0.5 * seq[1].reference(x.detach().to(d) @ w.t(), targets), w)[
            0
        ].double()
        for d in (dtype, F64)
        for w in [weight.detach().to(d).requires_grad_()]
    )
    added = 0.0 if overwrite else start
    as_exact("main_grad", weight.main_grad, added + plain, added + exact)


def test_main_grad_is_asked_for_and_missing() -> None:
    seq = head()
    seq[0].accumulate_into_main_grad = True
    loss = seq(torch.randn(3, D), torch.tensor([0, 1, 2]))
    with pytest.raises(ArgumentError, match="needs a main_grad of the parameter's shape"):
        loss.backward()


def test_fp16_gradients_are_divided_by_the_count_when_they_are_scaled() -> None:
    """1 / 5000, divided by 64 in fp16, would have 6 bits left when the scale arrives."""
    linear = BasicLinear(D, 5000, dtype=FP16)
    torch.nn.init.zeros_(linear.weight)
    x = torch.ones(64, D, dtype=FP16).requires_grad_()
    check(Sequential(linear, CrossEntropy()), x, torch.zeros(64).long(), 4096.0)
    dw = linear.weight.grad
    assert dw is not None
    torch.testing.assert_close(dw[1:], torch.full_like(dw[1:], 4096 / 5000), rtol=1e-3, atol=0)


def test_fp16_weight_gradients_are_summed_where_they_do_not_overflow(chunks: int) -> None:
    seq = head(FP16)
    torch.nn.init.zeros_(seq[0].weight)
    x = torch.full((33, D), 6e4, dtype=FP16).requires_grad_()
    check(seq, x, torch.full((33,), 3))
    assert seq[0].weight.grad.isfinite().all()


@pytest.mark.parametrize(("rows", "dtype"), [(64, BF16), (16, F32)])
def test_sums_over_chunks(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 over four, in fp32 over more."""
    chunked(monkeypatch, rows, dtype=dtype)
    seq = Sequential(BasicLinear(D, 32, dtype=BF16), CrossEntropy())
    check(seq, leaf(256, D, dtype=BF16), torch.randint(0, 32, (256,)))


def test_checkpointed(chunks: int) -> None:
    seq, x, targets = head(), leaf(33, D), some_targets(33)
    loss = checkpoint(seq, x, targets, use_reentrant=False)
    grads = torch.autograd.grad(2 * loss, [x, seq[0].weight])
    for got, want in zip(grads, torch.autograd.grad(2 * seq(x, targets), [x, seq[0].weight])):
        torch.testing.assert_close(got, want)


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dtype", [F32, BF16, FP16], ids=str)
def test_compiled_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    chunked(monkeypatch, 12)
    seq = head(dtype)
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    x, targets = leaf(33, D, dtype=dtype), some_targets(33)
    got = results(compiled, seq.parameters(), x, targets)
    for ours, theirs in zip(got, results(seq, seq.parameters(), x, targets)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
def test_nothing_waits_for_the_device(no_waiting: Any) -> None:
    seq = head().cuda()
    x, targets = torch.randn(8, D, device="cuda", requires_grad=True), some_targets(8).cuda()
    (2 * seq(x, targets)).backward()
    with no_waiting():
        (2 * seq(x, targets)).backward()
