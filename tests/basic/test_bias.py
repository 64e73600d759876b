from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from opfuser import Bias, OperationContext, Sequential
from opfuser.errors import ArgumentError, InputError, ReadOnlyAttributeError
from opfuser.op import GradNeeds
from opfuser.testing import check_op

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.0, torch.float16: 0.0}

INPUTS: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.randn(5, 7),
    "many rows": lambda: torch.randn(4099, 7),
    "one row": lambda: torch.randn(1, 7),
    "vector": lambda: torch.randn(7),
    "batched": lambda: torch.randn(2, 3, 4, 7),
    "zero rows": lambda: torch.randn(0, 7),
    "transposed": lambda: torch.randn(7, 3, 2).transpose(0, 2),
    "strided": lambda: torch.randn(6, 14)[::2, ::2],
    "expanded": lambda: torch.randn(1, 7).expand(4, 7),
}


def filled(size: int, dtype: torch.dtype = torch.float32) -> Bias:
    op = Bias(size, dtype=dtype)
    nn.init.normal_(op.bias)
    return op


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", INPUTS)
def test_adds_and_differentiates(shape: str, dtype: torch.dtype, device: torch.device) -> None:
    op = filled(7, dtype).to(device)
    x = INPUTS[shape]().to(device, dtype).requires_grad_()
    dy = (0.5 + torch.rand(x.shape)).to(device, dtype)
    y = op(x)
    assert op.bias is not None
    dx, db = torch.autograd.grad(y, [x, op.bias], dy)
    torch.testing.assert_close(y, x + op.bias, rtol=0, atol=0)
    torch.testing.assert_close(dx, dy, rtol=0, atol=0)
    exact = dy.double().reshape(-1, 7).sum(0)
    assert db.dtype == dtype
    # Summed in fp32, then rounded once: half a unit in the last place, and the sum's own error.
    error = (db.double() - exact).abs()
    allowed = (0.501 * torch.finfo(dtype).eps + FLOOR[dtype]) * exact.abs()
    assert bool((error <= allowed + 1e-7 * exact.abs() * (dtype != torch.float64)).all())


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (7,)], ids=str)
def test_check_op(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(shape, device=device)
    check_op(filled(7).to(device), x, dtypes=DTYPES, zero_rows=len(shape) > 1)


@pytest.mark.parametrize("kind", ["expanded", "transposed"])
def test_takes_gradients_of_any_layout_and_leaves_them_alone(kind: str) -> None:
    op = filled(6)
    x = torch.randn(3, 5, 6, requires_grad=True)
    dy = {
        "expanded": torch.randn(6).expand(3, 5, 6),
        "transposed": torch.randn(6, 5, 3).transpose(0, 2),
    }[kind]
    before = dy.clone()
    dx, db = torch.autograd.grad(op(x), [x, op.bias], dy)
    torch.testing.assert_close(dx, before, rtol=0, atol=0)
    torch.testing.assert_close(db, before.sum((0, 1)))
    torch.testing.assert_close(dy, before, rtol=0, atol=0)


def test_output_has_the_dtype_of_the_input() -> None:
    op = filled(3)
    x = torch.randn(2, 3).bfloat16().requires_grad_()
    y = op(x)
    assert op.bias is not None
    assert torch.equal(y, x + op.bias.bfloat16())
    y.sum().backward()
    assert op.bias.grad is not None
    assert op.bias.grad.dtype == torch.float32


def test_hazard_9_bias_gradient_of_a_vector_is_a_tensor_of_its_own() -> None:
    op = filled(3)
    x = torch.randn(3, requires_grad=True)
    dy = torch.ones(3)
    op(x).backward(dy)
    assert op.bias is not None
    assert op.bias.grad is not None
    op.bias.grad.add_(1)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3))
    assert torch.equal(dy, torch.ones(3))


def test_saves_nothing() -> None:
    op, ctx = filled(3), OperationContext()
    ctx.needs = GradNeeds(True, (True,), ())
    with torch.no_grad():
        op.op_forward(
            ctx, torch.randn(2, 3), prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
        )
    assert not ctx.to_save


