"""Hazards 1 to 10: wrong results without an error.

Every comparison is with plain torch in float64, so that a stale, overwritten or missing tensor
cannot hide behind rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import opfuser as of
from tests.contract.tensors import F64, close, fill, leaf, rand

# Fusions may look at the dtype, so a hazard of a fused kernel may show in one dtype only.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture(params=["fused", "unfused"])
def fusing(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the fusions of the library, and without: their kernels differ."""
    with of.disable(*["*"] * (request.param == "unfused")):
        yield


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
def test_hazard_01_in_place_add_of_residual_channel_after_linear(
    dtype: torch.dtype, bias: bool
) -> None:
    make, add = of.MakeExtraOutput(), of.AddExtraInput(in_place=True)
    make.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    linear = fill(of.Linear(6, 6, bias=bias, dtype=dtype, device="cpu"))
    model = of.Sequential(make, linear, add)
    x = rand(5, 6, dtype=dtype, grad=True)
    dy = rand(5, 6, dtype=dtype)
    before = x.detach().clone()
    y = model(x)
    y.backward(dy)
    x64, w64 = leaf(x), leaf(linear.weight)
    b64 = leaf(linear.bias) if bias else None
    y64 = x64 + F.linear(x64, w64, b64)
    y64.backward(dy.double())
    tolerance = TOLERANCE[dtype]
    assert torch.equal(x, before), "the caller's tensor was overwritten"
    close(y, y64, tolerance)
    close(x.grad, x64.grad, tolerance)
    close(linear.weight.grad, w64.grad, tolerance)
    if b64 is not None:
        close(linear.bias.grad, b64.grad, tolerance)


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_hazard_01_in_place_add_of_the_input_itself(
    dtype: torch.dtype, scale: float | None
) -> None:
    linear = fill(of.Linear(6, 6, bias=False, dtype=dtype, device="cpu"))
    middle = [] if scale is None else [of.ConstantScale(scale)]
    model = of.Sequential(linear, *middle, of.AddExtraInput(in_place=True))
    x = rand(5, 6, dtype=dtype, grad=True)
    before, dy = x.detach().clone(), rand(5, 6, dtype=dtype)
    y = model(x, x)
    y.backward(dy)
    x64, w64 = leaf(x), leaf(linear.weight)
    y64 = F.linear(x64, w64) * (1.0 if scale is None else scale) + x64
    y64.backward(dy.double())
    assert torch.equal(x, before)
    close(y, y64, TOLERANCE[dtype])
    close(x.grad, x64.grad, TOLERANCE[dtype])
    close(linear.weight.grad, w64.grad, TOLERANCE[dtype])


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("grad", [False, True])
def test_hazard_01_in_place_add_into_a_tensor_that_is_read_later(grad: bool) -> None:
    """Without gradients the caller's order is followed, unless that tensor is still to be read."""
    linear = fill(of.Linear(6, 6, **F64))
    model = of.Sequential(linear, of.AddExtraInput(in_place=True))
    x, h = rand(5, 6, grad=grad), rand(5, 6)
    before = h.clone()
    with torch.set_grad_enabled(grad):
        y = model(x, h)
        close(y, F.linear(x, linear.weight, linear.bias) + before)
        assert torch.equal(h, before if grad else y)
        assert (h.data_ptr() == y.data_ptr()) == (not grad)
        later = of.Residual(*model)
        y, expected = later(x, x), x + F.linear(x, linear.weight, linear.bias) + x
        close(y, expected)


class Sigmoid(of.BasicOperation):
    """Saves its own output, as sigmoid, exp and softmax do."""

    def op_forward(self, ctx: of.OperationContext, input_: Tensor, **unused: Any) -> Tensor:
        y = torch.sigmoid(input_)
        if ctx.requires_grad:
            ctx.save_for_backward(y)
        return y

    def op_backward(
        self, ctx: of.OperationContext, grad_output: Tensor
    ) -> tuple[Tensor, tuple[()]]:
        (y,) = ctx.saved_tensors
        return grad_output * y * (1 - y), ()


FOLLOWERS = {
    "BasicLinear": (lambda: of.BasicLinear(8, 8, **F64), lambda op, x: F.linear(x, op.weight)),
    "Linear": (lambda: of.Linear(8, 8, **F64), lambda op, x: F.linear(x, op.weight, op.bias)),
    "GELU": (of.GELU, lambda op, x: F.gelu(x, approximate="tanh")),
    "SiLU": (of.SiLU, lambda op, x: F.silu(x)),
    "SwiGLU": (of.SwiGLU, lambda op, x: F.silu(x[..., :4]) * x[..., 4:]),
    "RMSNorm": (
        lambda: of.RMSNorm(8, **F64),
        lambda op, x: F.rms_norm(x, (8,), op.weight, op.eps),
    ),
    "LayerNorm": (
        lambda: of.LayerNorm(8, **F64),
        lambda op, x: F.layer_norm(x, (8,), op.weight, op.bias, op.eps),
    ),
    "L2Normalization": (
        of.L2Normalization,
        lambda op, x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + op.eps),
    ),
}


