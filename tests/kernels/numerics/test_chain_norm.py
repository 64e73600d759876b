"""The norm of what a chain makes, in one kernel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from opfuser.kernels import norm_launch
from opfuser.kernels import pointwise_plain as plain
from opfuser.kernels.launch import recorded
from opfuser.kernels.pointwise import Chain, Normed, dropout
from opfuser.kernels.pointwise_plain import DROPOUT, KEEP, Link
from tests.kernels.chains import (
    ADDED,
    BIASED,
    DROPPED,
    KEPT,
    LAYOUTS,
    SIGMOID,
    SILU,
    laid_out,
    operands_of,
    random,
    scale,
)
from tests.kernels.norms import EPS, Case, compare, truth

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF = scale(0.5)
pytestmark = pytest.mark.kernels
CHAINS: dict[str, list[Link]] = {
    "function": [SIGMOID],
    "dropout": [DROPPED],
    "sum": [ADDED],
    "feed-forward's end": [BIASED, DROPPED, ADDED],
    "all": [BIASED, SILU, HALF, DROPPED, ADDED],
    "sum in between": [SILU, ADDED, KEPT, SIGMOID, DROPPED, ADDED],
    "as many operands as there may be": [ADDED, BIASED, DROPPED, ADDED, KEPT, SILU, ADDED, BIASED],
}


class Call(NamedTuple):
    links: list[Link]
    x: Tensor
    operands: list[Tensor | None]
    weight: Tensor
    bias: Tensor | None
    dtypes: tuple[torch.dtype, ...]
    centered: bool = False

    def try_to_run(self, want_total: bool = True) -> Normed | None:
        return Chain(self.links).forward_norm(
            self.x, self.operands, self.dtypes, self.weight, self.bias, EPS, self.centered,
            with_mean=self.bias is not None, want_total=want_total,
        )  # fmt: skip

    def run(self, want_total: bool = True) -> Normed:
        done = self.try_to_run(want_total)
        assert done is not None
        return done


def call(
    links: list[Link],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    layer: bool = True,
    parameters: torch.dtype | None = None,
    centered: bool = False,
) -> Call:
    operands = operands_of(links, shape, dtype, device)
    weight, bias = random((2, shape[-1]), parameters or dtype, device)
    dtypes = (dtype,) * len(links)
    x = random(shape, dtype, device)
    return Call(links, x, operands, weight, bias if layer else None, dtypes, centered)


def total_in(call: Call, dtype: torch.dtype) -> Tensor:
    """What the links make in plain torch and that dtype."""
    operands = [
        t if t is None or link.kind == DROPOUT else t.to(dtype)
        for link, t in zip(call.links, call.operands)
    ]
    y, _ = plain.forward(call.links, call.x.to(dtype), operands, (dtype,) * len(call.links))
    return y


def check(call: Call) -> None:
    """The sum against the links one by one, and the norm of the sum as it was rounded."""
    with recorded() as launches:
        call.run()
    assert [noted.launch.name for noted in launches] == ["norm:chain_norm_forward"]
    y, total, mean, rstd, kept = call.run()
    dtype = call.dtypes[-1]
    assert (y.shape, y.dtype, y.is_contiguous()) == (call.x.shape, dtype, True)
    assert (rstd.shape, rstd.dtype) == (call.x.shape[:-1], FP32)
    compare("total", total, total_in(call, dtype), total_in(call, torch.float64))
    assert [keep is not None for keep in kept] == [link.kind == KEEP for link in call.links]
    cols = call.x.shape[-1]
    rows = total.reshape(-1, cols)
    case = Case(
        call.bias is not None, call.centered, rows, None, call.weight, call.bias, rows, None
    )
    exact, single = truth(case.to(torch.float64)), truth(case.to(FP32), torchs=True)
    got = {"y": y.reshape(-1, cols), "rstd": rstd.reshape(-1)}
    if mean is not None:
        got["mean"] = mean.reshape(-1)
    assert (mean is not None) == (call.bias is not None)
    for name, result in got.items():
        compare(name, result, single[name].to(result.dtype), exact[name])


# One row per program, several, and many; odd sizes, fewer columns than random numbers come at a
# time, and the longest rows in half precision, which are the last but one.
SHAPES = [(5, 37), (7, 33), (1, 5), (65, 64), (5, 257), (3, 1), (2, 3, 12), (9,), (4, 2048)]
# Each chain with and without a mean; shapes and dtypes in turn.
VALUES = [
    *zip(
        itertools.chain(CHAINS, CHAINS),
        [True, False] * 7,
        itertools.cycle((BF16, FP16, FP32)),
        itertools.cycle(SHAPES),
    ),
    ("function", True, BF16, (1, 16383)),
]


@pytest.mark.parametrize(("name", "layer", "dtype", "shape"), VALUES, ids=str)
def test_values(
    name: str, layer: bool, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    check(call(CHAINS[name], shape, dtype, device, layer=layer))


@pytest.mark.parametrize("shape", [(0, 33), (2, 0, 6)], ids=str)
def test_no_rows(shape: tuple[int, ...], device: torch.device) -> None:
    y, total, mean, rstd, kept = call(CHAINS["sum in between"], shape, FP32, device).run()
    assert y.shape == total.shape == kept[2].shape == shape
    assert rstd.shape == mean.shape == shape[:-1]


@pytest.mark.parametrize("how", LAYOUTS)
def test_layouts(how: str, device: torch.device) -> None:
    made = call(CHAINS["all"], (6, 5), FP32, device)
    x, weight, *operands = laid_out(how, [made.x, made.weight, *made.operands])
    check(made._replace(x=x, operands=operands, weight=weight))


@pytest.mark.parametrize("parameters", [FP32, BF16, torch.float64], ids=str)
def test_parameters_of_another_dtype(parameters: torch.dtype, device: torch.device) -> None:
    links = CHAINS["feed-forward's end"]
    check(call(links, (5, 40), FP16, device, parameters=parameters, centered=True))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_sum_in_another_dtype(dtype: torch.dtype, device: torch.device) -> None:
    made = call([DROPPED, ADDED, KEPT, SILU], (5, 40), dtype, device)
    made.operands[1] = torch.randn(5, 40, device=device)
    made = made._replace(dtypes=(dtype, FP32, FP32, FP32))
    check(made)
    assert {t.dtype for t in (made.run().y, made.run().kept[2])} == {FP32}


@pytest.mark.parametrize(("layer", "dtype"), [(True, BF16), (False, FP16)], ids=str)
def test_a_sum_that_is_not_wanted(layer: bool, dtype: torch.dtype, device: torch.device) -> None:
    """What is not written is rounded all the same."""
    made = call(CHAINS["all"], (5, 40), dtype, device, layer=layer)
    with recorded() as noted:
        assert made.run(want_total=False).total is None
    assert noted[0].tensors[4] is None
    for ours, theirs in zip(made.run(want_total=False), made.run()):
        if isinstance(ours, Tensor):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((20, 530), FP32), ((5, 7), FP16), ((3, 2), BF16), ((2, 8192), BF16), ((2, 8192), FP32)],
    ids=str,
)
def test_the_mask_is_that_of_the_chain_alone_and_of_backward(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    made = call([DROPPED, HALF], shape, dtype, device)
    made = made._replace(x=torch.ones_like(made.x))
    seed = made.operands[0]
    mask = dropout(made.x, seed, 0.3) != 0
    assert 0.5 < mask.double().mean().item() <= 1 or mask.numel() < 100
    total = made.run().total
    assert torch.equal(total != 0, mask)
    wants = (False, False, True)
    dx, _ = Chain(made.links).backward(made.x, None, made.operands, wants, made.dtypes)
    assert torch.equal(dx != 0, mask)


@pytest.mark.parametrize("want_total", [True, False])
def test_where_there_is_no_such_kernel(want_total: bool, device: torch.device) -> None:
    """Long rows, other dtypes, a bias that was cleared, and nothing to do."""
    half = norm_launch.MAX_CHAIN_ROW // 2
    fine = call([ADDED], (1, half), FP16, device)
    made = [
        call([ADDED], (1, half + 1), FP16, device),
        call([ADDED], (1, half // 2 + 1), FP32, device),
        call([ADDED], (2, 0), FP32, device),
        call([ADDED], (2, 6), torch.float64, device),
        call([], (2, 6), FP32, device),
        call([BIASED, SILU], (2, 6), FP32, device)._replace(operands=[None, None]),
        fine._replace(dtypes=(FP32,)),
        fine._replace(operands=[torch.zeros_like(fine.x, dtype=torch.float64)]),
    ]
    fine.run(want_total)
    for refused in made:
        with recorded() as launches:
            assert refused.try_to_run(want_total) is None
        assert not launches
