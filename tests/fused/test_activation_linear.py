"""Activation and linear in one joint fusion: numbers, what is saved, which work is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, Bias, MakeExtraOutput, Sequential
from opfuser.basic import activation as plain
from opfuser.basic import gated_activation as gated
from opfuser.errors import InputError, NotSupportedError
from opfuser.fused.activation_linear import ActivationLinear
from opfuser.fused.parts import activation as activation_part
from opfuser.kernels.gated import gated_backward
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
from tests.fused.sharded import hand_built, refusals_when_sharded

NAME = "activation_linear"
WITH_SUM = "activation_linear_add"

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "GELU": plain.GELU,
    "GELU, exact": lambda: plain.GELU("none"),
    "QGELU": plain.QGELU,
    "ReLU": plain.ReLU,
    "SReLU": plain.SReLU,
    "SiLU": plain.SiLU,
    "Softplus": plain.Softplus,
    "Tanh": plain.Tanh,
    "Sigmoid": plain.Sigmoid,
    "GLU": gated.GLU,
    "GEGLU": gated.GEGLU,
    "QGEGLU": gated.QGEGLU,
    "ReGLU": gated.ReGLU,
    "SReGLU": gated.SReGLU,
    "SwiGLU": gated.SwiGLU,
    "SwiGLU, interleaved": lambda: gated.SwiGLU(glu_interleave_size=2),
    "SiTUGLU": gated.SiTUGLU,
    "ClampedSwiGLU": gated.ClampedSwiGLU,
}


def ops(activation: str, *, bias: bool = False, linear_bias: bool = False) -> list[nn.Module]:
    """For inputs of 8 columns."""
    f = ACTIVATIONS[activation]()
    hidden = 4 if isinstance(f, gated._GatedActivation) else 8
    return filled(
        [
            *([Bias(8)] if bias else []),
            f,
            BasicLinear(hidden, 3),
            *([Bias(3)] if linear_bias else []),
        ]
    )


def make(parts: list[nn.Module]) -> tuple[Sequential, Tensor]:
    """A float64 sequence, and an input that requires grad."""
    return Sequential(*parts).double(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)


FORMS: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: ops("GELU"),
    "biases": lambda: ops("GELU", bias=True, linear_bias=True),
    "gated": lambda: ops("SwiGLU"),
    "gated, linear bias": lambda: ops("SwiGLU", linear_bias=True),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    check_fusion(NAME, ops(activation), torch.randn(3, 5, 8), dtypes=DTYPES)


@each_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers(
    dtype: torch.dtype, form: Callable[[], list[nn.Module]], device: torch.device
) -> None:
    parts = [op.to(device) for op in form()]
    check_fusion(NAME, parts, torch.randn(3, 5, 8, device=device), dtypes=[dtype], zero_rows=True)


@each_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_a_sum(dtype: torch.dtype, form: Callable[[], list[nn.Module]]) -> None:
    tensors = torch.randn(3, 5, 8), torch.randn(3, 5, 3)
    check_fusion(WITH_SUM, [*form(), AddExtraInput()], *tensors, dtypes=[dtype], zero_rows=True)


@pytest.mark.parametrize("extra", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_sum_of_two_dtypes(autocast: bool, extra: torch.dtype) -> None:
    tensors = torch.randn(7, 8), torch.randn(7, 3, dtype=extra)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        check_fusion(WITH_SUM, [*FORMS["biases"](), AddExtraInput()], *tensors)


def test_a_residual_is_not_written_to() -> None:
    seq = Sequential(*FORMS["biases"](), AddExtraInput(in_place=True))
    x, z = torch.randn(7, 8, requires_grad=True), torch.randn(7, 3)
    before = z.clone()
    seq(x, z).sum().backward()
    assert torch.equal(z, before)


@each_form
@pytest.mark.parametrize("rows", [(), (1,), (2, 3, 2)], ids=str)
def test_rows(rows: tuple[int, ...], form: Callable[[], list[nn.Module]]) -> None:
    check_fusion(NAME, form(), torch.randn(*rows, 8), dtypes=[torch.float32, torch.bfloat16])


@each_form
def test_autocast(form: Callable[[], list[nn.Module]]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check_fusion(NAME, form(), torch.randn(7, 8))
        check_fusion(NAME, form(), torch.randn(7, 8, dtype=torch.bfloat16))


@each_form
def test_other_dtype_of_parameters(form: Callable[[], list[nn.Module]]) -> None:
    parts = [op.to(torch.bfloat16) for op in form()]
    check_fusion(NAME, parts, torch.randn(7, 8))


def test_a_bias_that_was_cleared() -> None:
    parts = FORMS["biases"]()
    parts[0].bias = parts[3].bias = None
    check_fusion(NAME, parts, torch.randn(7, 8), dtypes=DTYPES)


@each_form
def test_saves_the_input_alone(form: Callable[[], list[nn.Module]]) -> None:
    seq, x = make(form())
    assert [t.shape for t in saved_by(seq, x)] == [x.shape]
    with only():
        assert elements(saved_by(seq, x)) > x.numel()


@each_form
def test_nothing_is_saved_without_grad(form: Callable[[], list[nn.Module]]) -> None:
    seq, x = make(form())
    with torch.no_grad():
        assert saved_by(seq, x) == []
        assert "NO_GRAD" in refusal_codes(seq.plan(x), NAME)


@each_form
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_no_work_for_frozen_parameters(
    biases: bool, weight: bool, form: Callable[[], list[nn.Module]]
) -> None:
    seq, x = make(form())
    for name, p in seq.named_parameters():
        p.requires_grad_(weight if name.endswith("weight") else biases)
    y = seq(x)
    with Counting() as counting:
        y.sum().backward()
    assert counting.gemms == 1 + weight
    for p in seq.parameters():
        assert (p.grad is not None) == p.requires_grad
    got = gradients(seq, seq, [x])
    with only():
        assert_same(got, gradients(seq, seq, [x]))


def test_an_input_without_gradient_and_a_bias_with_one() -> None:
    seq, x = make(FORMS["biases"]())
    x.requires_grad_(False)
    assert seq.plan(x).fused("backward") == {NAME: 1}
    got = gradients(seq, seq, [x])
    with only():
        assert_same(got, gradients(seq, seq, [x]))


@each_form
@pytest.mark.parametrize("in_sequence", [True, False])
def test_several_backwards_of_one_forward(
    in_sequence: bool, form: Callable[[], list[nn.Module]], device: torch.device
) -> None:
    """What is saved is the caller's, or an intermediate result: neither is written to."""
    seq = Sequential(*([BasicLinear(8, 8)] if in_sequence else []), *form()).to(device)
    x = torch.randn(5, 8, device=device, requires_grad=True)
    before = x.detach().clone()
    y = seq(x)
    wrt, dy = [x, *seq.parameters()], torch.randn_like(y)
    grads = [
        torch.autograd.grad(y, wrt, dy, retain_graph=True),
        torch.autograd.grad(y, wrt, dy, retain_graph=True),
        torch.autograd.grad(y, wrt, dy),
    ]
    for other in grads[1:]:
        for a, b in zip(grads[0], other):
            assert torch.equal(a, b)
    assert torch.equal(x, before)


