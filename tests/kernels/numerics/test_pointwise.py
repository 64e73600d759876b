"""Chains of element-wise operations as kernels."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from opfuser.kernels import pointwise_plain as plain
from opfuser.kernels.philox import draw_seed
from opfuser.kernels.pointwise import Chain, dropout
from opfuser.kernels.pointwise_plain import ADD, BIAS, DROPOUT, FUNCTION, KEEP, Link
from tests.kernels.accuracy import assert_accurate
from tests.kernels.chains import (
    ADDED,
    BIASED,
    DROPPED,
    KEPT,
    LAYOUTS,
    SILU,
    SOFTPLUS,
    laid_out,
    operands_of,
    random,
    scale,
)
from tests.kernels.chains import GELU_TANH as GELU

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHAINS: dict[str, list[Link]] = {
    "function": [SILU],
    "two functions": [SILU, GELU],
    "scaled": [scale(0.7), SOFTPLUS, scale(-3.0)],
    "bias and function": [BIASED, GELU],
    "function and bias": [SILU, BIASED],
    "dropout": [DROPPED],
    "dropout and sum": [DROPPED, ADDED],
    "feed-forward's end": [BIASED, DROPPED, ADDED],
    "all": [BIASED, GELU, scale(0.5), DROPPED, ADDED],
    "sum first": [ADDED, KEPT, SILU, BIASED],
    "sum in between": [SILU, ADDED, KEPT, GELU, DROPPED, ADDED],
    "two biases": [BIASED, SILU, BIASED, scale(2.0)],
    "two dropouts": [DROPPED, SILU, Link(DROPOUT, parameters=(0.6,))],
    "nothing to compute": [BIASED, ADDED, BIASED],
}
SOME = [names for n in range(4) for names in itertools.combinations(["x", "bias", "added"], n)]


class Call(NamedTuple):
    chain: Chain
    x: Tensor
    operands: list[Tensor | None]
    dy: Tensor
    dtypes: tuple[torch.dtype, ...]

    def wants(self, *names: str) -> tuple[torch.dtype | bool, ...]:
        dtype = "bias" in names and self.x.dtype
        wanted = {BIAS: dtype, ADD: "added" in names}
        return (*(wanted.get(link.kind, False) for link in self.chain.links), "x" in names)


def call(
    links: Sequence[Link], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Call:
    operands = operands_of(links, shape, dtype, device)
    x, dy = random(shape, dtype, device), random(shape, dtype, device)
    return Call(Chain(links), x, operands, dy, (dtype,) * len(links))


def read(call: Call, kept: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What backward may rely on."""
    out: list[Tensor | None] = []
    for link, reads, operand, keep in zip(call.chain.links, call.chain.reads, call.operands, kept):
        saved = keep if link.kind == KEEP else operand
        out.append(saved if reads else None)
    return out


class Results(NamedTuple):
    y: Tensor
    dx: Tensor | None
    grads: list[Tensor | None]


def run(call: Call, wants: tuple[torch.dtype | bool, ...] | None = None) -> Results:
    wants = wants or call.wants("x", "bias", "added")
    y, kept = call.chain.forward(call.x, call.operands, call.dtypes)
    for link, keep in zip(call.chain.links, kept):
        assert (keep is not None) == (link.kind == KEEP)
    x = call.x if call.chain.reads_x else None
    return Results(y, *call.chain.backward(call.dy, x, read(call, kept), wants, call.dtypes))


def separately(call: Call, dtype: torch.dtype) -> Results:
    """The links one by one in plain torch and that dtype, differentiated by autograd."""
    leaves = [
        t.detach().to(dtype).requires_grad_() if t is not None and t.is_floating_point() else t
        for t in (*call.operands, call.x)
    ]
    z = leaves[-1]
    for link, operand in zip(call.chain.links, leaves):
        if link.kind == FUNCTION:
            z = link.function.reference(z) if not link.linear else z * link.parameters[0]
        elif link.kind == DROPOUT:
            (p,) = link.parameters
            z = z * plain.survivors(call.x, operand, p) * plain.rescale(p)
        elif link.kind != KEEP:
            z = z + operand
    wrt = [t for t in leaves if t is not None and t.is_floating_point()]
    found = iter(torch.autograd.grad(z, wrt, call.dy.to(dtype)))
    grads = [next(found) if t is not None and t.is_floating_point() else None for t in leaves]
    return Results(z.detach(), grads.pop(), grads)