@pytest.mark.parametrize(("input_", "bias"), [(True, False), (False, True)])
def test_no_work_for_gradients_nobody_reads(input_: bool, bias: bool) -> None:
    op, ctx = filled(3), OperationContext()
    ctx.needs = GradNeeds(input_, (bias,), ())
    dx, (db,) = op.op_backward(ctx, torch.ones(2, 3))
    assert (dx is not None) == input_
    assert (db is not None) == bias


def test_without_a_bias_it_is_the_identity_and_has_no_parameter() -> None:
    op = filled(3)
    x = torch.randn(2, 3, requires_grad=True)
    op(x)
    op.bias = None
    y = Sequential(op)(x)
    torch.testing.assert_close(y, x, rtol=0, atol=0)
    (dx,) = torch.autograd.grad(y, [x], torch.full((2, 3), 2.0))
    assert torch.equal(dx, torch.full((2, 3), 2.0))
    assert list(op.parameters()) == []
    op.reset_parameters()
    op.bias = nn.Parameter(torch.ones(3))
    torch.testing.assert_close(op(x), x + 1)


def test_starts_at_zero_and_resets_to_it() -> None:
    op = Bias(4)
    assert torch.equal(op.bias, torch.zeros(4))
    nn.init.normal_(op.bias)
    op.reset_parameters()
    assert torch.equal(op.bias, torch.zeros(4))


def test_hazard_11_meta_construction_then_materialisation_then_backward() -> None:
    op = Bias(4, device="meta")
    op.to_empty(device="cpu")
    op.reset_parameters()
    op(torch.randn(3, 4)).sum().backward()
    assert op.bias is not None
    assert torch.equal(op.bias.grad, torch.full((4,), 3.0))


def test_functional_call_and_parametrisation() -> None:
    op = filled(3)
    x = torch.zeros(2, 3)
    b = torch.randn(3, requires_grad=True)
    y = functional_call(op, {"bias": b}, (x,))
    torch.testing.assert_close(y, b.detach().expand(2, 3))
    y.sum().backward()
    assert torch.equal(b.grad, torch.full((3,), 2.0))

    class Double(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return 2 * value

    parametrize.register_parametrization(op, "bias", Double())
    original = op.parametrizations.bias.original
    y = op(x)
    torch.testing.assert_close(y, 2 * original.detach().expand(2, 3))
    y.sum().backward()
    assert torch.equal(original.grad, torch.full((3,), 4.0))


def test_reference_and_copy_agree() -> None:
    op = filled(3)
    x = torch.randn(2, 3)
    torch.testing.assert_close(op.reference(x), op(x), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(op)(x), op(x), rtol=0, atol=0)
    op.bias = None
    assert torch.equal(op.reference(x), x)


def test_repr() -> None:
    assert repr(Bias(3)) == "Bias(3)"


@pytest.mark.parametrize("shape", [(2, 1), (2, 4), ()])
def test_wrong_last_dimension_is_an_error_even_if_it_broadcasts(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"must be the size of the bias \(Bias\(3\)\)"):
        Bias(3)(torch.randn(shape))


@pytest.mark.parametrize("name", ["size", "local_size", "tensor_parallel", "tensor_parallel_size"])
def test_what_the_bias_was_made_from_is_fixed(name: str) -> None:
    op = Bias(3)
    value = getattr(op, name)
    with pytest.raises(ReadOnlyAttributeError, match=rf"{name} is fixed.*\(Bias\)"):
        setattr(op, name, not value if isinstance(value, bool) else value + 1)
    setattr(op, name, value)


def test_a_negative_size_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"must be a multiple of the tensor-parallel.*size -1"):
        Bias(-1)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    text = rf"fp32 or fp64 \(Bias\)\. Received: a tensor of {dtype}\. Convert"
    with pytest.raises(InputError, match=text):
        filled(3)(torch.ones(2, 3).to(dtype))
    text = rf"Parameters must be fp16, .*\(Bias\)\. Received: dtype={dtype}"
    with pytest.raises(ArgumentError, match=text):
        Bias(3, dtype=dtype)
