from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser import (
    ClampedSwiGLU,
    OperationContext,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    Sequential,
    SiTUGLU,
    SReLU,
    SwiGLU,
)
from opfuser.errors import ArgumentError, InputError, OpKwargsError
from opfuser.kernels.cpu_blocks import BLOCK
from opfuser.op import GradNeeds
from opfuser.testing import check_op
from tests.kernels.activations import assert_rounded_once

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
GATED = [ScaledSwiGLU, ScaledSiTUGLU, ScaledClampedQGeGLU]
CLASSES = [*GATED, ScaledSReLU]
OPS = [
    pytest.param(op, id=name)
    for name, op in {
        "swiglu": ScaledSwiGLU(),
        "swiglu_blocks": ScaledSwiGLU(2),
        "situglu": ScaledSiTUGLU(),
        "situglu_blocks": ScaledSiTUGLU(1),
        "clamped": ScaledClampedQGeGLU(),
        "clamped_low": ScaledClampedQGeGLU(limit=0.75, alpha=1.0, glu_linear_offset=0.0),
        "srelu": ScaledSReLU(),
    }.items()
]


@pytest.mark.parametrize("shape", [(7, 12), (1, 4), (2, 3, 8)])
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients(op: Any, shape: tuple[int, ...], device: torch.device) -> None:
    x, scales = torch.randn(shape, device=device), torch.randn(shape[:-1], device=device)
    check_op(op, 2 * x, scales, dtypes=DTYPES, zero_rows=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_half_precision_is_rounded_once(op: Any, dtype: torch.dtype) -> None:
    # The last is worked on in blocks of rows, the last of them smaller.
    for rows, cols in ((7, 12), (0, 8), (2 * BLOCK // 1004 + 1, 1004)):
        x = (2 * torch.randn(rows, cols + 3)).to(dtype)[:, :cols].requires_grad_()
        scales = torch.randn(2 * rows).to(dtype)[::2].requires_grad_()
        exact = [t.detach().double().requires_grad_() for t in (x, scales)]
        y, exact_y = op(x, scales), op.reference(*exact)
        dy = torch.randn(y.shape[-1], rows).to(dtype).t()
        grads = torch.autograd.grad(y, (x, scales), dy)
        exact_dx, exact_dscales = torch.autograd.grad(exact_y, exact, dy.double())
        assert_rounded_once(y.detach(), exact_y.detach(), f"y, {rows} rows")
        assert_rounded_once(grads[0], exact_dx, f"dx, {rows} rows")
        assert_rounded_once(grads[1], exact_dscales, f"dscales, {rows} rows")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_fp32_scales_are_cast_to_the_dtype_of_the_input(
    op: Any, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(5, 12, device=device).to(dtype).requires_grad_()
    scales = torch.rand(5, device=device).requires_grad_()
    y = op(x, scales)
    torch.testing.assert_close(y, op(x, scales.to(dtype)), rtol=0, atol=0)
    dx, dscales = torch.autograd.grad(y.float().sum(), (x, scales))
    assert (y.dtype, dx.dtype, dscales.dtype) == (dtype, dtype, torch.float32)


@pytest.mark.parametrize("op", OPS)
def test_autocast(op: Any, device: torch.device) -> None:
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, torch.randn(5, 12, device=device), torch.rand(5, device=device))


@pytest.mark.parametrize(
    ("scaled", "plain"),
    [
        (ScaledSwiGLU(), SwiGLU()),
        (ScaledSwiGLU(3), SwiGLU(glu_interleave_size=3)),
        (ScaledSiTUGLU(beta1=2.0, beta2=9.0), SiTUGLU(beta1=2.0, beta2=9.0)),
        (ScaledClampedQGeGLU(limit=0.5), ClampedSwiGLU(limit=0.5)),
        (ScaledSReLU(), SReLU()),
    ],
)
def test_scales_the_rows_of_the_plain_operation(scaled: Any, plain: Any) -> None:
    x, scales = torch.randn(4, 3, 12), torch.randn(4, 3)
    torch.testing.assert_close(scaled(x, scales), plain(x) * scales[..., None])


@pytest.mark.parametrize("needs_input", [False, True])
@pytest.mark.parametrize("needs_scales", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_gradients_nobody_reads_are_not_computed(
    op: Any, needs_scales: bool, needs_input: bool
) -> None:
    ctx = OperationContext()
    ctx.needs = GradNeeds(needs_input, (), (needs_scales,))
    y, _ = op.fuser_forward(
        [ctx],
        torch.randn(3, 12),
        basic_op_extra_inputs=[[torch.rand(3)]],
        prev_op_grad_output_quantizer=None,
        next_op_input_quantizer=None,
        basic_op_kwargs=[{}],
    )
    ctx.saved_tensors = ctx.to_save
    dx, params, extras = op.fuser_backward(
        [ctx], torch.ones_like(y), basic_op_grad_extra_outputs=[[]]
    )
    ((dscales,),) = extras
    assert (dx is not None, dscales is not None) == (needs_input, needs_scales)
    assert params == [()]


def test_summing_many_bf16_products_loses_nothing() -> None:
    x = torch.full((2, 8192), 1.0, dtype=torch.bfloat16)
    scales = torch.ones(2, dtype=torch.float32, requires_grad=True)
    y = ScaledSReLU()(x, scales)
    (dscales,) = torch.autograd.grad(y, scales, torch.ones_like(y))
    assert dscales.tolist() == [8192, 8192]


@pytest.mark.parametrize("op", OPS)
def test_copies_compute_the_same(op: Any) -> None:
    x, scales = torch.randn(5, 12), torch.rand(5)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        torch.testing.assert_close(twin(x, scales), op(x, scales), rtol=0, atol=0)


def test_arguments_are_readable() -> None:
    op = ScaledClampedQGeGLU(4, limit=5.0, alpha=1.5, glu_linear_offset=0.5)
    assert (op.limit, op.alpha, op.glu_linear_offset, op.glu_interleave_size) == (5, 1.5, 0.5, 4)
    situ = ScaledSiTUGLU(2)
    assert (situ.beta1, situ.beta2, situ.glu_interleave_size) == (4, 25, 2)


@pytest.mark.parametrize("shape", [(3,), (4, 1), ()])
@pytest.mark.parametrize("cls", CLASSES)
def test_scales_must_be_one_per_row(cls: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=rf"without its last .*\({cls.__name__}\).*input \(4, 6\)"):
        cls()(torch.ones(4, 6), torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("cls", CLASSES)
def test_inputs_of_other_dtypes_are_refused(cls: Any, dtype: torch.dtype) -> None:
    text = rf"fp32 or fp64 \({cls.__name__}\)\. Received: a tensor of {dtype}\. Convert"
    with pytest.raises(InputError, match=text):
        cls()(torch.ones(3, 4).to(dtype), torch.ones(3))


def test_an_input_needs_a_dimension() -> None:
    with pytest.raises(InputError, match=r"\(ScaledSReLU\)\. Received: input \(\)"):
        ScaledSReLU()(torch.ones(()), torch.ones(()))


@pytest.mark.parametrize("cls", GATED)
def test_last_dimension_must_divide_into_gates_and_linear_units(cls: Any) -> None:
    with pytest.raises(InputError, match=rf"multiple of 2, .*\({cls.__name__}\).*\(3, 5\)"):
        cls()(torch.ones(3, 5), torch.ones(3))
    with pytest.raises(InputError, match=rf"multiple of 4, .*\({cls.__name__}\).*\(3, 6\)"):
        cls(2)(torch.ones(3, 6), torch.ones(3))


@pytest.mark.parametrize("cls", GATED)
def test_interleave_size_must_be_positive(cls: Any) -> None:
    with pytest.raises(ArgumentError, match=r"glu_interleave_size must be positive"):
        cls(0)


def test_parameters_of_the_functions_are_checked() -> None:
    with pytest.raises(ArgumentError, match="beta2 must be finite and positive"):
        ScaledSiTUGLU(beta2=0.0)
    with pytest.raises(ArgumentError, match="limit must be positive"):
        ScaledClampedQGeGLU(limit=-1.0)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("asked", [True, False])
def test_the_output_is_recomputed_and_not_saved(cls: Any, asked: bool) -> None:
    op = cls(activation_recompute_in_mlp=asked)
    assert op.activation_recompute_in_mlp is asked
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x, scales = torch.randn(3, 8, requires_grad=True), torch.rand(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = Sequential(op)(x, scales)
    assert [t.data_ptr() for t in saved] == [x.data_ptr(), scales.data_ptr()]
    y.sum().backward()
    expected = torch.autograd.grad(op.reference(x, scales).sum(), (x, scales))
    torch.testing.assert_close((x.grad, scales.grad), expected)


@pytest.mark.parametrize("cls", CLASSES)
def test_keywords_are_refused(cls: Any) -> None:
    with pytest.raises(OpKwargsError, match=rf"{cls.__name__} takes no keywords.*alpha"):
        Sequential(cls())(torch.ones(2, 4), torch.ones(2), op_kwargs={0: {"alpha": 2}})
