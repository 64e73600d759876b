from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from opfuser.kernels import cross_entropy
from opfuser.kernels.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_gradient,
    cross_entropy_mean,
    scaled,
)
from opfuser.kernels.launch import recorded, runs
from tests.kernels.cross_entropies import ALL_TERMS, IGNORE, Terms, check, logits, some_targets

PLAIN, ALL = Terms().arguments, Terms(0.1, 1e-3).arguments
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [FP32, BF16, FP16]


@pytest.fixture
def _short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in rows that the interpreter walks along quickly, and few programs."""
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(cross_entropy, name, cross_entropy.RowRule(1024, 2))
    rule = cross_entropy.RowRule(1024, 2, resident_warps=4, ahead=3)
    monkeypatch.setattr(cross_entropy, "_GRADIENT", rule)
    monkeypatch.setattr(cross_entropy, "multiprocessors", lambda _: 1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*zip(ALL_TERMS, DTYPES * 2), *zip(ALL_TERMS, DTYPES[1:] * 2)],
    ids=str,
)
def test_terms(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x = logits(4, 300, dtype, device)
    check(x, some_targets(4, 300, device), ALL_TERMS[name])


# 16 bytes are four columns in fp32, and eight in half precision.
@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [
        *((5, cols, FP32) for cols in (1, 3, 4, 5, 16, 257)),
        *((5, cols, BF16) for cols in (2, 7, 8, 9, 33, 1024)),
        *((rows, cols, BF16) for rows in (0, 1) for cols in (9, 64)),
    ],
    ids=str,
)
def test_rows_of_any_number_and_length(
    rows: int, cols: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(logits(rows, cols, dtype, device), some_targets(rows, cols, device))


# A tile is 256 columns in fp32, and 512 in half precision.
@pytest.mark.usefixtures("_short_tiles")
@pytest.mark.parametrize(
    ("cols", "dtype"),
    [(511, BF16), (512, BF16), (513, BF16), (2049, BF16), (255, FP32), (256, FP32), (515, FP32)],
    ids=str,
)
def test_several_tiles_and_rows_per_program(
    cols: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(logits(5, cols, dtype, device), some_targets(5, cols, device))


@pytest.mark.parametrize(("gap", "offset"), [(0, 8), (0, 1), (1, 0), (8, 0), (8, 3), (15, 1)])
def test_rows_that_begin_anywhere(gap: int, offset: int, device: torch.device) -> None:
    for cols, dtype in ((40, BF16), (43, FP32)) if gap % 8 else ((43, BF16), (40, FP32)):
        x = logits(6, cols, dtype, device, gap, offset)
        check(x, some_targets(6, cols, device), what=f"{dtype} {cols}")


def test_one_row_for_all(device: torch.device) -> None:
    x = torch.randn(1, 33, device=device).expand(4, 33)
    targets = torch.tensor([0, 32, 7, IGNORE], device=device)
    loss, *statistics = cross_entropy_forward(x, targets, PLAIN)
    apart, *_ = cross_entropy_forward(x.contiguous(), targets, PLAIN)
    assert torch.equal(loss, apart)
    dx = cross_entropy_backward(x, targets, *statistics, torch.ones_like(loss), None, PLAIN)
    exact = torch.softmax(x.double(), 1).scatter_add(
        1, targets.clamp_min(0).unsqueeze(1), -torch.ones(4, 1, device=device).double()
    )
    exact[3] = 0
    torch.testing.assert_close(dx.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ignore_index", "dtype", "step"),
    [
        (-100, torch.int32, 1),
        (-100, torch.int64, 2),
        (-1, torch.int64, 1),
        (-1, torch.int32, 2),
        (0, torch.int64, 2),
        (3, torch.int32, 1),
    ],
)
def test_ignored_targets(
    ignore_index: int, dtype: torch.dtype, step: int, device: torch.device
) -> None:
    targets = torch.tensor([0, 1, 2, 3, ignore_index, 3], dtype=dtype, device=device)
    targets = targets.repeat_interleave(step)[::step]
    assert targets.is_contiguous() == (step == 1)
    check(logits(6, 4, FP32, device), targets, Terms(0.1, 1e-3, ignore_index))
    none = torch.full_like(targets, ignore_index)
    check(logits(6, 4, FP32, device), none, Terms(0.1, 1e-3, ignore_index))


@pytest.mark.kernels
def test_ignored_rows_are_not_read(device: torch.device) -> None:
    for cols in (40, 43):
        x = torch.full((3, cols), math.nan, device=device)
        targets = torch.full((3,), IGNORE, device=device)
        loss, *statistics = cross_entropy_forward(x, targets, ALL)
        dx = cross_entropy_backward(x, targets, *statistics, torch.ones_like(loss), None, ALL)
        in_place, _ = cross_entropy_gradient(x, targets, None, ALL)
        for result in (loss, dx, in_place, x):
            assert not result.any()


@pytest.mark.kernels
@pytest.mark.parametrize("target", [-1, 40, 1 << 40])
def test_a_target_that_is_no_class_gives_nan(target: int, device: torch.device) -> None:
    x = logits(2, 40, FP32, device)
    targets = torch.tensor([target, 1], device=device)
    loss, *statistics = cross_entropy_forward(x, targets, PLAIN)
    dx = cross_entropy_backward(x, targets, *statistics, loss.new_ones(()), None, PLAIN)
    in_place, own = cross_entropy_gradient(x.clone(), targets, None, PLAIN)
    for result in (loss, in_place):
        assert result.isnan().tolist() == [True, False]
    for gradient in (dx, own):
        assert gradient.isnan().all(1).tolist() == [True, False]
        assert gradient.isnan().any(1).tolist() == [True, False]


# A GPU is silent about differences of infinities; the interpreter's numpy is not.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_infinite(device: torch.device) -> None:
    inf = math.inf
    x = torch.tensor(
        [[-inf, 0.0, -inf, 1.0], [inf, 0.0, 1.0, 2.0], [math.nan, 0.0, 1.0, 2.0], [-inf] * 4],
        device=device,
    )
    targets = torch.tensor([1, 1, 1, 1], device=device)
    loss, *statistics = cross_entropy_forward(x, targets, PLAIN)
    assert loss.isnan().tolist() == [False, True, True, True]
    torch.testing.assert_close(loss[0], torch.tensor([0.0, 1.0], device=device).logsumexp(0))
    dx = cross_entropy_backward(x, targets, *statistics, loss.new_ones(()), None, PLAIN)
    masked = torch.softmax(torch.tensor([0.0, 1.0], device=device), 0)
    torch.testing.assert_close(dx[0, [1, 3]], masked - torch.tensor([1.0, 0.0], device=device))
    assert not dx[0, [0, 2]].any()
    (first, _), (_, own) = (
        cross_entropy_gradient(x.clone(), targets, None, PLAIN) for _ in range(2)
    )
    torch.testing.assert_close(first, loss, equal_nan=True)
    torch.testing.assert_close(own, dx, equal_nan=True)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_the_largest_and_lowest_numbers(device: torch.device) -> None:
    for dtype in DTYPES:
        top = torch.finfo(dtype).max
        x = torch.tensor([[top, -top, 0.0], [-top, -top, -top]], dtype=dtype, device=device)
        targets = torch.tensor([0, 2], device=device)
        loss, *statistics = cross_entropy_forward(x, targets, PLAIN)
        assert loss.tolist() == pytest.approx([0.0, math.log(3)])
        dx = cross_entropy_backward(x, targets, *statistics, loss.new_ones(()), None, PLAIN)
        exact = torch.tensor([[0.0, 0.0, 0.0], [1 / 3, 1 / 3, -2 / 3]], device=device)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(dx, exact.to(dtype), rtol=eps, atol=eps)


def test_logits_along_columns(device: torch.device) -> None:
    x, targets = torch.randn(5, 4, device=device).t(), some_targets(4, 5, device)
    losses = cross_entropy_forward(x, targets, ALL)
    want = cross_entropy_forward(x.contiguous(), targets, ALL)
    torch.testing.assert_close(losses, want, rtol=0, atol=0)
    rest = targets, *losses[1:], torch.ones_like(losses.loss), None, ALL
    dx, want_dx = (cross_entropy_backward(t, *rest) for t in (x, x.contiguous()))
    assert torch.equal(dx, want_dx)
    if not runs(x):
        check(x, targets)
        return
    with pytest.raises(ValueError, match=r"must be contiguous along a row.*strides \(1, 4\)"):
        cross_entropy_gradient(x, targets, None, ALL)


@pytest.mark.parametrize("rows", [0, 1, 4095, 4097, 9000])
def test_mean_of_many(rows: int, device: torch.device) -> None:
    targets = some_targets(rows, 7, device)
    loss = torch.where(targets == IGNORE, 0.0, torch.rand(rows, device=device))
    mean, count = cross_entropy_mean(loss, targets, IGNORE)
    assert count.item() == (targets != IGNORE).sum()
    torch.testing.assert_close(mean.double(), loss.double().sum() / count, equal_nan=True)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(0, FP32), (1, FP16), (4096, BF16), (10000, FP32), (10000, FP16)],
    ids=str,
)
def test_scaled(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(size, device=device).to(dtype)
    before, factor = x.clone(), torch.tensor(0.3, device=device)
    for count in (None, torch.tensor(5, device=device)):
        exact = before.double() * 0.3 / (1 if count is None else 5)
        tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.0}
        tolerance["atol"] = 1e-7 if dtype == FP16 else 0.0
        for to in (dtype, FP32):
            y = scaled(x, factor, count, to, in_place=False)
            assert (y.dtype, y.data_ptr() == x.data_ptr() and size > 0) == (to, False)
            torch.testing.assert_close(y.double(), exact, **tolerance)
        assert torch.equal(x, before)
        own = x.clone()
        assert scaled(own, factor, count, dtype, in_place=True) is own
        torch.testing.assert_close(own.double(), exact, **tolerance)


def test_one_moves_nothing_in_place_and_is_a_copy_otherwise(device: torch.device) -> None:
    x, one = torch.randn(5000, device=device), torch.ones((), device=device)
    with recorded() as noted:
        scaled(x, one, None, x.dtype, in_place=True)
    assert [launch.launch.constants["IN_PLACE"] for launch in noted] == [True]
    before = x.clone()
    assert torch.equal(scaled(x, one, None, x.dtype, in_place=True), before)
    copy = scaled(x, one, None, x.dtype, in_place=False)
    assert torch.equal(copy, before)
    assert copy.data_ptr() != x.data_ptr()


def test_no_row_counts_and_a_factor(device: torch.device) -> None:
    zeros, none = torch.zeros(7, device=device), torch.zeros((), dtype=torch.int64, device=device)
    assert not scaled(zeros, torch.ones((), device=device), none, zeros.dtype, in_place=False).any()


def test_the_same_twice(device: torch.device) -> None:
    x, targets = logits(4, 500, BF16, device), some_targets(4, 500, device)

    def run() -> list[Tensor]:
        own = x.clone()
        return [
            *cross_entropy_forward(x, targets, ALL),
            *cross_entropy_gradient(own, targets, None, ALL),
        ]

    assert all(map(torch.equal, run(), run()))
