"""A feed-forward block of which only the input is saved: numbers, memory, how it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, Bias, Dropout, MakeExtraOutput, Sequential
from opfuser.basic.activation import GELU
from opfuser.basic.gated_activation import SwiGLU
from opfuser.basic.layer_norm import LayerNorm
from opfuser.basic.rms_norm import RMSNorm
from opfuser.errors import ArgumentError, InputError
from opfuser.fused.recompute_mlp import FUSION, RecomputeMLP
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.testing import check_fusion
from tests.fused.examples import filled
from tests.fused.joint import (
    Counting,
    assert_same,
    elements,
    gradients,
    only,
    saved_by,
)
from tests.fused.pairings import DTYPES, refusal_codes, what, with_subclass
from tests.fused.sharded import sharded

NAME = "recompute_mlp"
ASKED = "recompute_mlp_where_asked"
D, F = 6, 8

# With a sum it is for a GPU; the numbers are the same anywhere.
EVERYWHERE = replace(FUSION, name="recompute_mlp_everywhere", refuses=None)


@pytest.fixture(autouse=True)
def _fusions() -> Iterator[None]:
    with opfuser.register_forward_backward_fusion(EVERYWHERE):
        yield


def llama(*, biases: bool = False, residual: bool = False) -> list[nn.Module]:
    return filled(
        [
            *([AddExtraInput()] if residual else []),
            MakeExtraOutput(),
            RMSNorm(D),
            BasicLinear(D, 2 * F),
            *([Bias(2 * F)] if biases else []),
            SwiGLU(),
            BasicLinear(F, D),
            *([Bias(D)] if biases else []),
        ]
    )


def gpt() -> list[nn.Module]:
    linears = BasicLinear(D, F), Bias(F), GELU(), BasicLinear(F, D), Bias(D)
    return filled([MakeExtraOutput(), LayerNorm(D), *linears])


FORMS: dict[str, Any] = {
    "llama": llama,
    "llama, biases": lambda: llama(biases=True),
    "gpt": gpt,
    "no tap": lambda: gpt()[1:],
}
WITH_SUM = {"sum": lambda: llama(residual=True)}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def tensors(parts: list[nn.Module], *rows: int) -> list[Tensor]:
    return [torch.randn(*rows, D) for _ in range(1 + isinstance(parts[0], AddExtraInput))]


def make(parts: list[nn.Module]) -> tuple[Sequential, list[Tensor]]:
    """A float64 sequence, and inputs that require grad."""
    inputs = [t.double().requires_grad_() for t in tensors(parts, 5)]
    return Sequential(*parts).double(), inputs


@pytest.mark.parametrize("form", {**FORMS, **WITH_SUM}.values(), ids=[*FORMS, *WITH_SUM])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers(dtype: torch.dtype, form: Any, device: torch.device) -> None:
    parts = [op.to(device) for op in form()]
    inputs = [t.to(device) for t in tensors(parts, 3, 5)]
    check_fusion(EVERYWHERE, parts, *inputs, dtypes=[dtype], zero_rows=True)


@each_form
@pytest.mark.parametrize("rows", [(), (1,), (2, 3, 2)], ids=str)
def test_rows(rows: tuple[int, ...], form: Any) -> None:
    parts = form()
    check_fusion(NAME, parts, *tensors(parts, *rows), dtypes=[torch.float32, torch.bfloat16])


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype, form: Any) -> None:
    parts = form()
    with torch.autocast("cpu", torch.bfloat16):
        check_fusion(NAME, parts, *(t.to(dtype) for t in tensors(parts, 7)))


@each_form
def test_saves_the_sum_and_statistics_alone(form: Any) -> None:
    seq, inputs = make(form())
    size = inputs[0].numel()
    with opfuser.enable(NAME):
        assert size <= elements(saved_by(seq, *inputs)) <= size + 2 * 5
    assert elements(saved_by(seq, *inputs)) >= size + F * 5


def test_a_sum_is_left_to_the_gemm_before_it_on_a_cpu() -> None:
    seq, inputs = make(WITH_SUM["sum"]())
    with opfuser.enable(NAME):
        record = seq.plan(*inputs).record(NAME)
        assert record.matches == (tuple(range(1, len(seq))),)
        assert [(at, why.code) for at, why in record.refusals] == [(0, "DEVICE")]
        plan = seq.to("meta").plan(*(t.to("meta") for t in inputs))
        assert plan.record(NAME).matches == (tuple(range(len(seq))),)


@each_form
def test_is_off_unless_enabled(form: Any) -> None:
    seq, inputs = make(form())
    assert seq.plan(*inputs).record(NAME).status == "disabled"
    assert {*refusal_codes(seq.plan(*inputs), ASKED)} == {"DISABLED"}
    with opfuser.enable(NAME):
        plan = seq.plan(*inputs)
        assert plan.fused("forward") == plan.fused("backward") == {NAME: 1}
        assert plan.record(NAME).matches == (tuple(range(len(seq))),)
        with torch.no_grad():
            assert {*refusal_codes(seq.plan(*inputs), NAME)} == {"NO_GRAD"}


@each_form
def test_an_operation_asks_for_it(form: Any) -> None:
    seq, inputs = make([*form(), *form()])
    inputs += [torch.randn_like(inputs[0])] * (seq.num_extra_inputs + 1 - len(inputs))
    before = seq.plan(*inputs)
    last = max(n for n, op in enumerate(seq) if isinstance(op, (GELU, SwiGLU)))
    seq[last].recompute_mlp = True
    plan = seq.plan(*inputs)
    assert ASKED not in before.fused("forward")
    assert plan.fused("forward")[ASKED] == plan.fused("backward")[ASKED] == 1
    assert last in plan.record(ASKED).matches[0]
    got = gradients(seq, seq, inputs)
    with only():
        assert_same(got, gradients(seq, seq, inputs))


@each_form
@pytest.mark.parametrize(
    ("frozen", "gemms"),
    [([], 5), (["weight 1"], 4), (["weight 2"], 4), (["norm"], 5), (["norm", "weight 1"], 4)],
    ids=str,
)
def test_no_work_for_frozen_parameters(frozen: list[str], gemms: int, form: Any) -> None:
    seq, inputs = make(form())
    first, second = (op for op in seq if isinstance(op, BasicLinear))
    norm = next(op for op in seq if isinstance(op, (LayerNorm, RMSNorm)))
    for name, op in (("weight 1", first), ("weight 2", second), ("norm", norm)):
        op.requires_grad_(name not in frozen)
    with opfuser.enable(NAME):
        outputs = seq(*inputs)
        with Counting() as counting:
            sum(y.sum() for y in (outputs if isinstance(outputs, tuple) else [outputs])).backward()
        assert counting.gemms == gemms
        got = gradients(seq, seq, inputs)
    with only():
        assert_same(got, gradients(seq, seq, inputs))


@each_form
def test_several_backwards_of_one_forward(form: Any, device: torch.device) -> None:
    parts = form()
    seq = Sequential(*parts).to(device)
    inputs = [t.to(device).requires_grad_() for t in tensors(parts, 5)]
    with opfuser.enable(NAME):
        outputs = seq(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wrt, douts = [*inputs, *seq.parameters()], [torch.randn_like(y) for y in outputs]
    first = torch.autograd.grad(outputs, wrt, douts, retain_graph=True)
    second = torch.autograd.grad(outputs, wrt, douts)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


@each_form
def test_main_grad(form: Any) -> None:
    parts = form()
    linears = [n for n, op in enumerate(parts) if isinstance(op, BasicLinear)]
    for n in linears:
        sizes = parts[n].in_features, parts[n].out_features
        parts[n] = BasicLinear(*sizes, accumulate_into_main_grad=True)
    seq, inputs = make(parts)
    buffers: dict[bool, list[Tensor]] = {}
    for fused in (True, False):
        for n in linears:
            parts[n].weight.main_grad = torch.full_like(parts[n].weight, 2.0)
        with only(*[NAME] * fused):
            outputs = seq(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward([y.square().sum() for y in outputs])
        buffers[fused] = [parts[n].weight.main_grad for n in linears]
    assert_same(buffers[True], buffers[False])
    assert all((buffer - 2.0).abs().max() > 0.01 for buffer in buffers[True])


def test_one_weight_for_both_linears() -> None:
    parts = filled([RMSNorm(D), BasicLinear(D, D), GELU(), BasicLinear(D, D)])
    parts[3].weight = parts[1].weight
    seq, inputs = make(parts)
    with opfuser.enable(NAME):
        got = gradients(seq, seq, inputs)
    with only():
        assert_same(got, gradients(seq, seq, inputs))


@each_form
def test_parameters_replaced_between_forward_and_backward(form: Any) -> None:
    seq, inputs = make(form())
    with opfuser.enable(NAME):
        want = gradients(seq, seq, inputs)
        outputs = seq(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator, wrt = torch.Generator().manual_seed(7), [*inputs, *seq.parameters()]
    douts = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs]
    for op in seq:
        for name, p in list(op.named_parameters()):
            setattr(op, name, nn.Parameter(torch.zeros_like(p)))
    assert_same(torch.autograd.grad(outputs, wrt, douts), want)


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["llama, biases", "gpt"])
def test_compiles_into_one_graph(name: str) -> None:
    torch.compiler.reset()
    seq, inputs = make(FORMS[name]())
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    with opfuser.enable(NAME):
        assert_same(gradients(compiled, seq, inputs), gradients(seq, seq, inputs))


@pytest.mark.parametrize("which", [0, 1])
def test_refuses_what_communicates(which: int) -> None:
    parts = gpt()
    linears = [op for op in parts if isinstance(op, BasicLinear)]
    sharded(linears[which], "column")
    with opfuser.enable(NAME):
        plan = Sequential(*parts).plan(torch.randn(3, D, requires_grad=True))
    assert {*refusal_codes(plan, NAME)} == {"COMMUNICATION"}


@pytest.mark.parametrize(("at", "matches"), [(0, 1), (1, 0), (2, 0), (4, 0), (5, 0), (6, 1)])
def test_a_subclass_is_not_matched(at: int, matches: int) -> None:
    seq = Sequential(*with_subclass(gpt(), at))
    with opfuser.enable(NAME):
        plan = seq.plan(torch.randn(3, D, requires_grad=True))
    assert len(plan.record(NAME).matches) == matches


def test_other_operations_in_between_are_left_to_other_fusions() -> None:
    parts = gpt()
    seq, inputs = make([*parts[:5], Dropout(0.0), *parts[5:]])
    with opfuser.enable(NAME):
        assert NAME not in seq.plan(*inputs).fused("forward")


@each_form
@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("norm_grad", [True, False])
def test_placed_by_hand(norm_grad: bool, input_grad: bool, form: Any) -> None:
    parts = [op for op in form() if not isinstance(op, (AddExtraInput, MakeExtraOutput))]
    parts[0].requires_grad_(norm_grad)
    linears = [n for n, op in enumerate(parts) if isinstance(op, BasicLinear)]
    after = [*parts[1:], None]
    biases = [after[n] if isinstance(after[n], Bias) else None for n in linears]
    fused = RecomputeMLP(
        norm=parts[0],
        linear1=parts[linears[0]],
        activation=parts[linears[1] - 1],
        linear2=parts[linears[1]],
        bias1=biases[0],
        bias2=biases[1],
    )
    assert list(fused.basic_ops) == parts
    x = torch.randn(5, D, requires_grad=input_grad)
    dy = torch.randn(5, D)
    wrt = [p for p in (x, *fused.parameters()) if p.requires_grad]
    got = torch.autograd.grad(Sequential(fused)(x), wrt, dy)
    y = x
    for op in parts:
        y = op.reference(y)
    for a, b in zip(got, torch.autograd.grad(y, wrt, dy)):
        torch.testing.assert_close(a, b)


@each_form
def test_errors_are_those_of_the_operations(form: Any) -> None:
    seq = Sequential(*form())
    inputs = [torch.randn(3, D - 1, requires_grad=True)] * (1 + seq.num_extra_inputs)
    with opfuser.enable(NAME), pytest.raises(InputError) as fused:
        seq(*inputs)
    with only(), pytest.raises(InputError) as separate:
        seq(*inputs)
    assert what(fused) == what(separate)


def test_a_decoder_asks_for_it() -> None:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 11, "dim": 24, "num_layers": 2, "num_heads": 4}
    model = decoder_lm(DecoderConfig(**sizes, dtype=torch.float64, recompute="mlp"))
    plain = decoder_lm(DecoderConfig(**sizes, dtype=torch.float64))
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(11, (2, 8))
    assert model.plan(tokens, tokens).fused("backward")[ASKED] == 2
    assert ASKED not in plain.plan(tokens, tokens).fused("backward")
    assert elements(saved_by(model, tokens, tokens)) < elements(saved_by(plain, tokens, tokens))
    got, want = (gradients(m, m, [tokens, tokens]) for m in (model, plain))
    assert_same(got, want)


def test_a_decoder_refuses_other_ways_to_recompute() -> None:
    with pytest.raises(ArgumentError, match=r"recompute must be None or 'mlp'.*recompute='all'"):
        DecoderConfig(vocab_size=1, dim=4, num_layers=1, num_heads=1, recompute="all")
