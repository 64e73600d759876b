"""check_op passes what is right, however it is called."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import ArgumentError, ArgumentTypeError
from opfuser.op import BasicOperation
from opfuser.testing import check_op
from tests.checks.spoilt import Scaled, spoilt
from tests.engine.toys import Mixed

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3), (1, 3), (3,)])
def test_a_right_operation_passes(device: torch.device, shape: tuple[int, ...]) -> None:
    x, e = torch.randn(2, *shape, device=device)
    check_op(Scaled().to(device), x, dtypes=DTYPES, zero_rows=len(shape) > 1)
    check_op(Mixed(), x, e, dtypes=DTYPES, zero_rows=True)


def test_the_operation_given_is_left_alone() -> None:
    op, x = Scaled(), torch.randn(4, 3, requires_grad=True)
    op.w.requires_grad_(False)
    check_op(op, x, dtypes=(torch.float64,))
    assert op.w.dtype is torch.float32
    assert op.w.grad is None
    assert x.grad is None
    mixed = Mixed()
    check_op(mixed, x, x)
    mixed.set_extra_input_channel(0, "still open")


def test_keywords_reach_forward_and_reference() -> None:
    class Times(opfuser.Identity):
        def op_forward(self, ctx: Any, input_: Tensor, *, times: float, **kwargs: Any) -> Tensor:
            ctx.times = times
            return input_ * times

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output * ctx.times, ()

        def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
            return input_ * kwargs["times"]

    check_op(Times(), torch.randn(4, 3), kwargs={"times": 3.0})
    with pytest.raises(TypeError, match="times"):
        check_op(Times(), torch.randn(4, 3))


def test_registered_fusions_do_not_interfere() -> None:
    class Wrong(opfuser.FusedOperation):
        def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
            return input_ * 3, [()]

    with opfuser.register_forward_fusion(lambda ops: [Wrong(ops)], name="wrong"):
        check_op(opfuser.Identity(), torch.randn(4, 3))


def test_integer_inputs_have_no_gradient() -> None:
    class Lookup(BasicOperation):
        class Saved(NamedTuple):
            index: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(7, 3))

        def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
            if ctx.requires_grad:
                ctx.save_for_backward(input_)
            return self.table[input_]

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            (index,) = ctx.saved_tensors
            dtable = grad_output.new_zeros(7, 3)
            return None, (dtable.index_put((index,), grad_output, accumulate=True),)

        def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
            return nn.functional.embedding(input_, self.table)

    check_op(Lookup(), torch.tensor([1, 5, 1, 0]), zero_rows=True)


def test_under_autocast() -> None:
    x = torch.randn(5, 6)
    wrong = spoilt(Scaled, compute=lambda op, ctx, x: op.right(x * 1.05))()
    with torch.autocast("cpu", torch.bfloat16):
        check_op(opfuser.BasicLinear(6, 4), x, zero_rows=True)
        check_op(opfuser.Bias(6), x)
        with pytest.raises(AssertionError, match="The output is wrong"):
            check_op(wrong, torch.randn(5, 3))


def test_factor_and_floor() -> None:
    op = spoilt(Scaled, compute=lambda op, ctx, x: op.right(x) * (1 + 1e-4))()
    x = torch.randn(5, 3)
    with pytest.raises(AssertionError, match=r"allowed is 2 x"):
        check_op(op, x)
    check_op(op, x, floor=1e-3)
    floors, both = {torch.float64: 1e-3}, [torch.float64, torch.float32]
    with pytest.raises(AssertionError, match=r"output is wrong.*input float32"):
        check_op(op, x, dtypes=both, floor=floors)
    check_op(op, x, dtypes=both, floor={**floors, torch.float32: 1e-3})
    with pytest.raises(AssertionError, match=r"allowed is 7 x"):
        check_op(op, x, factor=7)
    check_op(op, x, factor=1e9)


def test_rows_are_left_out_unless_told_not_to() -> None:
    def grads(op: Any, dx: Any, dw: Any, x: Tensor, dy: Tensor) -> Any:
        return dx, None if dw is None else dw * torch.ones_like(x).mean()

    wrong = spoilt(Scaled, grads=grads)()
    with pytest.raises(AssertionError, match=r"parameter w is wrong: error nan.*zero rows"):
        check_op(wrong, torch.randn(5, 3))
    check_op(wrong, torch.randn(5, 3), zero_rows=False)
    check_op(Scaled(), torch.randn(3))  # a vector is one row


def test_a_single_row_that_the_reference_does_not_take_is_left_out() -> None:
    class Pairs(Scaled):
        """Takes an even number of rows."""

        def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
            return super().reference(input_.unflatten(0, (-1, 2))).flatten(0, 1)

        def right(self, x: Tensor) -> Tensor:
            return super().right(x.unflatten(0, (-1, 2))).flatten(0, 1)

    check_op(Pairs(), torch.randn(4, 3), zero_rows=False)


def test_errors() -> None:
    class Silent(opfuser.Identity):
        reference = BasicOperation.reference

    with pytest.raises(NotImplementedError, match=r"check_op compares.*\(Silent\)"):
        check_op(Silent(), torch.randn(5, 3))
    with pytest.raises(
        ArgumentTypeError, match=r"basic operations\. Received: Linear.*check_fusion"
    ):
        check_op(opfuser.Linear(3, 3), torch.randn(5, 3))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"Received: dtypes=\[\]\."):
        check_op(opfuser.Identity(), torch.randn(5, 3), dtypes=[])
