"""Norm and linear in one joint fusion: numbers, what is saved, which work is left out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, Bias, MakeExtraOutput, Sequential
from opfuser.basic.layer_norm import LayerNorm
from opfuser.basic.rms_norm import RMSNorm
from opfuser.errors import InputError, NotSupportedError
from opfuser.fused.norm_linear import FUSION, NormLinear
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
from tests.fused.pairings import DTYPES, refusal_codes, stopped_by, what, with_subclass
from tests.fused.sharded import hand_built, refusals_when_sharded, sharded

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


def ops(kind: str, form: str = "tb", **kwargs: Any) -> list[nn.Module]:
    return filled(
        [
            *([AddExtraInput()] if "s" in form else []),
            *([MakeExtraOutput()] if "t" in form else []),
            NORMS[kind](6, **kwargs),
            BasicLinear(6, 4),
            *([Bias(4)] if "b" in form else []),
        ]
    )


def extras(form: str, *rows: int) -> list[Tensor]:
    return [torch.randn(*rows, 6)] if "s" in form else []


def make(kind: str, form: str = "tb") -> tuple[Sequential, list[Tensor]]:
    """A float64 sequence, and inputs that require grad."""
    inputs = [torch.randn(3, 6), *extras(form, 3)]
    return Sequential(*ops(kind, form)).double(), [t.double().requires_grad_() for t in inputs]


@each_norm
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers(dtype: torch.dtype, form: str, kind: str, device: torch.device) -> None:
    parts = [op.to(device) for op in ops(kind, form)]
    tensors = [t.to(device) for t in (torch.randn(3, 5, 6), *extras(form, 3, 5))]
    check_fusion(EVERYWHERE, parts, *tensors, dtypes=[dtype], zero_rows=True)


@each_norm
@pytest.mark.parametrize("kwargs", [{"zero_centered_gamma": True}, {"eps": 0.1}], ids=str)
def test_options_of_the_norm(kwargs: dict[str, Any], kind: str) -> None:
    parts = ops(kind, "stb", **kwargs)
    check_fusion(EVERYWHERE, parts, torch.randn(7, 6), torch.randn(7, 6), dtypes=DTYPES)


@each_norm
@pytest.mark.parametrize("rows", [(), (1,), (2, 3, 2)], ids=str)
def test_rows(rows: tuple[int, ...], kind: str) -> None:
    tensors = [torch.randn(*rows, 6) for _ in range(2)]
    check_fusion(EVERYWHERE, ops(kind, "stb"), *tensors, dtypes=[torch.float32, torch.bfloat16])


@each_norm
def test_a_norm_over_several_dimensions(kind: str) -> None:
    parts = filled([MakeExtraOutput(), NORMS[kind]((3, 6)), BasicLinear(6, 4)])
    check_fusion(NAME, parts, torch.randn(2, 3, 6), dtypes=DTYPES)


def test_layer_norm_without_bias() -> None:
    parts = ops("layer")
    parts[1].bias = None
    check_fusion(NAME, parts, torch.randn(7, 6), dtypes=DTYPES)


@each_norm
@pytest.mark.parametrize("form", ["t", "stb"])
@pytest.mark.parametrize("extra", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(extra: torch.dtype, form: str, kind: str) -> None:
    tensors = [torch.randn(7, 6), *(t.to(extra) for t in extras(form, 7))]
    with torch.autocast("cpu", torch.bfloat16):
        check_fusion(EVERYWHERE, ops(kind, form), *tensors)


@each_norm
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("extra", [torch.float32, torch.float64], ids=str)
def test_other_dtypes_of_parameters_and_residual(
    extra: torch.dtype, parameters: torch.dtype, kind: str
) -> None:
    parts = [op.to(parameters) for op in ops(kind, "stb")]
    check_fusion(EVERYWHERE, parts, torch.randn(7, 6), torch.randn(7, 6, dtype=extra))


@each_norm
def test_saves_the_sum_and_statistics_alone(kind: str) -> None:
    statistics = 3 if kind == "rms" else 6
    for form, name in (("tb", NAME), ("stb", EVERYWHERE.name)):
        seq, inputs = make(kind, form)
        with only(name):
            assert elements(saved_by(seq, *inputs)) == 18 + statistics
        with only():
            assert elements(saved_by(seq, *inputs)) == 2 * 18 + statistics


def test_a_sum_is_left_to_the_gemm_before_it_on_a_cpu() -> None:
    seq, inputs = make("rms", "stb")
    record = seq.plan(*inputs).record(NAME)
    assert record.matches == ((1, 2, 3, 4),)
    assert [(at, str(why)) for at, why in record.refusals] == [
        (0, "DEVICE: on a CPU the GEMM before it adds the residual, not the norm")
    ]
    plan = seq.to("meta").plan(*(t.to("meta") for t in inputs))
    assert plan.record(NAME).matches == ((0, 1, 2, 3, 4),)


@each_norm
def test_nothing_is_saved_without_grad(kind: str) -> None:
    seq, inputs = make(kind)
    with torch.no_grad():
        assert saved_by(seq, *inputs) == []
        assert {*refusal_codes(seq.plan(*inputs), NAME)} == {"NO_GRAD"}


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
    y = seq(*inputs)[0]
    with Counting() as counting:
        y.sum().backward()
    assert counting.gemms == gemms
    for name, p in seq.named_parameters():
        assert (p.grad is None) == (name in frozen)
    got = gradients(seq, seq, inputs)
    with only():
        assert_same(got, gradients(seq, seq, inputs))


@each_norm
def test_an_input_without_gradient(kind: str) -> None:
    """The residual and the tap owe nothing: the fusion starts at the norm."""
    seq, inputs = make(kind, "tb")
    inputs[0].requires_grad_(False)
    assert seq.plan(*inputs).record(NAME).matches == ((1, 2, 3),)
    got = gradients(seq, seq, inputs)
    with only():
        assert_same(got, gradients(seq, seq, inputs))


@each_norm
def test_several_backwards_of_one_forward(kind: str) -> None:
    seq, inputs = make(kind)
    outputs = seq(*inputs)
    wrt = [*inputs, *seq.parameters()]
    douts = [torch.randn_like(y) for y in outputs]
    first = torch.autograd.grad(outputs, wrt, douts, retain_graph=True)
    second = torch.autograd.grad(outputs, wrt, douts)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


@each_norm
def test_a_weight_used_twice(kind: str) -> None:
    first, second = ops(kind, "b"), ops(kind, "b")
    for parts in (first, second):
        parts[1] = BasicLinear(6, 6)
        parts[2] = Bias(6)
    second[1].weight = first[1].weight
    seq = Sequential(*first, *second, second[0], first[1]).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert seq.plan(x).fused("backward") == {NAME: 3}
    got = gradients(seq, seq, [x])
    with only():
        assert_same(got, gradients(seq, seq, [x]))


@each_norm
def test_main_grad(kind: str) -> None:
    parts = ops(kind, "t")
    parts[2] = BasicLinear(6, 4, accumulate_into_main_grad=True)
    seq = Sequential(*parts)
    weight = parts[2].weight
    x = torch.randn(3, 6, requires_grad=True)
    wanted = {}
    for fused in (True, False):
        weight.main_grad = torch.full_like(weight, 2.0)
        with only(*[NAME] * fused):
            assert seq.plan(x).fused("backward") == ({NAME: 1} if fused else {})
            seq(x)[0].square().sum().backward()
        wanted[fused] = weight.main_grad
        assert weight.grad_added_to_main_grad
    torch.testing.assert_close(wanted[True], wanted[False])
    assert (wanted[True] - 2.0).abs().max() > 0.1


@each_norm
def test_weights_replaced_between_forward_and_backward(kind: str) -> None:
    seq, inputs = make(kind)
    want = gradients(seq, seq, inputs)
    y, residual = seq(*inputs)
    generator = torch.Generator().manual_seed(7)
    douts = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in (y, residual)]
    wrt = [*inputs, *seq.parameters()]
    for op in seq:
        for name, p in list(op.named_parameters()):
            setattr(op, name, nn.Parameter(torch.zeros_like(p)))
    assert_same(torch.autograd.grad([y, residual], wrt, douts), want)


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@each_norm
def test_compiles_into_one_graph(kind: str) -> None:
    torch.compiler.reset()
    seq, inputs = make(kind)
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, seq, inputs), gradients(seq, seq, inputs))


def test_refuses_what_communicates() -> None:
    norm = "parallel BasicLinear in"
    grad = "communicates right after its input-gradient GEMM"
    forward = "communicates right after its forward GEMM"
    expected = {
        "column": f"tensor-{norm} column mode {grad}",
        "column, sequence-parallel": f"sequence-{norm} column mode {grad}",
        "row": f"tensor-{norm} row mode {forward}",
        "row, sequence-parallel": f"sequence-{norm} row mode {forward}",
    }
    assert refusals_when_sharded(NAME, lambda linear: [RMSNorm(6), linear]) == expected
    texts = hand_built(lambda linear: NormLinear(norm=RMSNorm(6), linear=linear))
    for name, text in texts.items():
        assert text is not None
        assert text.startswith(f"{expected[name]} (NormLinear).")


@each_norm
@pytest.mark.parametrize(
    ("at", "code"), [(0, None), (1, "SUBCLASS"), (2, "SUBCLASS"), (3, None)], ids=str
)
def test_a_subclass_is_not_matched(at: int, code: str | None, kind: str) -> None:
    seq = Sequential(*with_subclass(ops(kind), at))
    plan = seq.plan(torch.randn(3, 6, requires_grad=True))
    assert stopped_by(plan, NAME) == code
    matches = {0: ((1, 2, 3),), 3: ((0, 1, 2),)}
    assert plan.record(NAME).matches == matches.get(at, ())


@each_norm
@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("norm_grad", [True, False])
def test_placed_by_hand(norm_grad: bool, input_grad: bool, kind: str) -> None:
    norm, linear, bias = ops(kind, "b")
    norm.requires_grad_(norm_grad)
    fused = NormLinear(norm=norm, linear=linear, bias=bias)
    assert list(fused.basic_ops) == [norm, linear, bias]
    x = torch.randn(3, 6, requires_grad=input_grad)
    dy = torch.randn(3, 4)
    wrt = [p for p in (x, *fused.parameters()) if p.requires_grad]
    got = torch.autograd.grad(Sequential(fused)(x), wrt, dy)
    plain = bias.reference(linear.reference(norm.reference(x)))
    for a, b in zip(got, torch.autograd.grad(plain, wrt, dy)):
        torch.testing.assert_close(a, b)


@each_norm
def test_errors_are_those_of_the_operations(kind: str) -> None:
    seq = Sequential(*ops(kind, "stb"))
    for x, z in (((3, 6), (6,)), ((3, 5), (3, 5))):
        inputs = torch.randn(x, requires_grad=True), torch.randn(z)
        with only(EVERYWHERE.name), pytest.raises(InputError) as fused:
            seq(*inputs)
        with only(), pytest.raises(InputError) as separate:
            seq(*inputs)
        assert what(fused) == what(separate)


def test_a_linear_that_communicates_is_an_error_by_hand() -> None:
    linear = sharded(BasicLinear(6, 4), "row")
    with pytest.raises(NotSupportedError, match="Leave the operations separate"):
        NormLinear(norm=RMSNorm(6), linear=linear)


@each_norm
def test_a_copy_has_parameters_of_its_own(kind: str) -> None:
    norm, linear = ops(kind, "")
    seq = Sequential(NormLinear(norm=norm, linear=linear)).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    for twin in (copy.deepcopy(seq), pickle.loads(pickle.dumps(seq))):
        assert_same(gradients(twin, twin, [x]), gradients(seq, seq, [x]))
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert not twin(x).any()
        assert seq(x).any()
