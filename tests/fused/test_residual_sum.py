"""Who adds a residual, and where the sum is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


ORDERED: dict[str, Callable[[], list[nn.Module]]] = {
    "alone": list,
    "linear": lambda: [of.Linear(8, 8, dtype=F64)],
    "basic linear": lambda: [of.BasicLinear(8, 8, dtype=F64)],
    "scaled": lambda: [of.BasicLinear(8, 8, dtype=F64), of.ConstantScale(0.5)],
    "activation": lambda: [of.GELU(), of.Linear(8, 8, dtype=F64)],
}
BEHIND: dict[str, Callable[[], list[nn.Module]]] = {
    "nothing": list,
    "norm": lambda: [of.RMSNorm(8, dtype=F64)],
    "tap and norm": lambda: [of.MakeExtraOutput(), of.LayerNorm(8, dtype=F64)],
    "chain": lambda: [of.GELU(), of.ConstantScale(2.0)],
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("before", ORDERED)
def test_in_place_is_an_order_where_nothing_is_recorded(
    before: str, behind: str, device: torch.device
) -> None:
    add = of.AddExtraInput(in_place=True)
    seq = of.Sequential(*ORDERED[before](), add, *BEHIND[behind]()).to(device)
    x, z = randn(5, 8).to(device), randn(5, 8).to(device)
    until = of.Sequential(*seq[: len(ORDERED[before]()) + 1])
    add.in_place = False
    with torch.no_grad():
        expected, total = seq(x, z), until(x, z)
        add.in_place = True
        address, y = z.data_ptr(), seq(x, z)
    assert z.data_ptr() == address
    torch.testing.assert_close(z, total)
    torch.testing.assert_close(y, expected)
    if behind == "nothing":
        assert y.data_ptr() == address


def test_in_place_writes_to_a_leaf_that_requires_grad_under_no_grad() -> None:
    seq, x, z = of.Sequential(of.AddExtraInput(in_place=True)), randn(3, 4), randn(3, 4, grad=True)
    expected = x + z
    with torch.no_grad():
        assert seq(x, z).data_ptr() == z.data_ptr()
    same(z.detach(), expected.detach())


def ordered(*before: nn.Module) -> of.Sequential:
    return of.Sequential(*before, of.AddExtraInput(in_place=True))


def by_channel(*between: nn.Module, to_caller: bool = False) -> of.Sequential:
    make, add = of.MakeExtraOutput(), of.AddExtraInput(in_place=True)
    make.set_extra_output_channel(0, "x", output_to_caller=to_caller)
    add.set_extra_input_channel(0, "x")
    return of.Sequential(make, of.ConstantScale(2.0), *between, add)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def made_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return randn(3, 4)


class Publishes(of.BasicOperation):
    """``x`` as output, and a tensor that somebody has as an extra output."""

    num_extra_outputs = 1

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.published = [tensor]

    def fuser_forward(self, ctxs: object, input_: Tensor, **unused: object) -> object:
        return input_ * 1, [tuple(self.published)]


X = randn(3, 4)
UNSAFE: dict[str, tuple[Callable[[], of.Sequential], list[Tensor]]] = {
    "the input itself": (ordered, [X, X]),
    "a view of the input": (ordered, [X, X.view(3, 4)]),
    "the input of another step": (lambda: ordered(of.ConstantScale(2.0)), [X, X]),
    "expanded": (ordered, [X, randn(1, 4).expand(3, 4)]),
    "another dtype": (ordered, [X, randn(3, 4).float()]),
    "two extra inputs": (lambda: ordered(of.AddExtraInput(in_place=True)), [randn(3, 4), X, X]),
    # The residual that a channel carries is the tensor that is to be written over.
    "read later": (
        lambda: of.Sequential(of.Residual(of.ConstantScale(2.0), *ordered())), [X, X]
    ),
    "of inference mode": (ordered, [X, made_in_inference_mode()]),
    "an extra output": (lambda: ordered(Publishes(X)), [randn(3, 4), X]),
    "from a channel": (by_channel, [X]),
    # Each group sees a part of the call alone.
    "from a channel over a module": (lambda: by_channel(nn.Tanh()), [X]),
    "a tensor that the caller gets": (lambda: by_channel(nn.Tanh(), to_caller=True), [X]),
    "read by another group": (
        lambda: of.Sequential(*ordered(), nn.Tanh(), of.AddExtraInput()), [randn(3, 4), X, X]
    ),
    "of an earlier group": (lambda: ordered(of.MakeExtraOutput(), nn.Tanh()), [X, X]),
    "read outside": (
        lambda: of.Sequential(hooked(ordered()), of.AddExtraInput()), [randn(3, 4), X, X]
    ),
    "read behind it": (
        lambda: of.Sequential(hooked(ordered()[0]), of.AddExtraInput()), [randn(3, 4), X, X]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSAFE)
def test_in_place_is_no_order_where_it_would_change_something_else(case: str) -> None:
    make, tensors = UNSAFE[case]
    seq, before = make(), [t.clone() for t in tensors]
    with torch.no_grad():
        y = seq(*tensors)
        for op in seq.modules():
            if isinstance(op, of.AddExtraInput):
                op.in_place = False
        torch.testing.assert_close(y, of.Sequential(*seq)(*before))
    for t, value in zip(tensors, before):
        assert torch.equal(t, value)


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_place_is_no_order_where_a_checkpoint_reads_it_again(reentrant: bool) -> None:
    """The forward of a checkpoint with re-entry records nothing."""
    seq, x, z = ordered(of.ConstantScale(2.0)), randn(3, 4, grad=True), randn(3, 4)
    seq.append(of.Tanh())
    value = z.clone()
    checkpoint(seq, x, z, use_reentrant=reentrant).sum().backward()
    assert torch.equal(z, value)
    torch.testing.assert_close(x.grad, 2 / torch.cosh(2 * x.detach() + value) ** 2)


def test_in_place_is_no_order_while_gradients_are_recorded() -> None:
    seq, x, z = ordered(of.ConstantScale(2.0)), randn(3, 4, grad=True), randn(3, 4)
    value = z.clone()
    seq(x, z).sum().backward()
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
