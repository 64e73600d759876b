"""check_op passes what is right, however it is called."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import ArgumentTypeError
from opfuser.op import BasicOperation
from opfuser.testing import check_op
from tests.engine.spoilt import Scaled, spoilt
from tests.engine.toys import Mixed

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3), (1, 3), (3,)])
def test_a_right_operation_passes(shape: tuple[int, ...]) -> None:
    check_op(Scaled(), torch.randn(shape), dtypes=DTYPES, zero_rows=len(shape) > 1)
    check_op(Mixed(), torch.randn(shape), torch.randn(shape), dtypes=DTYPES, zero_rows=True)


def test_basic_operations_pass() -> None:
    x = torch.randn(4, 6)
    for op in (opfuser.Bias(6), opfuser.BasicLinear(6, 5), opfuser.Dropout(0.3)):
        check_op(op, x, dtypes=DTYPES, zero_rows=True)
    check_op(opfuser.MakeExtraOutput(), x, dtypes=DTYPES)
    check_op(opfuser.AddExtraInput(), x, torch.randn(4, 6), dtypes=DTYPES)


def test_on_every_device(device: torch.device) -> None:
    x = torch.randn(5, 3, device=device)
    check_op(Scaled().to(device), x, dtypes=DTYPES, zero_rows=True)
    check_op(Mixed(), x, torch.randn(5, 3, device=device), dtypes=DTYPES)


def test_the_operation_given_is_left_alone() -> None:
    op, x = Scaled(), torch.randn(4, 3, requires_grad=True)
    op.w.requires_grad_(False)
    check_op(op, x, dtypes=(torch.float64,))
    assert op.w.dtype is torch.float32
    assert op.w.grad is None
    assert x.grad is None
    assert not op._routing_captured


def test_dtypes_default_to_those_given() -> None:
    seen = []

    class Watched(Scaled):
        def compute(self, x: Tensor) -> Tensor:
            seen.append((x.dtype, self.w.dtype))
            return super().compute(x)

    check_op(Watched().bfloat16(), torch.randn(4, 3).bfloat16())
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}


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

    def fuse(ops: Any) -> Any:
        return [Wrong(ops)]

    with opfuser.register_forward_fusion(fuse):
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
    with torch.autocast("cpu", torch.bfloat16):
        check_op(opfuser.BasicLinear(6, 4), x, zero_rows=True)
        check_op(opfuser.Bias(6), x)
        with pytest.raises(AssertionError, match="The output is wrong"):
            check_op(spoilt(compute=lambda op, x: (x * 1.05) ** 2 * op.w), torch.randn(5, 3))


def test_factor_and_floor() -> None:
    op = spoilt(compute=lambda op, x: x * x * op.w * (1 + 1e-4))
    x = torch.randn(5, 3)
    with pytest.raises(AssertionError, match=r"allowed is 2 x"):
        check_op(op, x)
    check_op(op, x, floor=1e-3)
    with pytest.raises(AssertionError, match=r"allowed is 7 x"):
        check_op(op, x, factor=7)
    check_op(op, x, factor=1e9)


def test_an_operation_without_reference() -> None:
    class Silent(opfuser.Identity):
        reference = BasicOperation.reference

    with pytest.raises(NotImplementedError, match=r"check_op compares.*\(Silent\)"):
        check_op(Silent(), torch.randn(5, 3))


def test_only_basic_operations() -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"basic operations\. Received: Linear.*check_fusion"
    ):
        check_op(opfuser.Linear(3, 3), torch.randn(5, 3))  # type: ignore[arg-type]
