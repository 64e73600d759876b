"""Rows of experts: where they go, copies of tokens, sums, and the gradients of weighted sums."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from opfuser.kernels.row_map import (
    copy_to_rows,
    sort_by_expert,
    sum_of_rows,
    sum_of_rows_grads,
)
from tests.kernels.accuracy import assert_accurate

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PATTERNS = ("balanced", "skewed", "one", "empty", "none")


def indices(pattern: str, tokens: int, k: int, experts: int) -> Tensor:
    """Different experts of each token, (T, k), int64."""
    scores = torch.rand(0 if pattern == "none" else tokens, experts)
    if pattern == "balanced":
        first = torch.arange(tokens)[:, None] * k
        return (first + torch.arange(k)) % experts
    if pattern == "skewed":
        scores[: tokens // 2, experts // 2] = 2
    elif pattern == "one":  # or k, as they are different
        scores = torch.arange(experts, dtype=FP32).expand(tokens, -1)
    elif pattern == "empty":
        scores[:, : experts - k] = -1  # but not for the last k
    return scores.topk(k).indices


@pytest.mark.parametrize(
    ("pattern", "tokens", "k", "experts"),
    [
        *((pattern, 37, k, 8) for pattern, k in zip(PATTERNS, (1, 2, 3, 5, 8))),
        *((pattern, 301, 8, 128) for pattern in PATTERNS),
        ("skewed", 1, 1, 1),
        ("skewed", 1300, 4, 5),
        ("one", 700, 1, 256),
        ("empty", 67, 6, 60),
    ],
)
def test_rows_are_sorted_by_expert_and_then_by_token(
    pattern: str, tokens: int, k: int, experts: int, device: torch.device
) -> None:
    chosen = indices(pattern, tokens, k, experts)
    row_map, sizes = sort_by_expert(chosen.to(device), experts)
    flat = chosen.flatten().tolist()
    order = sorted(range(len(flat)), key=flat.__getitem__)
    assert row_map.shape == chosen.shape
    assert row_map.flatten()[order].tolist() == list(range(len(flat)))
    assert sizes.tolist() == [flat.count(e) for e in range(experts)]
    assert row_map.dtype == sizes.dtype == torch.int64


def test_indices_in_any_layout_and_of_any_repetition(device: torch.device) -> None:
    chosen = torch.randint(5, (3, 40, 7), device=device)
    want = sort_by_expert(chosen, 5)
    strided = torch.stack([chosen, chosen], -1)[..., 0]
    for other in (chosen.int(), strided, strided.int()):
        assert all(map(torch.equal, sort_by_expert(other, 5), want))


@pytest.mark.kernels
@pytest.mark.parametrize("wrong", [-1, 4, 2**31])
def test_an_index_that_is_no_experts(wrong: int, device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("an assertion on a GPU ends its context")
    chosen = torch.zeros(50, 2, dtype=torch.int64)
    chosen[31, 1] = wrong
    with pytest.raises(
        RuntimeError, match=r"^The experts' indices must be from 0 to 3 \(Permute\)\.$"
    ):
        sort_by_expert(chosen, 4)


def a_map(tokens: int, k: int, device: torch.device) -> Tensor:
    return torch.randperm(tokens * k).view(tokens, k).to(device)


def strided(t: Tensor) -> Tensor:
    """The same rows, further apart."""
    return torch.cat([t, t[:, :3]], 1)[:, : t.shape[1]]


SIZES = [(1, 1, 1), (5, 2, 6), (3, 8, 130), (7, 3, 1200), (9, 6, 33), (130, 1, 8), (2, 12, 64)]
CASES = [*zip(SIZES, itertools.cycle([FP32, BF16, FP16]))]


@pytest.mark.parametrize(("size", "dtype"), CASES, ids=str)
def test_copies(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    tokens, k, cols = size
    row_map = a_map(tokens, k, device)
    x = torch.randn(tokens, cols, device=device).to(dtype)
    token = row_map.flatten().argsort() // k
    for given, weights in itertools.product((x, strided(x)), (None, FP32, dtype)):
        w = None if weights is None else torch.rand(tokens, k, device=device).to(weights)
        rows, of_rows = copy_to_rows(given, row_map.int() if weights is None else row_map, w)
        assert torch.equal(rows, x[token])
        assert (of_rows is None) == (w is None)
        if w is not None and of_rows is not None:
            assert of_rows.dtype == weights
            assert torch.equal(of_rows[row_map], w)


@pytest.mark.parametrize(("size", "dtype"), CASES, ids=str)
def test_sums(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    tokens, k, cols = size
    row_map = a_map(tokens, k, device)
    rows = torch.randn(tokens * k, cols, device=device).to(dtype)
    values = torch.rand(tokens * k, device=device)
    for given, weights in itertools.product((rows, strided(rows)), (None, FP32, dtype)):
        w = None if weights is None else torch.randn(tokens, k, device=device).to(weights)
        y, picked = sum_of_rows(given, row_map, w, values if w is None else None)
        terms = rows[row_map] if w is None else rows[row_map] * w.to(dtype).unsqueeze(-1)
        exact = rows.double()[row_map]
        exact = exact if w is None else exact * w.to(dtype).double().unsqueeze(-1)
        size_of_terms = exact.abs().sum(1).max().item()
        assert_accurate("sums", y, terms.sum(1), exact.sum(1), size=size_of_terms)
        assert y.dtype == dtype
        if w is None:
            assert torch.equal(picked, values[row_map])


def test_sums_are_rounded_once(device: torch.device) -> None:
    """1 and 256 small terms, of which none changes it alone in bf16."""
    rows = torch.full((257, 16), 2.0**-10, dtype=BF16, device=device)
    rows[0] = 1
    y, _ = sum_of_rows(rows, torch.arange(257, device=device).view(1, 257), None, None)
    assert y.eq(1.25).all()


@pytest.mark.parametrize(("size", "dtype"), CASES, ids=str)
def test_gradients_of_weighted_sums(
    size: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    tokens, k, cols = size
    row_map = a_map(tokens, k, device)
    rows = torch.randn(tokens * k, cols, device=device).to(dtype)
    dy = torch.randn(tokens, cols, device=device).to(dtype)
    weights = torch.randn(tokens, k, device=device)

    def by_autograd(kind: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(kind).requires_grad_() for t in (rows, weights.to(dtype))]
        y = (leaves[0][row_map] * leaves[1].unsqueeze(-1)).sum(1)
        return list(torch.autograd.grad(y, leaves, dy.to(kind)))

    exact, plain = by_autograd(torch.float64), by_autograd(dtype)
    for given, wants_rows, wants_weights in itertools.product(
        ((dy, rows), (strided(dy), strided(rows))), (True, False), (True, False)
    ):
        of_weights = given[1] if wants_weights else None
        drows, dw = sum_of_rows_grads(given[0], row_map, weights, of_weights, wants_rows)
        assert (drows is not None, dw is not None) == (wants_rows, wants_weights)
        if drows is not None:
            assert_accurate("rows", drows, plain[0], exact[0])
        if dw is not None:
            assert dw.dtype == FP32
            terms = dy.double().abs().max() * rows.double().abs().max() * cols
            assert_accurate("weights", dw, dw, exact[1], size=terms.item())


def test_no_tokens(device: torch.device) -> None:
    tokens, k, cols = 0, 3, 8
    row_map, weights = a_map(tokens, k, device), torch.rand(tokens, k, device=device)
    x, rows = torch.rand(tokens, cols, device=device), torch.rand(tokens * k, cols, device=device)
    made, of_rows = copy_to_rows(x, row_map, weights)
    assert made.shape == rows.shape
    assert torch.equal(of_rows[row_map], weights)
    y, picked = sum_of_rows(rows, row_map, weights, of_rows)
    assert y.shape == x.shape
    assert torch.equal(picked, weights)
    drows, dw = sum_of_rows_grads(x, row_map, weights, rows, True)
    assert drows.shape == rows.shape
    assert not dw.count_nonzero()
