"""Kernels of RMSNorm, LayerNorm and L2 normalization against float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser.kernels import norm, norm_launch
from opfuser.kernels.launch import INTERPRETED, recorded
from tests.kernels.norms import (
    EPS,
    Case,
    backward,
    check_norm,
    check_recomputed,
    compare,
    forward,
    make,
    truth,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = RMS, LAYER, NO_BIAS = ["rms", "layer", "layer without bias"]
# Rows of which forward reads each twice and backward has two kernels. Backward of WIDE_BACK has.
WIDE, WIDE_BACK = 16401, 8200


def add_up(parts: Tensor, totals: Sequence[Tensor], counts: Sequence[int]) -> None:
    """As ``sum_columns``, which test_sums.py tests."""
    for total, rows in zip(totals, parts.flatten(0, -2).split(tuple(counts))):
        total.copy_(rows.sum(0))


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds per program, and most would be of sums of long rows."""
    if INTERPRETED:
        by_kernel = norm_launch.sum_columns
        monkeypatch.setattr(
            norm_launch,
            "sum_columns",
            lambda parts, *rest: (add_up if parts.shape[-1] > 2048 else by_kernel)(parts, *rest),
        )


def check(case: Case) -> None:
    with recorded() as launches:
        forward(case)
    assert launches
    check_norm(case)


# One row per program, several, and blocks of columns; odd sizes, and ends of blocks.
SHAPES = [(7, 33), (1, 5), (3, 1), (65, 64), (5, 257), (4, 2048), (3, 5000), (2, WIDE_BACK)]
SHAPES.append((2, WIDE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "at",
    [
        # Plain torch computes a variance of zero, and the sum of a long row, less exactly.
        pytest.param(n, marks=[pytest.mark.kernels] * (shape in ((3, 1), (2, WIDE_BACK))))
        for n, shape in enumerate(SHAPES)
    ],
    ids=map(str, SHAPES),
)
def test_values_and_gradients(at: int, kind: str, device: torch.device) -> None:
    """Dtypes and flags come in turn: each kernel gets all of them with its shapes and kinds."""
    turn = at + KINDS.index(kind)
    dtype, add, centered = (FP32, BF16, FP16)[turn % 3], turn % 2 == 0, turn // 2 % 2 == 0
    check(make(kind, SHAPES[at], dtype, device, add=add, centered=centered))


APART: dict[str, Any] = {"pitch": 5}
OTHERS: list[tuple[str, tuple[int, int], torch.dtype, dict[str, Any]]] = [
    *((kind, (0, cols), BF16, {}) for kind in (RMS, LAYER) for cols in (33, WIDE)),
    (RMS, (7, 33), BF16, APART),
    (LAYER, (7, 33), BF16, APART),
    (LAYER, (2, WIDE), BF16, APART),
    (RMS, (7, 40), BF16, {"parameters": FP32}),
    (LAYER, (7, 40), FP32, {"parameters": BF16}),
    (LAYER, (7, 40), FP16, {"parameters": torch.float64}),
    (LAYER, (2, WIDE), BF16, {"parameters": FP32}),
]


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "how"),
    [
        *OTHERS,
        pytest.param(
            RMS, (2, WIDE), FP16, {"parameters": torch.float64}, marks=pytest.mark.kernels
        ),
    ],
    ids=str,
)
def test_no_rows_rows_apart_and_parameters_of_another_dtype(
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    how: dict[str, Any],
    device: torch.device,
) -> None:
    check(make(kind, shape, dtype, device, add=True, **how))


@pytest.mark.parametrize("shape", [(331, 33), (9, 1030), (3, 5000), (5, 9000)])
def test_programs_take_many_rows(
    shape: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_launch, "multiprocessors", lambda x: 1)
    check(make(LAYER, shape, FP32, device, add=True))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(RMS, (7, 33)), (NO_BIAS, (7, 33)), (LAYER, (7, 33)), (LAYER, (1, 9000)), (RMS, (1, 9000))],
)
def test_only_what_is_wanted(kind: str, shape: tuple[int, int], device: torch.device) -> None:
    case = make(kind, shape, FP32, device, add=True)
    saved = forward(case)
    everything = backward(case, saved)
    for wants in list(itertools.product([False, True], repeat=3))[1:]:
        for name, result in backward(case, saved, wants).items():
            torch.testing.assert_close(result, everything[name], msg=f"{name}, {wants}")


@pytest.mark.parametrize("kind", [RMS, LAYER])
@pytest.mark.parametrize("shape", [(7, 33), (1, 9000)])
def test_output_of_another_weight(kind: str, shape: tuple[int, int], device: torch.device) -> None:
    """Gradients are of a weight, and the output of another one."""
    case = make(kind, shape, FP32, device, add=True)
    saved, other = forward(case), case._replace(weight=torch.randn_like(case.weight))
    want = {**backward(case, saved), "recomputed y": backward(other, saved)["recomputed y"]}
    dx, dw, _, y = norm.norm_backward(
        case.dy, saved["total"], case.weight, case.bias, saved.get("mean"), saved["rstd"],
        case.dtotal, EPS, case.centered, True, True, True, other.weight,
    )  # fmt: skip
    for result, name in ((dx, "dx"), (dw, "dw"), (y, "recomputed y")):
        assert torch.equal(result, want[name])