def flat(results: Results) -> list[Tensor]:
    return [t for t in (results.y, results.dx, *results.grads) if t is not None]


def check(call: Call) -> None:
    dtype = call.x.dtype
    got, theirs, exact = run(call), separately(call, dtype), separately(call, torch.float64)
    assert len(flat(got)) == len(flat(exact))
    for n, (ours, other, truth) in enumerate(zip(flat(got), flat(theirs), flat(exact))):
        assert ours.dtype == dtype
        size = truth.abs().max().item() if truth.numel() else 0.0
        assert_accurate(f"result {n}", ours, other, truth, size=max(size, 1 / 16))


# One row, none, no columns; fewer columns than random numbers come at a time; a tile and more.
SHAPES = [(1, 33), (0, 6), (4, 0), (3, 1), (2, 3, 16), (1,), (19,), (37, 130), (37, 130)]
FEW = ["two biases", "sum in between", "all"]
DTYPES = [FP32, BF16, FP16]
VALUES = [
    *zip(CHAINS, itertools.repeat((5, 7)), itertools.cycle(DTYPES)),
    *zip(itertools.cycle(FEW), SHAPES, itertools.cycle([FP32, FP32, FP16, BF16])),
    *(("all", (5, 7), dtype) for dtype in DTYPES),
    ("function", (), FP32),
]