@pytest.mark.skipif(
    not hasattr(torch._C._FunctionBase, "maybe_clear_saved_tensors"),
    reason="this torch holds what was saved until the whole backward is done",
)
@pytest.mark.parametrize("rows", [(5,), (2, 3)], ids=str)
def test_the_gradient_takes_the_place_of_an_intermediate_result(
    rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Tensor] = []

    def gated_backward_(dy: Tensor, x: Tensor, *arguments: object) -> list[Tensor]:
        written.append(x)
        return gated_backward(dy, x, *arguments[:-1], True, arguments[-1])

    monkeypatch.setattr(activation_part, "gated_backward_", gated_backward_)
    seq = Sequential(BasicLinear(8, 8), *FORMS["gated"]())
    y = seq(torch.randn(*rows, 8))
    y.sum().backward(retain_graph=True)
    assert written == []  # a second backward reads it
    y.sum().backward()
    assert [x.shape for x in written] == [(*rows, 8)]
    Sequential(*FORMS["gated"]())(torch.randn(*rows, 8, requires_grad=True)).sum().backward()
    assert len(written) == 1  # the caller's


@each_form
def test_an_input_that_others_read_is_not_written_to(
    form: Callable[[], list[nn.Module]], device: torch.device
) -> None:
    seq = Sequential(BasicLinear(8, 8), MakeExtraOutput(), *form()).to(device)
    x = torch.randn(5, 8, device=device, requires_grad=True)
    y, hidden = seq(x)
    before = hidden.detach().clone()
    y.sum().backward()
    assert torch.equal(hidden, before)


def test_a_weight_used_twice() -> None:
    f, linear = plain.SiLU(), filled([BasicLinear(8, 8)])[0]
    seq, x = make([f, linear, f, linear, plain.GELU(), linear])
    assert seq.plan(x).fused("backward") == {NAME: 3}
    got = gradients(seq, seq, [x])
    with only():
        assert_same(got, gradients(seq, seq, [x]))


@each_form
def test_main_grad(form: Callable[[], list[nn.Module]]) -> None:
    parts = form()
    at = next(n for n, op in enumerate(parts) if isinstance(op, BasicLinear))
    parts[at] = BasicLinear(parts[at].in_features, 3, accumulate_into_main_grad=True)
    weight = parts[at].weight
    seq, x = Sequential(*parts), torch.randn(5, 8, requires_grad=True)
    buffers = {}
    for fused in (True, False):
        weight.main_grad = torch.full_like(weight, 2.0)
        with only(*[NAME] * fused):
            assert seq.plan(x).fused("backward") == ({NAME: 1} if fused else {})
            seq(x).square().sum().backward()
        buffers[fused] = weight.main_grad
        assert weight.grad_added_to_main_grad
    torch.testing.assert_close(buffers[True], buffers[False])
    assert (buffers[True] - 2.0).abs().max() > 0.01


