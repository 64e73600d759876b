"""Kernels of RMSNorm, LayerNorm and L2 normalisation against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser.kernels import column_sums, norm, norm_launch
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

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# One row per program, several, and blocks of columns; odd sizes, and ends of blocks.
SHAPES = [(7, 33), (1, 5), (3, 1), (65, 64), (5, 257), (4, 2048), (3, 5000), (2, 8200), (2, 16401)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter takes milliseconds per program, and most would be of the reduction."""
    if INTERPRETED:
        monkeypatch.setattr(column_sums, "_WIDE", column_sums._Tile(128, 1024, 4))
    column_sums._launch.cache_clear()
    yield
    column_sums._launch.cache_clear()


def check(case: Case) -> None:
    with recorded() as launches:
        forward(case)
    assert launches
    check_norm(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer", "layer without bias"])
def test_values_and_gradients(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    for add, centred in ((False, True), (True, False)):
        check(make(kind, shape, dtype, device, add=add, centred=centred))


@pytest.mark.parametrize("shape", [(0, 33), (0, 16400)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_no_rows(kind: str, shape: tuple[int, int], device: torch.device) -> None:
    check(make(kind, shape, torch.bfloat16, device, add=True))


@pytest.mark.parametrize("shape", [(7, 33), (2, 16400)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rows_that_are_apart(kind: str, shape: tuple[int, int], device: torch.device) -> None:
    case = make(kind, shape, torch.bfloat16, device, add=True, pitch=5)
    assert not case.x.is_contiguous()
    check(case)


@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float64),
    ],
)
@pytest.mark.parametrize("shape", [(7, 40), (2, 16400)])
def test_parameters_of_another_dtype(
    shape: tuple[int, int], dtype: torch.dtype, parameters: torch.dtype, device: torch.device
) -> None:
    for kind in ("rms", "layer"):
        check(make(kind, shape, dtype, device, add=True, parameters=parameters))


@pytest.mark.parametrize("shape", [(331, 33), (40, 1030), (9, 5000), (9, 9000)])
def test_programs_take_many_rows(
    shape: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_launch, "multiprocessors", lambda x: 1)
    check(make("layer", shape, torch.float32, device, add=True))


def test_more_programs_than_are_summed_at_a_time(device: torch.device) -> None:
    check(make("layer", (140, 1030), torch.float32, device))


@pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=3))[1:], ids=str)
@pytest.mark.parametrize("shape", [(7, 33), (1, 9000)])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer without bias"])
def test_only_what_is_wanted(
    kind: str, shape: tuple[int, int], wants: tuple[bool, bool, bool], device: torch.device
) -> None:
    case = make(kind, shape, torch.float32, device, add=True)
    saved = forward(case)
    everything = backward(case, saved)
    for name, result in backward(case, saved, wants).items():
        torch.testing.assert_close(result, everything[name], msg=name)


@pytest.mark.parametrize("cols", [33, 9000])
@pytest.mark.parametrize("residual", [torch.float32, torch.float16, torch.float64])
def test_residual_gradient_of_another_dtype(
    residual: torch.dtype, cols: int, device: torch.device
) -> None:
    case = make("rms", (3, cols), torch.bfloat16, device)
    dtotal = torch.randn(3, cols, device=device, dtype=torch.float64).to(residual)
    saved = forward(case)
    case = case._replace(dtotal=dtotal)
    dx = backward(case, saved, (True, False, False))["dx"]
    assert dx.dtype == torch.promote_types(torch.bfloat16, residual)
    zero = case._replace(dy=torch.zeros_like(case.dy))
    alone = backward(zero, saved, (True, False, False))["dx"]
    assert torch.equal(alone, dtotal.to(alone.dtype))
    expected = truth(case.to(torch.float64))["dx"]
    torch.testing.assert_close(dx.double(), expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 33), (0, 33), (2, 16400)])
def test_l2(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, dy = (torch.randn(2, *shape, device=device)).to(dtype)
    y, _, _, rnorm = norm.norm_forward(x, None, None, None, 0.1, False, False)
    args = dy, x, None, None, None, rnorm, None, 0.1, False, True, False, True
    dx, dw, db, recomputed = norm.norm_backward(*args)
    assert (dw, db) == (None, None)
    check_recomputed(recomputed, y)
    results: dict[torch.dtype, list[Tensor]] = {}
    for wide in (torch.float32, torch.float64):
        leaf = x.to(wide).requires_grad_()
        r = torch.rsqrt(leaf.square().sum(-1, keepdim=True) + 0.1)
        (grad,) = torch.autograd.grad(leaf * r, leaf, dy.to(wide))
        results[wide] = [(leaf * r).detach(), r.detach()[:, 0], grad]
    for name, got, single, expected in zip(
        ("y", "rnorm", "dx"), (y, rnorm, dx), results[torch.float32], results[torch.float64]
    ):
        compare(name, got, single.to(got.dtype), expected)


@pytest.mark.parametrize("cols", [64, 16400])
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [64, 16400])
def test_rows_of_zeros_and_of_tiny_and_large_numbers(
    cols: int, dtype: torch.dtype, device: torch.device
) -> None:
    row = torch.randn(cols, device=device)
    for kind, factor in itertools.product(("rms", "layer"), (0.0, 1e-6, 1e3)):
        case = make(kind, (1, cols), dtype, device)
        x = case.x.copy_(factor * row)
        saved = forward(case)
        got = saved | backward(case, saved)
        expected = truth(case.to(torch.float64))
        single = truth(case.to(torch.float32))
        for name in ("y", "dx", "dw"):
            assert got[name].isfinite().all()
            compare(name, got[name], single[name].to(x.dtype), expected[name])


def test_results_do_not_depend_on_what_else_is_in_the_batch(device: torch.device) -> None:
    case = make("layer", (40, 257), torch.float32, device)
    alone = case._replace(x=case.x[7:8], dy=case.dy[7:8])
    for name, result in backward(alone, forward(alone)).items():
        if name in ("dx", "recomputed y"):
            assert torch.equal(result[0], backward(case, forward(case))[name][7])


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
