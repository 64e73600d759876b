"""Rows of experts, sent back to the ranks of their tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..distributed.collectives import group_size, refuse_reference
from ..distributed.expert_exchange import (
    Route,
    arrived,
    begin_sending,
    begin_sending_back,
    refuse_tracing,
    send,
    send_back,
)
from ..errors import InputError, NotSupportedError
from ..op import OperationContext
from ._collective import Collective


class _OfRoute(Collective):
    """Reads the route of rows that :class:`Dispatch` returns, and sends them along it."""

    num_extra_inputs: int = 2
    takes_keywords = False

    class Saved(NamedTuple):
        row_order: Tensor | None
        rank_sizes: Tensor | None

    @abstractmethod
    def rows(self, ctx: OperationContext, x: Tensor, route: Route) -> Tensor:
        """The output for rows x, on several ranks."""

    @abstractmethod
    def row_grads(self, ctx: OperationContext, dy: Tensor, route: Route) -> Tensor:
        """The gradient of x, on several ranks."""

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        ctx, ranks = basic_op_ctxs[0], group_size(self.process_group)
        row_order, rank_sizes = given["basic_op_extra_inputs"][0]
        assert row_order is not None
        assert rank_sizes is not None
        self._check(input_, row_order, rank_sizes, ranks)
        if ctx.requires_grad:
            ctx.save_for_backward(
                *self.Saved(*((None, None) if ranks == 1 else (row_order, rank_sizes)))
            )
        if ranks == 1:
            return input_, [()]
        refuse_tracing(type(self).__name__)
        return self.rows(ctx, input_, Route(row_order, rank_sizes)), [()]

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        dx = grad_output if ctx.needs.input else None
        if dx is not None and group_size(self.process_group) > 1:
            dx = self.row_grads(ctx, dx, Route(*ctx.saved_tensors))
        return dx, [()], [(None, None)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        refuse_reference(self.process_group, type(self).__name__)
        self._check(input_, extra_inputs[0], extra_inputs[1], 1)
        return input_.clone()

    def _check(self, x: Tensor, row_order: Tensor, rank_sizes: Tensor, ranks: int) -> None:
        if (
            x.dim() != 2
            or row_order.shape != x.shape[:1]
            or rank_sizes.shape != (2, ranks)
            or {row_order.dtype, rank_sizes.dtype} != {torch.int64}
        ):
            raise InputError.explained(
                "Rows (S, D) must come with the two tensors that Dispatch returns, (S,) and "
                f"(2, {ranks}), of int64",
                where=type(self).__name__,
                received=f"input {tuple(x.shape)}, {tuple(row_order.shape)} of {row_order.dtype}, "
                f"{tuple(rank_sizes.shape)} of {rank_sizes.dtype}",
            )


class Combine(_OfRoute):
    """Sends each row back to the rank that it came from: the inverse of :class:`Dispatch`.

    Shapes: x ``(S, D)``, rows as :class:`Dispatch` sorted them, with any number of features; y
    ``(R, D)`` in the order of that operation's input, which :class:`Unpermute` sums by token. Extra
    inputs: the order of received rows ``(S,)`` and the rows exchanged with each rank ``(2, n)``,
    the first two extra outputs of :class:`Dispatch`. The dtype is kept. Backward sends the
    gradients to the experts. Both passes only copy. In a group of one rank, or if torch.distributed
    is not initialized, it is the identity.

    Args:
        process_group: that of :class:`Dispatch`; None is all ranks.

    Raises:
        InputError: in forward, if the shapes do not match.
        NotSupportedError: under torch.compile.
        OpKwargsError: in forward, if keywords are passed.
    """

    def rows(self, ctx: OperationContext, x: Tensor, route: Route) -> Tensor:
        y = arrived(x)
        ctx.started = y is not None
        return send_back(x, route, self.process_group) if y is None else y

    def row_grads(self, ctx: OperationContext, dy: Tensor, route: Route) -> Tensor:
        return (begin_sending if ctx.started else send)(dy, route, self.process_group)


class StartCombine(_OfRoute):
    """Begins to send each row back, for the :class:`Combine` that follows.

    Operations between the two that do not read the rows, such as those of a shared expert behind a
    :class:`SwapExtra`, compute while ranks exchange them. In backward it is the other way around:
    :class:`Combine` begins to send the gradients, and this operation waits for them. In a group of
    one rank, or if torch.distributed is not initialized, it is the identity.
    :func:`opfuser.models.parallel.parallelize` places the two around shared experts.

    Shapes: x and y ``(S, D)``, and extra inputs, as those of :class:`Combine`. On several ranks y,
    and the gradient that :class:`Combine` returns, are placeholders that are NaN everywhere. Only
    :class:`SwapExtra` may pass them on: another operation that reads them returns NaN, or backward
    fails. The dtype is kept.

    Args:
        process_group: that of :class:`Dispatch`; None is all ranks.

    Raises:
        InputError: in forward, if the shapes do not match.
        NotSupportedError: under torch.compile; in backward, if another operation has read or
            changed the gradient.
        OpKwargsError: in forward, if keywords are passed.
    """

    def rows(self, ctx: OperationContext, x: Tensor, route: Route) -> Tensor:
        return begin_sending_back(x, route, self.process_group)

    def row_grads(self, ctx: OperationContext, dy: Tensor, route: Route) -> Tensor:
        rows = arrived(dy)
        if rows is None:
            raise NotSupportedError.explained(
                "Between StartCombine and Combine rows may only be passed on, by SwapExtra",
                where="StartCombine",
                received="the gradient of another operation",
            )
        return rows.index_select(0, route.row_order)
