from __future__ import annotations

import copy
import pickle
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import (
    AddExtraInput,
    ConstantScale,
    Identity,
    MakeExtraOutput,
    OperationContext,
    Quantize,
    Reshape,
    Sequential,
)
from opfuser.errors import ArgumentError, ArgumentTypeError, InputError, OpKwargsError
from opfuser.op import GradNeeds
from opfuser.testing import check_op

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(7, 5), (1, 3), (0, 4), (2, 3, 5)]


def leaf(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


def layouts(shape: tuple[int, ...]) -> list[Tensor]:
    """Gradients of one shape: contiguous, transposed in memory, and expanded from one number."""
    return [
        torch.randn(shape),
        torch.randn(shape[::-1]).permute(tuple(reversed(range(len(shape))))),
        torch.randn(()).expand(shape),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_add_extra_input(
    shape: tuple[int, ...], dtype: torch.dtype, in_place: bool, device: torch.device
) -> None:
    x, extra = leaf(shape, dtype, device), leaf(shape, dtype, device)
    before = x.detach().clone(), extra.detach().clone()
    op = AddExtraInput(in_place=in_place)
    y = op(x, extra)
    torch.testing.assert_close(y, before[0] + before[1], rtol=0, atol=0)
    dy = torch.randn_like(y)
    dx, dextra = torch.autograd.grad(y, (x, extra), dy)
    for grad in (dx, dextra):
        torch.testing.assert_close(grad, dy, rtol=0, atol=0)
    torch.testing.assert_close(x.detach(), before[0], rtol=0, atol=0)
    torch.testing.assert_close(extra.detach(), before[1], rtol=0, atol=0)
    torch.testing.assert_close(op.reference(x, extra), y, rtol=0, atol=0)


def test_add_extra_input_with_one_tensor_twice() -> None:
    x = leaf((4, 3))
    kept = x.detach().clone()
    model = Sequential(opfuser.Linear(3, 3), AddExtraInput(in_place=True))
    model(x, x).square().sum().backward()
    got = x.grad, model[0].weight.grad
    weight, bias = model[0].weight, model[0].bias
    loss = (nn.functional.linear(x, weight, bias) + x).square().sum()
    for grad, expected in zip(got, torch.autograd.grad(loss, (x, weight))):
        torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(x.detach(), kept, rtol=0, atol=0)


def test_add_extra_input_mixes_dtypes_as_torch_does() -> None:
    x, extra = leaf((3, 4)), leaf((3, 4), torch.bfloat16)
    y = AddExtraInput()(x, extra)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert extra.grad is not None
    assert extra.grad.dtype == torch.bfloat16
    torch.testing.assert_close(extra.grad, torch.ones_like(extra))


def test_add_extra_input_refuses_to_broadcast() -> None:
    with pytest.raises(InputError, match=r"same shape.*input \(4, 3\), extra input \(3,\)"):
        AddExtraInput()(torch.ones(4, 3), torch.ones(3))


@pytest.mark.parametrize(
    "op", [AddExtraInput(), MakeExtraOutput()], ids=lambda op: type(op).__name__
)
def test_operations_with_extra_tensors_refuse_keywords(op: Any) -> None:
    extras = (torch.ones(2),) * op.num_extra_inputs
    with pytest.raises(OpKwargsError, match=r"takes no keywords\. Received: alpha"):
        Sequential(op)(torch.ones(2), *extras, op_kwargs={0: {"alpha": 2}})


@pytest.mark.parametrize(
    "op",
    [Identity(), ConstantScale(2.0), Reshape((-1,)), Quantize()],
    ids=lambda op: type(op).__name__,
)
def test_operations_refuse_keywords(op: Any) -> None:
    with pytest.raises(OpKwargsError, match="alpha"):
        Sequential(op)(torch.ones(2), op_kwargs={0: {"alpha": 2}})


@pytest.mark.parametrize("used", ["both", "output", "extra"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_make_extra_output(
    used: str, in_place: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = leaf((5, 3), dtype, device)
    op = MakeExtraOutput(in_place=in_place)
    y, extra = op(x)
    torch.testing.assert_close(y, x, rtol=0, atol=0)
    torch.testing.assert_close(extra, x, rtol=0, atol=0)
    dy, dextra = torch.randn_like(x), torch.randn_like(x)
    kept = dy.clone(), dextra.clone()
    outputs, grads = {
        "both": ([y, extra], [dy, dextra]),
        "output": ([y], [dy]),
        "extra": ([extra], [dextra]),
    }[used]
    (dx,) = torch.autograd.grad(outputs, x, grads)
    torch.testing.assert_close(dx, sum(grads[1:], grads[0]), rtol=0, atol=0)
    torch.testing.assert_close(dy, kept[0], rtol=0, atol=0)
    torch.testing.assert_close(dextra, kept[1], rtol=0, atol=0)


def test_make_extra_output_reference() -> None:
    x = leaf((2, 3))
    y, extra = MakeExtraOutput().reference(x)
    (dx,) = torch.autograd.grad([y, extra], x, [torch.ones_like(y), torch.full_like(y, 2.0)])
    torch.testing.assert_close(dx, torch.full_like(x, 3.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [0.37, -2, 0.0, 1])
def test_constant_scale(
    shape: tuple[int, ...], dtype: torch.dtype, scale: float, device: torch.device
) -> None:
    x = leaf(shape, dtype, device)
    op = ConstantScale(scale)
    y = op(x)
    torch.testing.assert_close(y, x * scale, rtol=0, atol=0)
    torch.testing.assert_close(op.reference(x), y, rtol=0, atol=0)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, dy * scale, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [Fraction(1, 2), np.float32(0.5), np.float64(0.5)], ids=repr)
def test_constant_scale_of_other_real_numbers_is_a_float(scale: Any) -> None:
    op = ConstantScale(scale)
    assert type(op.scale) is float
    assert op.scale == 0.5
    x = leaf((3, 4))
    y = Sequential(Identity(), op)(x)
    torch.testing.assert_close(y, x * 0.5, rtol=0, atol=0)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [0.5]


@pytest.mark.parametrize(("scale", "kind"), [(True, float), (np.int64(1), int)], ids=repr)
def test_constant_scale_of_other_integers_is_a_number(scale: Any, kind: type) -> None:
    assert type(ConstantScale(scale).scale) is kind
    assert ConstantScale(scale).scale == 1


def test_constant_scale_refuses_a_tensor() -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"must be a real Python number .*Received: a tensor"
    ):
        ConstantScale(torch.tensor(2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", ["a", None, 1j])
def test_constant_scale_refuses_what_is_no_real_number(scale: Any) -> None:
    text = rf"must be a real Python number \(ConstantScale\)\. Received: {scale!r}\."
    with pytest.raises(ArgumentTypeError, match=text):
        ConstantScale(scale)


def test_constant_scale_of_the_backward_is_that_of_its_forward() -> None:
    op = ConstantScale(2.0)
    model = Sequential(Identity(), op)
    first, second = leaf((3, 4)), leaf((3, 4))
    y = model(first)
    op.scale = 10.0
    z = model(second)
    op.scale = 100.0
    (dx,) = torch.autograd.grad(y.sum(), first)
    (dz,) = torch.autograd.grad(z.sum(), second)
    assert dx.unique().tolist() == [2]
    assert dz.unique().tolist() == [10]


def test_constant_scale_after_a_forward_that_left_no_scale() -> None:
    ctx = OperationContext()
    ctx.needs = GradNeeds(True, (), ())
    dx, _ = ConstantScale(2.0).op_backward(ctx, torch.ones(3))
    assert dx is not None
    assert dx.tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_constant_scale_promotes_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1]).to(dtype)
    torch.testing.assert_close(ConstantScale(0.5)(x), x * 0.5, rtol=0, atol=0)


@pytest.mark.parametrize("op", [Identity(), Quantize(), Quantize(False, True)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_identities(op: Any, shape: tuple[int, ...]) -> None:
    x = leaf(shape)
    for dy in layouts(shape):
        y = op(x)
        torch.testing.assert_close(y, x, rtol=0, atol=0)
        torch.testing.assert_close(op.reference(x), x, rtol=0, atol=0)
        kept = dy.clone()
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(dx, kept, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("start", "shape", "end"),
    [
        ((6, 4), (3, 8), (3, 8)),
        ((6, 4), (-1,), (24,)),
        ((0, 6), (-1, 2, 3), (0, 2, 3)),
        ((0, 6), (0, 3), (0, 3)),
        ((1,), (), ()),
        ((2, 3), [1, -1, 2], (1, 3, 2)),
    ],
)
def test_reshape(start: tuple[int, ...], shape: Any, end: tuple[int, ...]) -> None:
    op = Reshape(shape)
    for value in layouts(start):
        x = value.detach().requires_grad_()
        y = op(x)
        assert y.shape == end
        torch.testing.assert_close(y, x.reshape(end), rtol=0, atol=0)
        torch.testing.assert_close(op.reference(x), y, rtol=0, atol=0)
        for dy in layouts(end):
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            torch.testing.assert_close(dx, dy.reshape(start), rtol=0, atol=0)


def test_reshape_takes_one_size() -> None:
    assert Reshape(6).shape == (6,)
    assert Reshape(-1)(torch.ones(2, 3)).shape == (6,)


@pytest.mark.parametrize("shape", [2.5, (2.0, 3), "6", None])
def test_reshape_refuses_sizes_that_are_no_integers(shape: Any) -> None:
    text = re.escape(f"iterable of integers (Reshape). Received: shape={shape!r}.")
    with pytest.raises(ArgumentTypeError, match=text):
        Reshape(shape)


def test_reshape_takes_any_iterable() -> None:
    assert Reshape(iter((2, 3))).shape == (2, 3)
    assert Reshape(torch.Size((2, 3))).shape == (2, 3)


@pytest.mark.parametrize("shape", [(-1, -1), (2, -2)])
def test_reshape_refuses_impossible_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"at most one -1 \(Reshape\).*shape="):
        Reshape(shape)


@pytest.mark.parametrize(("start", "shape"), [((5, 3), (4, 4)), ((0, 3), (0, -1))])
def test_reshape_refuses_other_inputs(start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"as many elements.*Received: input \("):
        Reshape(shape)(torch.ones(start))


@pytest.mark.parametrize(
    "op",
    [
        AddExtraInput(in_place=True),
        MakeExtraOutput(),
        ConstantScale(3.0),
        Identity(),
        Quantize(),
        Reshape((-1, 2)),
    ],
    ids=lambda op: type(op).__name__,
)
def test_copies_behave_alike(op: Any) -> None:
    x = torch.randn(3, 4)
    extras = (torch.randn(3, 4),) * op.num_extra_inputs
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        torch.testing.assert_close(twin(x, *extras), op(x, *extras))
        assert not twin.state_dict()


def test_sequence_of_all() -> None:
    model = Sequential(
        Identity(), ConstantScale(0.5), MakeExtraOutput(), Reshape((3, 8)), Quantize(),
        Reshape((6, 4)), AddExtraInput(),
    )  # fmt: skip
    x, extra = leaf((6, 4)), leaf((6, 4))
    y, tap = model(x, extra)
    torch.testing.assert_close(y, 0.5 * x + extra)
    torch.testing.assert_close(tap, 0.5 * x)
    (y.square().sum() + tap.sum()).backward()
    torch.testing.assert_close(x.grad, y.detach() + 0.5)
    torch.testing.assert_close(extra.grad, 2 * y.detach())


@pytest.mark.parametrize(
    "op",
    [
        AddExtraInput(),
        MakeExtraOutput(),
        ConstantScale(0.3),
        Identity(),
        Quantize(),
        Reshape((-1, 2, 4)),
    ],
    ids=lambda op: type(op).__name__,
)
def test_checked_like_a_users_operation(op: Any, device: torch.device) -> None:
    extras = (torch.randn(5, 8, device=device),) * op.num_extra_inputs
    x = torch.randn(5, 8, device=device)
    check_op(op, x, *extras, dtypes=DTYPES, zero_rows=True)