@pytest.mark.parametrize(
    ("residual", "cols"),
    [(FP32, 33), (FP16, 33), (torch.float64, 33), (FP32, 9000), (FP16, 9000)],
    ids=str,
)
def test_residual_gradient_of_another_dtype(
    residual: torch.dtype, cols: int, device: torch.device
) -> None:
    case = make(RMS, (3, cols), BF16, device)
    dtotal = torch.randn(3, cols, device=device, dtype=torch.float64).to(residual)
    saved = forward(case)
    case = case._replace(dtotal=dtotal)
    dx = backward(case, saved, (True, False, False))["dx"]
    assert dx.dtype == torch.promote_types(BF16, residual)
    zero = case._replace(dy=torch.zeros_like(case.dy))
    alone = backward(zero, saved, (True, False, False))["dx"]
    assert torch.equal(alone, dtotal.to(alone.dtype))
    expected = truth(case.to(torch.float64))["dx"]
    torch.testing.assert_close(dx.double(), expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((7, 33), FP32), ((7, 33), FP16), ((0, 33), BF16), ((2, WIDE), BF16), ((2, WIDE), FP32)],
    ids=str,
)
def test_l2(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, dy = (torch.randn(2, *shape, device=device)).to(dtype)
    y, _, _, rnorm = norm.norm_forward(x, None, None, None, 0.1, False, False)
    args = dy, x, None, None, None, rnorm, None, 0.1, False, True, False, True
    dx, dw, db, recomputed = norm.norm_backward(*args)
    assert (dw, db) == (None, None)
    check_recomputed(recomputed, y)
    results: dict[torch.dtype, list[Tensor]] = {}
    for wide in (FP32, torch.float64):
        leaf = x.to(wide).requires_grad_()
        r = torch.rsqrt(leaf.square().sum(-1, keepdim=True) + 0.1)
        (grad,) = torch.autograd.grad(leaf * r, leaf, dy.to(wide))
        results[wide] = [(leaf * r).detach(), r.detach()[:, 0], grad]
    for name, got, single, expected in zip(
        ("y", "rnorm", "dx"), (y, rnorm, dx), results[FP32], results[torch.float64]
    ):
        compare(name, got, single.to(got.dtype), expected)


@pytest.mark.parametrize("cols", [64, WIDE])
def test_layer_norm_far_from_zero(cols: int, device: torch.device) -> None:
    x = 300 + torch.randn(4, cols, device=device)
    x[:, 0] = -2000.0  # no element of a row can stand for its mean
    weight = torch.ones(cols, device=device)
    y, _, mean, rstd = norm.norm_forward(x, None, weight, None, 1e-12, False, True)
    variance, expected_mean = torch.var_mean(x.double(), -1, correction=0)
    torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), variance.rsqrt(), rtol=1e-6, atol=0)
    expected = (x.double() - expected_mean[:, None]) * variance.rsqrt()[:, None]
    plain = torch.nn.functional.layer_norm(x, (cols,), eps=1e-12)
    compare("y", y, plain, expected)


@pytest.mark.parametrize(
    ("cols", "dtype"), [(64, FP32), (64, BF16), (64, FP16), (WIDE, FP16)], ids=str
)
def test_rows_of_zeros_and_of_tiny_and_large_numbers(
    cols: int, dtype: torch.dtype, device: torch.device
) -> None:
    row = torch.randn(cols, device=device)
    for kind, factor in itertools.product((RMS, LAYER), (0.0, 1e-6, 1e3)):
        case = make(kind, (1, cols), dtype, device)
        x = case.x.copy_(factor * row)
        saved = forward(case)
        got = saved | backward(case, saved)
        expected = truth(case.to(torch.float64))
        single = truth(case.to(FP32))
        for name in ("y", "dx", "dw"):
            assert got[name].isfinite().all()
            compare(name, got[name], single[name].to(x.dtype), expected[name])


def test_results_do_not_depend_on_what_else_is_in_the_batch(device: torch.device) -> None:
    case = make(LAYER, (12, 257), FP32, device)
    alone = case._replace(x=case.x[7:8], dy=case.dy[7:8])
    got, want = (backward(c, forward(c)) for c in (alone, case))
    for name in ("dx", "recomputed y"):
        assert torch.equal(got[name][0], want[name][7])


def test_longer_rows_have_no_kernel(device: torch.device) -> None:
    x = torch.randn(2, norm_launch.MAX_COLS + 1, device=device)
    weight = torch.ones(x.shape[1], device=device)
    with recorded() as launches:
        y = norm.norm_forward(x, None, weight, None, EPS, False, False).y
        for scale, with_mean in ((None, False), (weight, False), (weight, True)):
            _, total, mean, rstd = norm.norm_forward(x, x, scale, None, EPS, False, with_mean)
            wants = True, scale is not None, True
            norm.norm_backward(x, total, scale, None, mean, rstd, x, EPS, False, *wants)
    assert not launches
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (x.shape[1],), eps=EPS))


@pytest.mark.kernels
def test_columns_must_be_side_by_side(device: torch.device) -> None:
    x = torch.ones(4, 3, device=device).t()
    weight, row = torch.ones(4, device=device), torch.ones(3, device=device)
    y = torch.ones(3, 4, device=device)
    calls: list[Any] = [
        lambda: norm.norm_forward(x, None, weight, None, EPS, False, False),
        lambda: norm.norm_forward(y, x, weight, None, EPS, False, False),
        lambda: norm.norm_backward(
            x, y, None, None, None, row, None, EPS, False, True, False, False
        ),
    ]
    text = r"side by side, but received strides \(1, 3\)\. Pass x\.contiguous\(\)\."
    for call in calls:
        with pytest.raises(ValueError, match=text):
            call()
