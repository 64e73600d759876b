"""A feed-forward block of which only the input is saved: values, memory, how it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    Dropout,
    LayerNorm,
    MakeExtraOutput,
    RMSNorm,
    Sequential,
    SwiGLU,
)
from opfuser.errors import ArgumentError
from opfuser.fused.recompute_mlp import FUSION
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.testing import assert_fused, assert_not_fused
from tests.fused.examples import (
    DTYPES,
    F32,
    F64,
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
)

NAME, ASKED = "recompute_mlp", "recompute_mlp_where_asked"
D, F = 6, 8

# With a sum it is for a GPU; the numbers are the same anywhere.
EVERYWHERE = replace(FUSION, name="recompute_mlp_everywhere", refuses=None)


@pytest.fixture(autouse=True)
def _fusions() -> Iterator[None]:
    with opfuser.register_forward_backward_fusion(EVERYWHERE):
        yield


def llama(*, biases: bool = False) -> list[nn.Module]:
    first, second = [Bias(2 * F)] * biases, [Bias(D)] * biases
    linears = [BasicLinear(D, 2 * F), *first, SwiGLU(), BasicLinear(F, D), *second]
    return [MakeExtraOutput(), RMSNorm(D), *linears]


def gpt() -> list[nn.Module]:
    linears = BasicLinear(D, F), Bias(F), GELU(), BasicLinear(F, D), Bias(D)
    return [MakeExtraOutput(), LayerNorm(D), *linears]


def one_weight() -> list[nn.Module]:
    parts = [RMSNorm(D), BasicLinear(D, D), GELU(), BasicLinear(D, D)]
    parts[3].weight = parts[1].weight
    return parts


FORMS: dict[str, Callable[[], list[nn.Module]]] = {
    "llama": llama,
    "llama, biases": lambda: llama(biases=True),
    "gpt": gpt,
    "no tap": lambda: gpt()[1:],
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
CASES = {
    **{name: Case(form, dtypes=DTYPES) for name, form in FORMS.items()},
    "sum": Case(lambda: [AddExtraInput(), *llama()], extras=(D,), dtypes=DTYPES),
    "one weight for both linears": Case(one_weight, (7, D), dtypes=(F64, F32)),
}


@pytest.mark.parametrize("case", CASES)
def test_values(case: str, device: torch.device) -> None:
    if device.type == "cpu" or CASES[case].dtypes == DTYPES:
        check(EVERYWHERE, CASES[case], device)


def make(parts: list[nn.Module]) -> tuple[Sequential, Tensor]:
    """A float64 sequence, and an input that requires grad."""
    return Sequential(*filled(parts)).double(), leaf(5, D, dtype=F64)


@each_form
def test_saves_the_sum_and_statistics_alone(form: Callable[[], list[nn.Module]]) -> None:
    seq, x = make(form())
    statistics = 5 if form().pop(1).__class__ is RMSNorm else 10
    with opfuser.enable(NAME):
        assert elements(saved_by(seq, x)) == x.numel() + statistics
    assert elements(saved_by(seq, x)) >= x.numel() + F * 5


@each_form
@pytest.mark.parametrize(
    ("frozen", "gemms"),
    [([], 5), (["weight 1"], 4), (["weight 2"], 4), (["norm"], 5), (["norm", "weight 1"], 4)],
    ids=str,
)
def test_no_work_for_frozen_parameters(
    frozen: list[str], gemms: int, form: Callable[[], list[nn.Module]]
) -> None:
    seq, x = make(form())
    first, second = (op for op in seq if isinstance(op, BasicLinear))
    norm = next(op for op in seq if isinstance(op, (LayerNorm, RMSNorm)))
    for name, op in (("weight 1", first), ("weight 2", second), ("norm", norm)):
        op.requires_grad_(name not in frozen)
    with opfuser.enable(NAME):
        assert gemms_of_backward(seq, x) == gemms
        got = results(seq, seq.parameters(), x)
    with only():
        assert_same(got, results(seq, seq.parameters(), x))


@each_form
def test_is_off_unless_enabled(form: Callable[[], list[nn.Module]]) -> None:
    seq, x = make(form())
    assert seq.plan(x).record(NAME).status == "disabled"
    assert_not_fused(seq, ASKED, x, code="DISABLED")
    with opfuser.enable(NAME):
        plan = seq.plan(x)
        assert plan.fused("forward") == plan.fused("backward") == {NAME: 1}
        assert plan.record(NAME).matches == (tuple(range(len(seq))),)


@each_form
def test_an_operation_asks_for_it(form: Callable[[], list[nn.Module]]) -> None:
    seq, x = make([*form(), *form()])
    assert_not_fused(seq, ASKED, x)
    last = max(n for n, op in enumerate(seq) if isinstance(op, (GELU, SwiGLU)))
    seq[last].recompute_mlp = True
    assert_fused(seq, x, joint={ASKED: 1})
    assert last in seq.plan(x).record(ASKED).matches[0]
    got = results(seq, seq.parameters(), x)
    with only():
        assert_same(got, results(seq, seq.parameters(), x))


def test_where_it_is_refused() -> None:
    first, *rest = gpt()
    with only(NAME):
        seq, x = make(gpt())
        with torch.no_grad():
            assert_not_fused(seq, NAME, x, code="NO_GRAD")
        seq, x = make([first, *rest[:4], Dropout(0.0), *rest[4:]])
        assert_not_fused(seq, NAME, x)
        # A sum is left to the GEMM before it.
        seq, inputs = Sequential(AddExtraInput(), *llama()), [leaf(5, D), leaf(5, D)]
        assert seq.plan(*inputs).record(NAME).matches == (tuple(range(1, len(seq))),)
        assert [why.partition(":")[0] for _, why in refused(seq, NAME, *inputs)] == ["DEVICE"]
        plan = seq.to("meta").plan(*(t.to("meta") for t in inputs))
        assert plan.record(NAME).matches == (tuple(range(len(seq))),)


def test_a_decoder_asks_for_it() -> None:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 11, "dim": 24, "num_layers": 2, "num_heads": 4}
    model = decoder_lm(DecoderConfig(**sizes, dtype=torch.float64, recompute="mlp"))
    plain = decoder_lm(DecoderConfig(**sizes, dtype=torch.float64))
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(11, (2, 8))
    assert_fused(model, tokens, tokens, joint={ASKED: 2})
    assert_fused(plain, tokens, tokens, joint={ASKED: 0})
    assert elements(saved_by(model, tokens, tokens)) < elements(saved_by(plain, tokens, tokens))
    got, want = (results(m, m.parameters(), tokens, tokens) for m in (model, plain))
    assert_same(got, want)


def test_a_decoder_refuses_other_ways_to_recompute() -> None:
    with pytest.raises(ArgumentError, match=r"recompute must be None or 'mlp'.*recompute='all'"):
        DecoderConfig(vocab_size=1, dim=4, num_layers=1, num_heads=1, recompute="all")