@pytest.mark.parametrize("name", FOLLOWERS)
def test_hazard_02_saved_output_survives_the_operation_that_frees_it(name: str) -> None:
    make, formula = FOLLOWERS[name]
    op = fill(make())
    x = rand(5, 8, grad=True)
    # The sigmoid's output reaches the caller too: it must survive there as well.
    model = of.Sequential(Sigmoid(), of.MakeExtraOutput(), op)
    y, h = model(x)
    kept, dy = h.detach().clone(), rand(*y.shape)
    y.backward(dy)
    x64 = leaf(x)
    formula(op, torch.sigmoid(x64)).backward(dy)
    close(x.grad, x64.grad)
    assert torch.equal(h, kept), "storage of an output was cleared"
    assert x.untyped_storage().nbytes() > 0


def _scaled_norm_linear() -> of.Sequential:
    return fill(of.Sequential(of.RMSNorm(6, **F64), of.Linear(6, 4, **F64), of.ConstantScale(0.5)))


def _scaled_norm_linear_64(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.rms_norm(x, (6,), tensors["0.weight"], 1e-5)
    return 0.5 * F.linear(h, tensors["1.weight"], tensors["1.bias"])


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "1.bias"])
def test_hazard_03_parameter_replaced_after_the_first_call(name: str) -> None:
    model = _scaled_norm_linear()
    x, dy = rand(5, 6, grad=True), rand(5, 4)
    model(x).backward(dy)
    owner, _, attribute = name.rpartition(".")
    old = model.get_parameter(name)
    model.zero_grad()
    x.grad = None
    new = nn.Parameter(rand(*old.shape))
    setattr(model.get_submodule(owner), attribute, new)
    y = model(x)
    y.backward(dy)
    tensors = {key: leaf(p) for key, p in model.named_parameters()}
    x64 = leaf(x)
    y64 = _scaled_norm_linear_64(tensors, x64)
    y64.backward(dy)
    close(y, y64)
    close(x.grad, x64.grad)
    assert old.grad is None, "the gradient went to the parameter that was replaced"
    for key, p in model.named_parameters():
        close(p.grad, tensors[key].grad)


def test_hazard_03_parameter_replaced_between_forward_and_backward() -> None:
    model = _scaled_norm_linear()
    x, dy = rand(5, 6, grad=True), rand(5, 4)
    y = model(x)
    old = dict(model.named_parameters())
    tensors = {key: leaf(p) for key, p in old.items()}
    model[0].weight = nn.Parameter(rand(6))
    model[1].weight = nn.Parameter(rand(4, 6))
    y.backward(dy)
    x64 = leaf(x)
    _scaled_norm_linear_64(tensors, x64).backward(dy)
    close(x.grad, x64.grad)
    for key, p in old.items():
        close(p.grad, tensors[key].grad)
    assert model[1].weight.grad is None


def test_hazard_03_functional_call() -> None:
    model = _scaled_norm_linear()
    x, dy = rand(5, 6, grad=True), rand(5, 4)
    model(x)
    # Not leaves: gradients must flow on to what the given tensors are made of.
    roots = {key: rand(*p.shape, grad=True) for key, p in model.named_parameters()}
    given = {key: root * 2 for key, root in roots.items()}
    y = torch.func.functional_call(model, given, (x,))
    y.backward(dy)
    x64, roots64 = leaf(x), {key: leaf(root) for key, root in roots.items()}
    y64 = _scaled_norm_linear_64({key: root * 2 for key, root in roots64.items()}, x64)
    y64.backward(dy)
    close(y, y64)
    close(x.grad, x64.grad)
    for key, root in roots.items():
        close(root.grad, roots64[key].grad)
    assert all(p.grad is None for p in model.parameters())


class Tripled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 3 * w


@pytest.mark.parametrize("when", ["before the first call", "after it"])
def test_hazard_03_parametrised_weights(when: str) -> None:
    model = _scaled_norm_linear()
    x, dy = rand(5, 6, grad=True), rand(5, 4)
    plain = {key: leaf(p) for key, p in model.named_parameters()}
    if when == "after it":
        model(x)
    parametrize.register_parametrization(model[0], "weight", Tripled())
    parametrize.register_parametrization(model[1], "weight", Tripled())
    y = model(x)
    y.backward(dy)
    x64 = leaf(x)
    tensors = {**plain, "0.weight": 3 * plain["0.weight"], "1.weight": 3 * plain["1.weight"]}
    y64 = _scaled_norm_linear_64(tensors, x64)
    y64.backward(dy)
    close(y, y64)
    close(x.grad, x64.grad)
    close(model[0].parametrizations.weight.original.grad, plain["0.weight"].grad)
    close(model[1].parametrizations.weight.original.grad, plain["1.weight"].grad)
    close(model[1].bias.grad, plain["1.bias"].grad)
