"""Activation and linear in one joint fusion: values, what is saved, which work is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from opfuser import AddExtraInput, BasicLinear, Bias, MakeExtraOutput, Sequential
from opfuser.basic import activation as plain
from opfuser.basic import gated_activation as gated
from opfuser.errors import NotSupportedError
from opfuser.fused.activation_linear import ActivationLinear
from opfuser.fused.parts import activation as activation_part
from opfuser.kernels.gated import gated_backward
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
    results,
    saved_by,
    without_bias,
)

NAME, WITH_SUM = "activation_linear", "activation_linear_add"

# Fusions call any function by its specification; here are those with the most in it.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "GELU, exact": lambda: plain.GELU("none"),
    "Softplus": plain.Softplus,
    "SwiGLU, interleaved": lambda: gated.SwiGLU(glu_interleave_size=2),
    "SiTUGLU": gated.SiTUGLU,
    "ClampedSwiGLU": gated.ClampedSwiGLU,
}


def ops(f: nn.Module, *, bias: bool = False, linear_bias: bool = False) -> list[nn.Module]:
    """For inputs of 8 columns."""
    hidden = 4 if isinstance(f, tuple(gated.GATED_ACTIVATIONS)) else 8
    before, behind = [Bias(8)] * bias, [Bias(3)] * linear_bias
    return [*before, f, BasicLinear(hidden, 3), *behind]


FORMS: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: ops(plain.GELU()),
    "biases": lambda: ops(plain.GELU(), bias=True, linear_bias=True),
    "gated": lambda: ops(gated.SwiGLU()),
    "gated, linear bias": lambda: ops(gated.SwiGLU(), linear_bias=True),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def cleared() -> list[nn.Module]:
    first, *middle, last = FORMS["biases"]()
    return [without_bias(first), *middle, without_bias(last)]


def shared() -> list[nn.Module]:
    f, linear = plain.SiLU(), BasicLinear(8, 8)
    return [f, linear, f, linear, plain.GELU(), linear]


def inside(form: str) -> Callable[[], list[nn.Module]]:
    """Behind an operation, whose output backward may write over where nobody else reads it."""
    return lambda: [BasicLinear(8, 8), *FORMS[form]()]


SHAPE = 2, 3, 8
CASES = {
    **{(NAME, n): Case(FORMS[n], SHAPE, dtypes=DTYPES) for n in ("plain", "gated, linear bias")},
    (WITH_SUM, "gated, linear bias"): Case(
        lambda: [*FORMS["gated, linear bias"](), AddExtraInput()], SHAPE, (3,), dtypes=DTYPES
    ),
    **{
        (NAME, name): Case(lambda f=f: ops(f()), SHAPE, dtypes=(F32, BF16))
        for name, f in ACTIVATIONS.items()
    },
    **{(NAME, f"inside, {n}"): Case(inside(n), (5, 8), dtypes=(F32, BF16)) for n in FORMS},
    (NAME, "read by others"): Case(
        lambda: [BasicLinear(8, 8), MakeExtraOutput(), *FORMS["gated"]()], (5, 8)
    ),
    (NAME, "cleared biases"): Case(cleared, (7, 8), dtypes=(F32, FP16)),
    (NAME, "the same operations again"): Case(shared, (7, 8), dtypes=(F64, F32), times=3),
}


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_values(case: tuple[str, str], device: torch.device) -> None:
    if device.type == "cpu" or CASES[case].dtypes == DTYPES:
        check(case[0], CASES[case], device)


def make(parts: list[nn.Module]) -> tuple[Sequential, Tensor]:
    """A float64 sequence, and an input that requires grad."""
    return Sequential(*filled(parts)).double(), leaf(5, 8, dtype=F64)


def test_a_residual_is_not_written_to() -> None:
    seq, x = make([*FORMS["biases"](), AddExtraInput()])
    z = torch.randn(5, 3, dtype=F64)
    before = z.clone()
    seq(x, z).sum().backward()
    assert torch.equal(z, before)


@each_form
def test_saves_the_input_alone(form: Callable[[], list[nn.Module]]) -> None:
    seq, x = make(form())
    assert [t.shape for t in saved_by(seq, x)] == [x.shape]
    with only():
        assert elements(saved_by(seq, x)) > x.numel()


@each_form
@pytest.mark.parametrize(
    ("biases", "weight"), [(True, False), (False, True), (False, False)], ids=str
)
def test_no_work_for_frozen_parameters(
    biases: bool, weight: bool, form: Callable[[], list[nn.Module]]
) -> None:
    seq, x = make(form())
    for name, p in seq.named_parameters():
        p.requires_grad_(weight if name.endswith("weight") else biases)
    assert gemms_of_backward(seq, x) == 1 + weight
    got = results(seq, seq.parameters(), x)
    with only():
        assert_same(got, results(seq, seq.parameters(), x))


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
    Sequential(*FORMS["gated"]())(leaf(*rows, 8)).sum().backward()
    assert len(written) == 1  # the caller's
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        y = seq(torch.randn(*rows, 8))
    y.sum().backward()
    assert len(written) == 1  # of hooks, which may keep its memory in ways that are not counted


@each_form
def test_an_input_that_others_read_is_not_written_to(
    form: Callable[[], list[nn.Module]], device: torch.device
) -> None:
    seq = Sequential(BasicLinear(8, 8), MakeExtraOutput(), *form()).to(device)
    y, hidden = seq(leaf(5, 8).to(device))
    before = hidden.detach().clone()
    y.sum().backward()
    assert torch.equal(hidden, before)


def test_where_it_is_refused() -> None:
    seq, x = make(FORMS["biases"]())
    with torch.no_grad():
        assert_not_fused(seq, NAME, x, code="NO_GRAD")
    parts = ops(gated.SwiGLU(), bias=True)
    seq, x = make(parts)
    record = seq.plan(x).record(NAME)
    assert record.matches == ((1, 2),)
    assert [(at, str(why)) for at, why in record.refusals] == [
        (0, "LAYOUT: SwiGLU adds no bias; the GEMM before does")
    ]
    bias, swiglu, linear = parts
    with pytest.raises(NotSupportedError, match=r"SwiGLU adds no bias.*\(ActivationLinear\)"):
        ActivationLinear(activation=swiglu, linear=linear, bias=bias)
