"""Norm and linear in one joint fusion: values, what is saved, which work is left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import (
    AddExtraInput,
    BasicLinear,
    Bias,
    LayerNorm,
    MakeExtraOutput,
    RMSNorm,
    Sequential,
)
from opfuser.fused.norm_linear import FUSION
from opfuser.testing import assert_not_fused
from tests.fused.examples import (
    BF16,
    DTYPES,
    F32,
    F64,
    FP16,
    Case,
    assert_same,
    check,
    elements,
    filled,
    gemms_of_backward,
    leaf,
    only,
    refused,
    results,
    saved_by,
    without_bias,
)

NAME = "norm_linear"
NORMS: dict[str, Any] = {"rms": RMSNorm, "layer": LayerNorm}
each_norm = pytest.mark.parametrize("kind", NORMS)

# With a sum it is for a GPU; the numbers are the same anywhere.
EVERYWHERE = replace(FUSION, name="norm_linear_everywhere", refuses=None, enabled=False)

# Which of the optional operations are there: sum, tap, bias.
FORMS = {"plain": "", "bias": "b", "tap": "t", "sum, tap": "st", "all": "stb", "sum, bias": "sb"}


@pytest.fixture(autouse=True)
def _fusion() -> Iterator[None]:
    with opfuser.register_forward_backward_fusion(EVERYWHERE):
        yield


def ops(norm: Any, form: str = "tb", shape: Any = 6, **kwargs: Any) -> list[nn.Module]:
    before = [AddExtraInput()] * ("s" in form) + [MakeExtraOutput()] * ("t" in form)
    return [*before, norm(shape, **kwargs), BasicLinear(6, 4), *[Bias(4)] * ("b" in form)]


def shared(norm: Any) -> list[nn.Module]:
    """The norm of the second with the linear of the first; and both have one weight."""
    first, second = ([norm(6), BasicLinear(6, 6), Bias(6)] for _ in range(2))
    second[1].weight = first[1].weight
    return [*first, *second, second[0], first[1]]


CASES: dict[str, Any] = {
    **{
        name: lambda n, form=form: Case(
            lambda: ops(n, form), extras=(6,) * ("s" in form), dtypes=DTYPES
        )
        for name, form in FORMS.items()
    },
    "zero-centered": lambda n: Case(
        lambda: ops(n, zero_centered_gamma=True), (7, 6), dtypes=(F32, FP16)
    ),
    "eps": lambda n: Case(lambda: ops(n, eps=0.1), (7, 6), dtypes=(F64, BF16)),
    "several dimensions": lambda n: Case(lambda: ops(n, shape=(3, 6)), dtypes=(F32, BF16)),
    "the same operations again": lambda n: Case(lambda: shared(n), (33, 6), times=3),
}


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *zip(CASES, itertools.cycle(NORMS)),
        *((case, "layer") for case in ("all", "zero-centered", "several dimensions")),
    ],
)
def test_values(case: str, kind: str, device: torch.device) -> None:
    if device.type == "cpu" or case in FORMS:
        check(EVERYWHERE, CASES[case](NORMS[kind]), device)


def test_values_without_the_bias_of_the_norm() -> None:
    linear = [BasicLinear(6, 4), Bias(4)]
    check(NAME, Case(lambda: [without_bias(LayerNorm(6)), *linear], (7, 6), dtypes=(F32, BF16)))


def make(kind: str, form: str = "tb") -> tuple[Sequential, list[Tensor]]:
    """A float64 sequence, and inputs that require grad."""
    inputs = [leaf(3, 6, dtype=F64) for _ in range(1 + ("s" in form))]
    return Sequential(*filled(ops(NORMS[kind], form))).double(), inputs


@each_norm
def test_saves_the_sum_and_statistics_alone(kind: str) -> None:
    statistics = 3 if kind == "rms" else 6
    for form, name in (("tb", NAME), ("stb", EVERYWHERE.name)):
        seq, inputs = make(kind, form)
        with only(name):
            assert elements(saved_by(seq, *inputs)) == 18 + statistics
        with only():
            assert elements(saved_by(seq, *inputs)) == 2 * 18 + statistics


@each_norm
@pytest.mark.parametrize(
    ("frozen", "gemms"),
    [
        ([], 2),
        (["2.weight"], 1),
        (["1.weight", "1.bias"], 2),
        (["2.weight", "3.bias"], 1),
        (["1.weight", "1.bias", "2.weight", "3.bias"], 1),
    ],
    ids=str,
)
def test_no_work_for_frozen_parameters(frozen: list[str], gemms: int, kind: str) -> None:
    seq, inputs = make(kind)
    for name, p in seq.named_parameters():
        p.requires_grad_(name not in frozen)
    assert gemms_of_backward(seq, *inputs) == gemms
    got = results(seq, seq.parameters(), *inputs)
    with only():
        assert_same(got, results(seq, seq.parameters(), *inputs))


def test_where_it_is_refused() -> None:
    seq, inputs = make("rms")
    with torch.no_grad():
        assert_not_fused(seq, NAME, *inputs, code="NO_GRAD")
    # Where the input has no gradient, residual and tap owe none: the fusion starts at the norm.
    assert seq.plan(inputs[0].detach()).record(NAME).matches == ((1, 2, 3),)


def test_a_sum_is_left_to_the_gemm_before_it_on_a_cpu() -> None:
    seq, inputs = make("rms", "stb")
    assert seq.plan(*inputs).record(NAME).matches == ((1, 2, 3, 4),)
    assert refused(seq, NAME, *inputs) == [
        (0, "DEVICE: on a CPU the GEMM before it adds the residual, not the norm")
    ]
    plan = seq.to("meta").plan(*(t.to("meta") for t in inputs))
    assert plan.record(NAME).matches == ((0, 1, 2, 3, 4),)
