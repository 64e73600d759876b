"""Sum and norm in forward, residual gradient and norm in backward: RMSNorm and LayerNorm."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from opfuser import (
    AddExtraInput,
    BasicLinear,
    ConstantScale,
    Identity,
    LayerNorm,
    MakeExtraOutput,
    Residual,
    RMSNorm,
    Sequential,
)
from opfuser.testing import assert_fused, assert_not_fused
from tests.fused.examples import (
    BF16,
    F32,
    F64,
    FP16,
    Case,
    assert_same,
    check,
    filled,
    leaf,
    only,
    results,
)

NORMS: dict[str, Any] = {"rms": RMSNorm, "layer": LayerNorm}
each_norm = pytest.mark.parametrize("kind", NORMS)


def pre_norm(norm: Any, shape: Any = 6, **kwargs: Any) -> list[nn.Module]:
    """The sum goes on as residual stream."""
    return [AddExtraInput(), MakeExtraOutput(), norm(shape, **kwargs)]


def start(norm: Any, **kwargs: Any) -> list[nn.Module]:
    return [MakeExtraOutput(**kwargs), norm(6)]


def several(norm: Any) -> list[nn.Module]:
    """Three sums; on a CPU the second one is the linear operation's."""
    linear = [BasicLinear(6, 4), AddExtraInput(), MakeExtraOutput(), norm(4)]
    return [ConstantScale(2.0), *pre_norm(norm), *linear, AddExtraInput(), norm(4)]


FORWARD: dict[str, Any] = {
    "post-norm": lambda n: Case(
        lambda: [AddExtraInput(), n(6)], (7, 6), (6,), dtypes=(F32, BF16, FP16)
    ),
    "several": lambda n: Case(lambda: several(n), (33, 6), (6, 4, 4), dtypes=(F32, BF16), times=3),
    "zero-centered": lambda n: Case(lambda: pre_norm(n, zero_centered_gamma=True), extras=(6,)),
    "eps": lambda n: Case(lambda: pre_norm(n, eps=0.1), extras=(6,)),
    "several dimensions": lambda n: Case(lambda: pre_norm(n, (3, 6)), extras=(6,)),
}
BACKWARD: dict[str, Any] = {
    "in place": lambda n: Case(lambda: start(n, in_place=True), dtypes=(F32, BF16)),
    "several": lambda n: Case(lambda: several(n), (33, 6), (6, 4, 4), dtypes=(F32, BF16), times=2),
}


@pytest.mark.parametrize(
    ("case", "kind"), [*zip(FORWARD, itertools.cycle(NORMS)), ("several", "rms"), ("eps", "rms")]
)
def test_values_of_a_forward(case: str, kind: str) -> None:
    check(f"forward_add_{kind}_norm", FORWARD[case](NORMS[kind]))


@pytest.mark.parametrize(
    ("case", "kind"), [*zip(BACKWARD, itertools.cycle(NORMS)), ("several", "rms")]
)
def test_values_of_a_backward(case: str, kind: str) -> None:
    check(f"backward_add_{kind}_norm", BACKWARD[case](NORMS[kind]))


@each_norm
def test_an_input_without_gradient_needs_no_sum(kind: str) -> None:
    seq = Sequential(*start(NORMS[kind]))
    assert_not_fused(seq, f"backward_add_{kind}_norm", torch.randn(3, 6), code="NO_GRAD")


@each_norm
def test_autocast_does_not_round_the_residual_gradient(kind: str) -> None:
    seq, x, g = Sequential(*filled(start(NORMS[kind]))), leaf(3, 6), torch.randn(3, 6)
    with torch.autocast("cpu", BF16):
        y, residual = seq(x)
    assert y.dtype == BF16
    (dx,) = torch.autograd.grad([y, residual], x, [torch.zeros_like(y), g])
    assert torch.equal(dx, g)


@each_norm
def test_a_residual_inside_the_sequence(kind: str) -> None:
    norm = NORMS[kind]
    seq = Sequential(
        Residual(norm(6), BasicLinear(6, 6), ConstantScale(0.5)),
        Residual(norm(6), Identity()),
        norm(6),
    ).double()
    filled(list(seq))
    x = leaf(3, 6, dtype=F64)
    forward, backward = f"forward_add_{kind}_norm", f"backward_add_{kind}_norm"
    with only(forward, backward, "forward_linear_scale_add", "backward_linear_scale"):
        assert_fused(
            seq,
            x,
            forward={"forward_linear_scale_add": 1, forward: 1},
            backward={backward: 2, "backward_linear_scale": 1},
        )
        got = results(seq, seq.parameters(), x)
    with only():
        assert_same(got, results(seq, seq.parameters(), x))
