"""Holding operations to formulas, and looking at what a call saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from opfuser.op import BasicOperation, GradNeeds, OperationContext
from opfuser.testing import check_op
from tests.contract import tensors

fill = tensors.fill
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *HALF)

# Allowed besides twice the error of plain torch, relative to the largest element: a quarter of a
# unit in the last place in half precision; in float64, where plain torch counts as exact, rounding.
FLOORS = {
    torch.float32: 1e-7,
    torch.float64: 1e-14,
    torch.bfloat16: 2e-3,
    torch.float16: 2e-4,
}
ONE_UNIT = {
    **FLOORS,
    **{dtype: torch.finfo(dtype).eps for dtype in (torch.float32, *HALF)},
}
# As the library's own checks: single-precision sums are rounded after every term, in an order that
# depends on layout and processor, so that those of plain torch may have next to no error by chance.
FOUR_UNITS = {**ONE_UNIT, torch.float32: 4 * torch.finfo(torch.float32).eps}
# Not more than twice the error of plain torch.
EXACT = {**dict.fromkeys(FLOORS, 0.0), torch.float64: 1e-14}

Op = TypeVar("Op", bound=BasicOperation)


def held_to(op: Op, formula: Callable[..., Any]) -> Op:
    """``op``, which has ``formula(op, *inputs)`` as its reference from now on.

    Its own reference is held to it in float64.
    """
    own = type(op)

    def reference(self: Op, *inputs: Any, **kwargs: Any) -> Any:
        y = formula(self, *inputs, **kwargs)
        if y.dtype == torch.float64:
            of_its_own = own.reference(self, *inputs, **kwargs)
            torch.testing.assert_close(of_its_own, y, rtol=1e-9, atol=1e-9, equal_nan=True)
        return y

    op.__class__ = type(own.__name__, (own,), {"reference": reference})
    return op


def check_values(
    op: BasicOperation,
    *inputs: Tensor,
    dtypes: Iterable[torch.dtype] = DTYPES,
    floors: dict[torch.dtype, float] = FLOORS,
    autocast: Iterable[torch.dtype] = (),
    **how: Any,
) -> None:
    """:func:`check_op` in each dtype, with a floor of its own, and under autocast to others."""
    check_op(op, *inputs, dtypes=dtypes, floor=floors, **how)
    for dtype in autocast:
        with torch.autocast(inputs[0].device.type, dtype):
            check_op(op, *inputs, floor=floors[dtype], **how)


def after_forward(
    op: BasicOperation, x: Tensor, *, input: bool = True, parameters: bool = True
) -> OperationContext:
    """The context after a forward, as backward finds it, where these gradients are needed."""
    ctx = OperationContext()
    ctx.needs = GradNeeds(input, tuple(parameters for _ in op.parameters()), ())
    with torch.no_grad():
        op.op_forward(ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
    ctx.saved_tensors, ctx.parameters = ctx.to_save, tuple(p.detach() for p in op.parameters())
    return ctx


def saved_by(call: Callable[[], Any]) -> list[Tensor]:
    """What a call saves for backward."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return saved