@each_form
def test_parameters_replaced_between_forward_and_backward(
    form: Callable[[], list[nn.Module]],
) -> None:
    seq, x = make(form())
    want = gradients(seq, seq, [x])
    y, wrt = seq(x), [x, *seq.parameters()]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=y.dtype)
    for op in seq:
        for name, p in list(op.named_parameters()):
            setattr(op, name, nn.Parameter(torch.zeros_like(p)))
    assert_same(torch.autograd.grad(y, wrt, dy), want)


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["biases", "gated, linear bias"])
def test_compiles_into_one_graph(name: str) -> None:
    torch.compiler.reset()
    seq, x = make(FORMS[name]())
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, seq, [x]), gradients(seq, seq, [x]))


def test_refuses_what_communicates() -> None:
    parallel = "parallel BasicLinear in"
    grad = "communicates right after its input-gradient GEMM"
    forward = "communicates right after its forward GEMM"
    expected = {
        "column": f"tensor-{parallel} column mode {grad}",
        "column, sequence-parallel": f"sequence-{parallel} column mode {grad}",
        "row": f"tensor-{parallel} row mode {forward}",
        "row, sequence-parallel": f"sequence-{parallel} row mode {forward}",
    }
    assert refusals_when_sharded(NAME, lambda linear: [plain.SiLU(), linear]) == expected
    texts = hand_built(lambda linear: ActivationLinear(activation=plain.SiLU(), linear=linear))
    for name, text in texts.items():
        assert text is not None
        assert text.startswith(f"{expected[name]} (ActivationLinear).")


def test_a_bias_before_a_gated_activation_is_left_to_others() -> None:
    parts = ops("SwiGLU", bias=True)
    seq, x = make(parts)
    record = seq.plan(x).record(NAME)
    assert record.matches == ((1, 2),)
    assert [(at, str(why)) for at, why in record.refusals] == [
        (0, "LAYOUT: SwiGLU adds no bias; the GEMM before does")
    ]
    bias, swiglu, linear = parts
    with pytest.raises(NotSupportedError, match=r"SwiGLU adds no bias.*\(ActivationLinear\)"):
        ActivationLinear(activation=swiglu, linear=linear, bias=bias)


@pytest.mark.parametrize(
    ("at", "code", "matches"),
    [
        (0, None, ((1, 2, 3),)),
        (1, "SUBCLASS", ()),
        (2, "SUBCLASS", ()),
        (3, None, ((0, 1, 2),)),
    ],
)
def test_a_subclass_is_not_matched(
    at: int, code: str | None, matches: tuple[tuple[int, ...], ...]
) -> None:
    seq = Sequential(*with_subclass(FORMS["biases"](), at))
    plan = seq.plan(torch.randn(3, 8, requires_grad=True))
    assert stopped_by(plan, NAME) == code
    assert plan.record(NAME).matches == matches


@each_form
@pytest.mark.parametrize("input_grad", [True, False])
def test_placed_by_hand(input_grad: bool, form: Callable[[], list[nn.Module]]) -> None:
    parts = form()
    kinds = {type(op): op for op in parts[:-1]}
    at = next(n for n, op in enumerate(parts) if isinstance(op, BasicLinear))
    fused = ActivationLinear(
        activation=parts[at - 1],
        linear=parts[at],
        bias=kinds.get(Bias),
        linear_bias=parts[-1] if at < len(parts) - 1 else None,
    )
    assert list(fused.basic_ops) == parts
    x = torch.randn(5, 8, requires_grad=input_grad)
    dy = torch.randn(5, 3)
    wrt = [p for p in (x, *fused.parameters()) if p.requires_grad]
    got = torch.autograd.grad(Sequential(fused)(x), wrt, dy)
    y = x
    for op in parts:
        y = op.reference(y)
    for a, b in zip(got, torch.autograd.grad(y, wrt, dy)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("width", [7, 6])
@each_form
def test_errors_are_those_of_the_operations(
    form: Callable[[], list[nn.Module]], width: int
) -> None:
    seq = Sequential(*form())
    x = torch.randn(3, width, requires_grad=True)
    with pytest.raises(InputError) as fused:
        seq(x)
    with only(), pytest.raises(InputError) as separate:
        seq(x)
    assert what(fused) == what(separate)


def test_switched_off() -> None:
    with opfuser.disable(NAME):
        seq, x = make(FORMS["gated"]())
        assert NAME not in seq.plan(x).fused("forward")
