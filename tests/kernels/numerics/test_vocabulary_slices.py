"""Slices of the classes, as ranks have them, one behind another in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from opfuser.kernels import cross_entropy
from opfuser.kernels.cross_entropy_plain import RowLosses
from opfuser.kernels.vocabulary_slices import (
    Classes,
    merged_losses,
    slice_gradient,
    slice_statistics,
)
from tests.kernels.cross_entropies import (
    ALL_TERMS,
    IGNORE,
    Terms,
    assert_as_good_as,
    logits,
    losses,
    some_targets,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def sliced(x: Tensor, sizes: list[int]) -> list[tuple[Tensor, Classes]]:
    """The logits of ranks with so many classes, each in memory of its own."""
    found, start = [], 0
    for part in x.split(sizes, 1):
        found.append((part.clone(), Classes(start, x.shape[1])))
        start += part.shape[1]
    return found


def merged(slices: list[tuple[Tensor, Classes]], targets: Tensor, terms: Terms) -> RowLosses:
    of_loss = terms.arguments
    parts = [slice_statistics(part, targets, of_loss, classes) for part, classes in slices]
    return merged_losses(torch.stack(parts), targets, of_loss, slices[0][1].total)


def check(x: Tensor, targets: Tensor, terms: Terms, sizes: list[int]) -> None:
    """Losses and gradients to float64, errors to those of plain torch with all classes."""
    wide = torch.promote_types(x.dtype, FP32)
    plain, exact = x.detach().clone().requires_grad_(), x.detach().double().requires_grad_()
    theirs, truth = losses(plain, targets, terms), losses(exact, targets, terms)
    slices = sliced(x, sizes)
    before = [part.clone() for part, _ in slices]
    row = merged(slices, targets, terms)
    assert row.loss.dtype == wide
    size = max([1.0, *(t.detach().abs().max().item() for t in (truth, exact) if t.numel())])
    assert_as_good_as(row.loss, theirs.detach(), truth.detach(), size, "loss")
    counts = targets != IGNORE
    assert torch.equal(row.row_max[counts], x.amax(1).to(wide)[counts])
    count = counts.sum()
    for dloss, divisor in (
        (torch.rand_like(row.loss) + 0.5, None),
        (torch.full((), 0.7, dtype=wide, device=x.device), count),
    ):
        given = dloss if divisor is None else dloss.expand(row.loss.shape) / divisor
        given = torch.where(counts, given, 0.0)
        (dtruth,) = torch.autograd.grad(truth, exact, given.double(), retain_graph=True)
        (dtheirs,) = torch.autograd.grad(theirs, plain, given.to(theirs.dtype), retain_graph=True)
        for in_place in (False, True):
            got = []
            for part, classes in sliced(x, sizes):
                of_loss = terms.arguments
                dx = slice_gradient(part, targets, row, dloss, divisor, of_loss, classes, in_place)
                assert not dx.numel() or (dx.data_ptr() == part.data_ptr()) == in_place
                assert dx.dtype == x.dtype
                got.append(dx)
            size = given.abs().max().item() if given.numel() else 0.0
            ours = torch.cat(got, 1)
            assert_as_good_as(ours, dtheirs, dtruth, size, f"gradient, in place: {in_place}")
            assert not ours[~counts].any()
    assert all(map(torch.equal, before, (part for part, _ in slices)))


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        ("likelihood", FP32, [150, 150]),
        ("smoothed", BF16, [128, 128, 44]),
        ("with z-loss", FP16, [151, 149]),
        ("all", FP32, [1, 7, 8]),
        ("all", BF16, [1, 1]),
    ],
    ids=str,
)
def test_terms(name: str, dtype: torch.dtype, sizes: list[int], device: torch.device) -> None:
    x = logits(4, sum(sizes), dtype, device)
    check(x, some_targets(4, sum(sizes), device), ALL_TERMS[name], sizes)


@pytest.mark.parametrize(("sizes", "dtype"), [([600, 513], BF16), ([256, 255], FP32)], ids=str)
def test_several_tiles(
    sizes: list[int], dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("vocabulary_slices.FORWARD", "cross_entropy.BACKWARD"):
        monkeypatch.setattr(f"opfuser.kernels.{place}", cross_entropy.RowRule(1024, 2))
    x = logits(3, sum(sizes), dtype, device)
    check(x, torch.tensor([0, sizes[0], sum(sizes) - 1], device=device), ALL_TERMS["all"], sizes)


def test_rows_of_a_wider_buffer(device: torch.device) -> None:
    """As chunks of logits lie; the gradient goes where they are, and not behind them."""
    terms = ALL_TERMS["all"]
    for cols, pitch in ((43, 64), (40, 41)):
        buffer = torch.randn(5, pitch, device=device)
        behind, targets = buffer[:, cols:].clone(), some_targets(5, 2 * cols, device)
        x = torch.cat([torch.randn(5, cols, device=device), buffer[:, :cols]], 1)
        row = merged(sliced(x, [cols, cols]), targets, terms)
        one, classes = row.loss.new_ones(()), Classes(cols, 2 * cols)
        apart, own = (
            slice_gradient(t, targets, row, one, None, terms.arguments, classes, at)
            for t, at in ((buffer[:, :cols].contiguous(), False), (buffer[:, :cols], True))
        )
        torch.testing.assert_close(own, apart, rtol=1e-6, atol=1e-7)
        assert torch.equal(buffer[:, cols:], behind)


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_counts(rows: int, device: torch.device) -> None:
    x = logits(rows, 24, FP32, device)
    check(x, torch.full((rows,), IGNORE, device=device), ALL_TERMS["all"], [12, 12])


def test_ignored_targets_that_are_classes_of_one_rank(device: torch.device) -> None:
    x, terms = logits(4, 12, FP32, device), Terms(0.1, 1e-3, 7)._replace(ignore_index=7)
    targets = torch.tensor([7, 1, 7, 8], dtype=torch.int32, device=device)
    row = merged(sliced(x, [6, 6]), targets, terms)
    want = losses(x.double(), targets, terms)
    torch.testing.assert_close(row.loss.double(), want, rtol=1e-5, atol=1e-6)
    assert row.loss[::2].tolist() == [0.0, 0.0]


@pytest.mark.kernels
def test_ignored_rows_are_not_read(device: torch.device) -> None:
    terms = ALL_TERMS["all"]
    for cols in (40, 43):
        slices = sliced(torch.full((3, 2 * cols), math.nan, device=device), [cols, cols])
        targets = torch.full((3,), IGNORE, device=device)
        row = merged(slices, targets, terms)
        assert not row.loss.any()
        for part, classes in slices:
            one = row.loss.new_ones(())
            dx = slice_gradient(part, targets, row, one, None, terms.arguments, classes, False)
            assert not dx.any()


@pytest.mark.parametrize("target", [-1, 24, 1 << 40])
def test_a_target_that_is_no_class_gives_nan(target: int, device: torch.device) -> None:
    slices = sliced(logits(2, 24, FP32, device), [12, 12])
    targets = torch.tensor([target, 1], device=device)
    row = merged(slices, targets, Terms())
    assert row.loss.isnan().tolist() == [True, False]
    one = row.loss.new_ones(())
    for part, classes in slices:
        dx = slice_gradient(part, targets, row, one, None, Terms().arguments, classes, False)
        assert dx.isnan().all(1).tolist() == dx.isnan().any(1).tolist() == [True, False]


def test_a_rank_whose_logits_are_all_masked(device: torch.device) -> None:
    x = torch.tensor([[-math.inf, -math.inf, 0.0, 1.0]], device=device)
    slices, targets = sliced(x, [2, 2]), torch.tensor([3], device=device)
    row = merged(slices, targets, Terms())
    exact = torch.tensor([0.0, 1.0], device=device).logsumexp(0) - 1
    torch.testing.assert_close(row.loss, exact.unsqueeze(0))
