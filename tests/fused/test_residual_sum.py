"""Who adds a residual, and where the sum is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from opfuser.engine.plan import Plan
from opfuser.testing import assert_fused
from tests.engine.toys import F64, grads, randn, same

NORMS: dict[str, Callable[[int], nn.Module]] = {"rms": of.RMSNorm, "layer": of.LayerNorm}


def planned(seq: of.Sequential, device: str, *, grad: bool = True) -> Plan:
    """The plan on a CPU, or (for ``"meta"``) the one that a GPU gets; of 8 columns."""
    seq = seq.to(device)
    x = torch.empty(7, 8, device=device, requires_grad=grad)
    extras = [torch.empty(7, 8, device=device) for _ in range(seq.num_extra_inputs)]
    return seq.plan(x, *extras)


@pytest.mark.parametrize("tap", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_on_a_gpu_the_norm_behind_goes_before_the_gemm(norm: str, tap: bool) -> None:
    taps = [of.MakeExtraOutput()] if tap else []
    seq = of.Sequential(of.BasicLinear(8, 8), of.AddExtraInput(), *taps, NORMS[norm](8))
    on_cpu = planned(seq, "cpu")
    assert "forward_linear_bias_add" in on_cpu.fused("forward")
    plan = planned(seq, "meta")
    assert f"forward_add_{norm}_norm" in plan.fused("forward")
    assert [str(why) for _, why in plan.record("forward_linear_bias_add").refusals] == [
        "CONFLICT: on a GPU the norm after it adds the residual"
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("behind", [[], [of.MakeExtraOutput], [lambda: of.Linear(8, 8)]])
def test_where_no_norm_follows_the_gemm_adds(
    behind: list[Callable[[], nn.Module]], device: str
) -> None:
    tail = [make() for make in behind]
    for first in (of.Linear(8, 8), of.BasicLinear(8, 8)):
        plan = planned(of.Sequential(first, of.AddExtraInput(), *tail), device, grad=False)
        assert plan.fused("forward")["forward_linear_bias_add"] == 1


class Branches(of.BasicOperation):
    """``2 x`` as output, and ``3 x`` as a fresh extra output."""

    num_extra_outputs = 1
    kept: Tensor | None = None
    keeps = False

    def fuser_forward(self, ctxs: object, input_: Tensor, **unused: object) -> object:
        extra = 3 * input_
        if self.keeps:
            object.__setattr__(self, "kept", extra)
        return 2 * input_, [(extra,)]

    def fuser_backward(
        self, ctxs: object, grad_output: Tensor, *, basic_op_grad_extra_outputs: object
    ) -> object:
        ((g,),) = basic_op_grad_extra_outputs  # type: ignore[misc]
        return 2 * grad_output + 3 * g, [()], [()]


def branches(scale: float | None = None, *, bias: bool, keeps: bool = False) -> of.Sequential:
    make, add = Branches(), of.AddExtraInput()
    make.keeps = keeps
    make.set_extra_output_channel(0, "branch", output_to_caller=False)
    add.set_extra_input_channel(0, "branch")
    middle = [] if scale is None else [of.ConstantScale(scale)]
    return of.Sequential(make, of.Linear(8, 8, bias=bias, dtype=F64), *middle, add)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("scale", "bias"), [(None, False), (None, True), (0.5, False)])
def test_the_gemm_adds_in_place_to_what_nobody_else_holds(
    scale: float | None, bias: bool, grad: bool
) -> None:
    seq, x = branches(scale, bias=bias), randn(5, 8, grad=True)
    name = "forward_linear_bias_add" if scale is None else "forward_linear_scale_add"
    w = seq[1].weight
    expected = 3 * x + (2 * x @ w.t()) * (scale or 1) + (seq[1].bias if bias else 0)
    peak: list[Tensor] = []
    plain = torch.Tensor.addmm_

    def spy(self: Tensor, *args: Tensor, **kwargs: float) -> Tensor:
        peak.append(self)
        return plain(self, *args, **kwargs)

    with torch.set_grad_enabled(grad), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "addmm_", spy)
        y = seq(x)
    assert_fused(seq, forward={name: 1})
    assert y.data_ptr() == peak[0].data_ptr()
    same(y, expected if grad else expected.detach())
    if grad:
        same(grads(y, [x, w]), grads(expected, [x, w]))


@pytest.mark.parametrize("bias", [False, True])
def test_what_somebody_holds_is_not_written_to(bias: bool) -> None:
    seq, x = branches(bias=bias, keeps=True), randn(5, 8)
    with torch.no_grad():
        seq(x)
    assert_fused(seq, forward={"forward_linear_bias_add": 1})
    assert torch.equal(seq[0].kept, 3 * x)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("before", [[], [of.Linear(8, 8, dtype=F64)]], ids=["sum", "linear"])
def test_in_place_leaves_what_the_caller_passes_as_it_is(
    before: list[nn.Module], grad: bool
) -> None:
    """te.ops has the flag as a permission, of which nothing here makes use."""
    x, z = randn(5, 8), randn(5, 8)
    value = z.clone()
    with torch.set_grad_enabled(grad):
        y = of.Sequential(*before, of.AddExtraInput(in_place=True))(x, z)
        same(y, of.Sequential(*before, of.AddExtraInput())(x, value))
    assert torch.equal(z, value)


@pytest.mark.parametrize("held", [False, True])
def test_make_extra_output_in_place_adds_to_a_gradient_that_nobody_else_holds(held: bool) -> None:
    """That which an operation behind made; not one that the caller passes."""
    make = of.MakeExtraOutput(in_place=True)
    seq, x = of.Sequential(make, of.ConstantScale(2.0)), randn(3, 4, grad=True)
    y, extra = seq(x)
    dy, dextra = randn(3, 4), randn(3, 4)
    value, address = dextra.clone(), dextra.data_ptr()
    if held:
        torch.autograd.backward([y, extra], [dy, dextra])
        assert torch.equal(dextra, value)
    else:
        (extra * 1).backward(dextra, retain_graph=True)
        assert torch.equal(dextra, value)
        x.grad = None
        torch.autograd.backward([y, extra], [dy, dextra.clone()])
    assert dextra.data_ptr() == address
    same(x.grad, 2 * dy + value)
