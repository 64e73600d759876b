"""What hands tensors on: sums, extra outputs, factors, shapes, identities."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opfuser import (
    AddExtraInput,
    ConstantScale,
    Identity,
    MakeExtraOutput,
    OperationContext,
    Quantize,
    Reshape,
)
from opfuser.errors import InputError
from opfuser.op import BasicOperation, GradNeeds
from tests.basic.attributes import results
from tests.basic.values import DTYPES

VALUES: dict[str, tuple[BasicOperation, Any]] = {
    "AddExtraInput": (AddExtraInput(), torch.add),
    "MakeExtraOutput": (MakeExtraOutput(), lambda x: (x * 1, x * 1)),
    "MakeExtraOutput in place": (MakeExtraOutput(in_place=True), lambda x: (x * 1, x * 1)),
    **{f"ConstantScale {c}": (ConstantScale(c), lambda x, c=c: x * c) for c in (0.37, -2, 0.0, 1)},
    "Identity": (Identity(), lambda x: x * 1),
    "Quantize": (Quantize(), lambda x: x * 1),
    "Quantize backward": (Quantize(False, True), lambda x: x * 1),
    "Reshape": (Reshape((-1, 4)), lambda x: x.reshape(-1, 4)),
}


class Plain(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


@pytest.mark.parametrize("name", VALUES)
def test_values_and_gradients_are_those_of_torch_to_the_bit(
    name: str, device: torch.device
) -> None:
    op, function = VALUES[name]
    for dtype, shape in itertools.product(DTYPES, ((7, 8), (0, 4), (2, 3, 4))):
        inputs = [torch.randn(shape, device=device).to(dtype) for _ in range(2)]
        inputs = inputs[: 1 + op.num_extra_inputs]
        before = [t.clone() for t in inputs]
        for module in (op, Plain(op.reference)):
            got, wanted = results(module, inputs), results(Plain(function), inputs)
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        torch.testing.assert_close(inputs, before, rtol=0, atol=0)


def test_a_sum_mixes_dtypes_as_torch_does() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    extra = torch.randn(3, 4).bfloat16().requires_grad_()
    y = AddExtraInput()(x, extra)
    torch.testing.assert_close(y, x + extra, rtol=0, atol=0)
    dx, dextra = torch.autograd.grad(y.sum(), (x, extra))
    assert (dx.dtype, dextra.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(dextra, torch.ones_like(extra))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_constant_scale_promotes_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1]).to(dtype)
    torch.testing.assert_close(ConstantScale(0.5)(x), x * 0.5, rtol=0, atol=0)


def test_constant_scale_after_a_forward_that_left_no_scale() -> None:
    ctx = OperationContext()
    ctx.needs = GradNeeds(True, (), ())
    dx, _ = ConstantScale(2.0).op_backward(ctx, torch.ones(3))
    assert dx is not None
    assert dx.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("start", "shape", "end"),
    [
        ((6, 4), (3, 8), (3, 8)),
        ((6, 4), -1, (24,)),
        ((0, 6), (-1, 2, 3), (0, 2, 3)),
        ((0, 6), torch.Size((0, 3)), (0, 3)),
        ((1,), (), ()),
        ((2, 3), iter([1, -1, 2]), (1, 3, 2)),
    ],
    ids=["several", "one", "no rows", "a torch.Size", "no dimensions", "an iterator"],
)
def test_reshape(start: tuple[int, ...], shape: Any, end: tuple[int, ...]) -> None:
    op = Reshape(shape)

    def layouts(shape: tuple[int, ...]) -> list[Tensor]:
        mirrored = torch.randn(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
        return [torch.randn(shape), mirrored, torch.randn(()).expand(shape)]

    for value in layouts(start):
        x = value.detach().requires_grad_()
        y = op(x)
        torch.testing.assert_close(y, x.reshape(end), rtol=0, atol=0)
        for dy in layouts(end):
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            torch.testing.assert_close(dx, dy.reshape(start), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("op", "shapes", "text"),
    [
        (Reshape((4, 4)), [(5, 3)], r"as many elements.*Received: input \("),
        (Reshape((0, -1)), [(0, 3)], r"as many elements.*Received: input \("),
        (AddExtraInput(), [(4, 3), (3,)], r"same shape.*input \(4, 3\), extra input \(3,\)"),
    ],
)
def test_inputs_that_do_not_fit(op: BasicOperation, shapes: list[Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        op(*map(torch.ones, shapes))
