"""Rows of experts, sent back to the ranks of their tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..distributed.collectives import group_size, refuse_reference
from ..distributed.expert_exchange import Route, refuse_tracing, send, send_back
from ..errors import InputError
from ._collective import Collective


class Combine(Collective):
    """Sends each row back to the rank that it came from: the inverse of :class:`Dispatch`.

    Shapes: x ``(S, D)``, rows as :class:`Dispatch` has sorted them, with any features; y ``(R, D)``
    in the order of that operation's input, which :class:`Unpermute` adds by token. Extra inputs:
    the order of received rows ``(S,)`` and the rows exchanged with each rank ``(2, n)``, the first
    two extra outputs of :class:`Dispatch`. The dtype is kept. Backward sends the gradients to the
    experts. Both passes only copy. In a group of one rank, or where torch.distributed is not
    initialised, the identity.

    Args:
        process_group: that of :class:`Dispatch`; None is all ranks.

    Raises:
        InputError: in forward, if shapes do not go together.
        NotSupportedError: while torch.compile traces.
        OpKwargsError: in forward, if it is given keywords.
    """

    num_extra_inputs: int = 2
    takes_keywords = False

    class Saved(NamedTuple):
        row_order: Tensor | None
        rank_sizes: Tensor | None

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        ctx, group = basic_op_ctxs[0], self.process_group
        row_order, rank_sizes = given["basic_op_extra_inputs"][0]
        assert row_order is not None
        assert rank_sizes is not None
        _check(input_, row_order, rank_sizes, group_size(group))
        alone = group_size(group) == 1
        if ctx.requires_grad:
            ctx.save_for_backward(
                *self.Saved(*((None, None) if alone else (row_order, rank_sizes)))
            )
        if alone:
            return input_, [()]
        refuse_tracing("Combine")
        return send_back(input_, Route(row_order, rank_sizes), group), [()]

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        ctx, group = basic_op_ctxs[0], self.process_group
        dx = grad_output if ctx.needs.input else None
        if dx is not None and group_size(group) > 1:
            dx = send(dx, Route(*ctx.saved_tensors), group)
        return dx, [()], [(None, None)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        refuse_reference(self.process_group, "Combine")
        _check(input_, extra_inputs[0], extra_inputs[1], 1)
        return input_.clone()


def _check(x: Tensor, row_order: Tensor, rank_sizes: Tensor, ranks: int) -> None:
    if (
        x.dim() != 2
        or row_order.shape != x.shape[:1]
        or rank_sizes.shape != (2, ranks)
        or {row_order.dtype, rank_sizes.dtype} != {torch.int64}
    ):
        raise InputError.explained(
            "Rows (S, D) must come with the two tensors that Dispatch returns, (S,) and "
            f"(2, {ranks}), of int64",
            where="Combine",
            received=f"input {tuple(x.shape)}, {tuple(row_order.shape)} of {row_order.dtype}, "
            f"{tuple(rank_sizes.shape)} of {rank_sizes.dtype}",
        )
