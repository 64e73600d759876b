"""One context for every call, for operations that leave nothing on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser.op import new_context
from tests.engine.toys import grads, randn, same

LEAVING_NOTHING = [
    lambda: opfuser.Bias(3, dtype=torch.float64),
    opfuser.Identity,
]


@pytest.mark.parametrize("make", LEAVING_NOTHING)
def test_the_promise_is_kept(make: Any) -> None:
    op, ctx = make(), new_context(None)
    assert type(op).forward_leaves_nothing
    before = dict(vars(ctx))
    op.op_forward(
        ctx, randn(2, 3), prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
    )
    assert vars(ctx) == before


def test_it_does_not_hold_for_subclasses() -> None:
    class Cube(opfuser.Bias):
        """Saves its input, unlike its parent."""

        def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
            ctx.save_for_backward(input_)
            return 2 * input_**3

        def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[None]]:
            (x,) = ctx.saved_tensors
            return grad_output * 6 * x**2, (None,)

    seq = opfuser.Sequential(Cube(3, dtype=torch.float64))
    first, second = randn(2, 3, grad=True), randn(2, 3, grad=True)
    y, z = seq(first), seq(second)
    same(grads(y, [first]), grads(2 * first**3, [first]))
    same(grads(z, [second]), grads(2 * second**3, [second]))