@pytest.mark.parametrize(("name", "shape", "dtype"), VALUES, ids=str)
def test_values_and_gradients(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    check(call(CHAINS[name], shape, dtype, device))


@pytest.mark.parametrize("how", LAYOUTS)
def test_layouts(how: str, device: torch.device) -> None:
    made = call(CHAINS["all"], (6, 5), FP32, device)
    x, dy, *operands = laid_out(how, [made.x, made.dy, *made.operands])
    check(made._replace(x=x, dy=dy, operands=operands))


def test_many_rows_are_summed_in_slices(device: torch.device) -> None:
    made = call([BIASED, SILU, BIASED], (700, 9), FP32, device)
    got, exact = run(made), separately(made, torch.float64)
    for at, terms in ((0, exact.dx), (2, made.dy.double())):
        # Held to the size of the terms: what is left of their sum says nothing of rounding.
        allowed = torch.finfo(FP32).eps * terms.abs().sum(0)
        sums, truth = got.grads[at], exact.grads[at]
        assert ((sums.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("name", ["all", "sum in between", "two biases", "nothing to compute"])
def test_only_what_is_wanted(name: str, device: torch.device) -> None:
    made = call(CHAINS[name], (4, 6), FP32, device)
    whole = run(made)
    for names in SOME:
        part = run(made, made.wants(*names))
        for wanted, ours, want in zip(
            made.wants(*names), (*part.grads, part.dx), (*whole.grads, whole.dx)
        ):
            assert (ours is None) != bool(wanted), names
            assert ours is None or torch.equal(ours, want), names


def test_gradients_between_which_nothing_changes_are_one_tensor(device: torch.device) -> None:
    made = call([ADDED, DROPPED, ADDED, BIASED, ADDED], (4, 6), FP32, device)
    got = run(made)
    assert got.grads[2] is got.grads[4] is made.dy
    assert got.grads[0] is got.dx is not made.dy


def test_gradients_of_biases_have_memory_of_their_own(device: torch.device) -> None:
    made = call([BIASED, BIASED], (1, 6), FP32, device)
    got = run(made)
    storages = {t.untyped_storage().data_ptr() for t in (*got.grads, made.dy) if t is not None}
    assert len(storages) == 3
    assert got.dx is made.dy


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_in_another_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Rounded to the dtypes that are asked for, at the end and where something is kept."""
    made = call([SILU, ADDED, KEPT, GELU], (5, 7), dtype, device)
    made = made._replace(dtypes=(dtype, FP32, FP32, FP32), dy=made.dy.float())
    made.operands[1] = torch.randn(5, 7, device=device)
    y, kept = made.chain.forward(made.x, made.operands, made.dtypes)
    exact = separately(made, torch.float64)
    dx, grads = made.chain.backward(
        made.dy, made.x, read(made, kept), made.wants("x", "added"), made.dtypes
    )
    assert (y.dtype, kept[2].dtype, grads[1].dtype, dx.dtype) == (FP32, FP32, FP32, dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact.y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[1].double(), exact.grads[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.double(), exact.dx, rtol=2 * eps, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*zip([(5, 7), *SHAPES[1:], ()], itertools.cycle([FP32, torch.float64]))],
    ids=str,
)
def test_plain_torch_draws_the_same_numbers(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.rand(shape, dtype=dtype, device=device) + 1
    seed = draw_seed(x)
    y = dropout(x, seed, 0.4)
    assert torch.equal(y != 0, plain.survivors(x, seed, 0.4))
    torch.testing.assert_close(y, torch.where(y != 0, x / 0.6, 0.0))


def test_tiles_of_any_size_see_the_same_numbers(device: torch.device) -> None:
    x = torch.ones(20, 530, device=device)
    seed = draw_seed(x)
    mask = dropout(x, seed, 0.5) != 0
    made = call([DROPPED, BIASED], (20, 530), FP32, device)
    chain = Chain([Link(DROPOUT, parameters=(0.5,)), BIASED])
    dx, _ = chain.backward(x, None, [seed, made.operands[1]], (False, x.dtype, True), made.dtypes)
    assert torch.equal(dx != 0, mask)
    assert torch.equal(dropout(x[:, :8].contiguous(), seed, 0.5) != 0, mask[:, :8])
    assert torch.equal(dropout(x[:9, 0:2].half(), seed, 0.5) != 0, mask[:9, :2])


def test_random_numbers_are_fair_and_unrelated(device: torch.device) -> None:
    x = torch.ones(256, 256, dtype=FP16, device=device)
    masks = [dropout(x, torch.tensor([s], device=device), 0.25) == 0 for s in (1, 2, 2**40, -1)]
    n = x.numel()
    for mask in masks:
        assert abs(mask.double().mean().item() - 0.25) < 5 * (0.1875 / n) ** 0.5
        for dim, groups in itertools.product((0, 1), (2, 4, 32)):
            others = (0, 2) if dim == 0 else (0, 1)
            shares = mask.double().unflatten(dim, (-1, groups)).mean(others)
            assert (shares - 0.25).abs().max() < 6 * (0.1875 * groups / n) ** 0.5
    for one, other in itertools.combinations(masks, 2):
        share = (one & other).double().mean().item()
        assert abs(share - 0.0625) < 5 * (0.0625 / n) ** 0.5
    for mask, shift in itertools.product(masks, [(0, 1), (1, 0), (0, 4)]):
        share = (mask & mask.roll(shift, (0, 1))).double().mean().item()
        assert abs(share - 0.0625) < 5 * (0.0625 / n) ** 0.5


@pytest.mark.parametrize("p", [0.0, 1e-12, 0.999999, 1.0])
def test_probabilities_at_the_ends(p: float, device: torch.device) -> None:
    x = torch.ones(8, 40, device=device)
    y = dropout(x, draw_seed(x), p)
    kept = 1 / (1 - p) if p < 0.5 else 0.0
    torch.testing.assert_close(y, torch.full_like(y, kept))


FUNCTION_OF_A_USER = """
import triton
import triton.language as tl


@triton.jit
def cubed(x, P: tl.constexpr):
    return P[0] * x * x * x + P[1], 3 * P[0] * x * x
"""


@pytest.mark.kernels
@pytest.mark.parametrize("by_name", [True, False])
def test_function_of_another_module(
    by_name: bool, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"cubed_{by_name}_device"
    (tmp_path / f"{name}.py").write_text(FUNCTION_OF_A_USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop(name, None)
    function = f"{name}:cubed" if by_name else __import__(name).cubed
    assert (name in sys.modules) != by_name
    link = Link(FUNCTION, function, (0.5, 2.0), None, linear=False)
    made = call([link, BIASED], (5, 7), FP32, device)
    got = run(made)
    torch.testing.assert_close(got.y, made.x**3 / 2 + 2 + made.operands[1])
    torch.testing.assert_close(got.dx, made.dy * 1.5 * made.x**2)
