"""Rows of tokens, sent to the ranks that have their experts."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..distributed.collectives import group_size, refuse_reference
from ..distributed.expert_exchange import (
    Call,
    Route,
    agree_on_experts,
    refuse_tracing,
    route_of,
    send,
    send_back,
)
from ..errors import ArgumentError, InputError
from ..op import Dtypes
from ._collective import Collective


class Dispatch(Collective):
    """Sends each row to the rank that has its expert: expert parallelism.

    Of E experts and n ranks, rank r has the experts from ``r E / n`` to ``(r + 1) E / n - 1``. Rows
    that arrive are sorted by expert, those of one expert by the rank that they come from.
    :class:`Combine` sends back what becomes of them; backward is that of the gradients.

    Shapes: x ``(R, D)``, the rows of this rank sorted by expert as :class:`Permute` returns them; y
    ``(S, D)``. Extra inputs: the rows of each of all experts ``(E,)``, integers, and with
    ``weighted`` the weights of rows ``(R,)``. Extra outputs: the order of received rows ``(S,)``
    and the rows exchanged with each rank ``(2, n)``, which :class:`Combine` reads, the second on
    the CPU; the rows of each expert of this rank, ``(E / n,)``, which :class:`GroupedLinear` reads,
    all int64; and with ``weighted`` the weights ``(S,)``, with a gradient. Dtypes are kept.

    Each rank sends any number of rows, none too, to any other, and none is dropped. What a call has
    besides goes with the sizes of the rows, which all ranks exchange first: where ranks disagree,
    on the dtype for instance, every one of them says so, and none waits. The host reads those
    sizes, so that a call waits for the device once. With ``padded`` they follow from the shape of
    the input, and nothing waits: ranks disagree where they have other numbers of rows, too, and on
    a GPU it is the device that fails then. Both passes only copy. In a group of one rank, or where
    torch.distributed is not initialised, the identity.

    Sources: Lepikhin et al., "GShard", 2020; the names are those of DeepSeek-AI's DeepEP.

    Args:
        num_experts: E, those of all ranks.
        process_group: None is all ranks.
        weighted: whether it takes and returns weights.
        padded: whether each expert has as many rows as any other, on every rank, as
            :class:`DropTokens` leaves them.

    Raises:
        ArgumentError: ``num_experts`` is not a positive multiple of the ranks.
        InputError: in forward, if shapes do not go together; and on all ranks, if split sizes do
            not add up to the rows, or the ranks' calls differ.
        NotSupportedError: while torch.compile traces.
        OpKwargsError: in forward, if it is given keywords.
    """

    num_extra_inputs: int = 2
    num_extra_outputs: int = 4
    takes_keywords = False
    read_only: ClassVar[frozenset[str]] = frozenset(
        {"num_experts", "weighted", "padded", "num_extra_inputs", "num_extra_outputs"}
    )

    class Saved(NamedTuple):
        row_order: Tensor | None
        rank_sizes: Tensor | None

    def __init__(
        self,
        num_experts: int,
        process_group: dist.ProcessGroup | None = None,
        *,
        weighted: bool = True,
        padded: bool = False,
    ) -> None:
        if not weighted:
            self.num_extra_inputs, self.num_extra_outputs = 1, 3
        super().__init__(process_group)
        if num_experts < 1 or num_experts % group_size(process_group):
            raise ArgumentError.explained(
                "The experts must be a positive multiple of the ranks",
                where="Dispatch",
                received=f"num_experts={num_experts}, {group_size(process_group)} ranks",
                remedy="Use a group whose size divides them",
            )
        self.num_experts = num_experts
        self.weighted, self.padded = weighted, padded
        self._agreed: list[bool] = []

    def extra_output_dtypes(self, dtypes: Dtypes) -> tuple[torch.dtype, ...]:
        return torch.int64, torch.int64, torch.int64, *dtypes.extra_inputs[1:]

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.input

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        ctx, group = basic_op_ctxs[0], self.process_group
        split_sizes, weights = (*given["basic_op_extra_inputs"][0], None)[:2]
        assert split_sizes is not None
        self._check(input_, split_sizes, weights)
        if group_size(group) == 1:
            if ctx.requires_grad:
                ctx.save_for_backward(*self.Saved(None, None))
            return input_, [_on_one_rank(input_, split_sizes, weights)]
        refuse_tracing("Dispatch")
        if not self._agreed:
            agree_on_experts(self.num_experts, self.padded, split_sizes, group)
            self._agreed.append(True)  # the number is fixed: once is enough
        needs = ctx.requires_grad and ctx.needs.input
        needs_weights = ctx.requires_grad and self.weighted and ctx.needs.extra_inputs[1]
        call = Call(input_, weights, needs, needs_weights, self.padded)
        route, own_sizes = route_of(split_sizes, call, group)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(*route))
        rows = send(input_, route, group)
        if weights is None:
            return rows, [(*route, own_sizes)]
        return rows, [(*route, own_sizes, send(weights, route, group))]

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor | None,
        *,
        basic_op_grad_extra_outputs: Extras,
    ) -> BackwardResult:
        ctx, group = basic_op_ctxs[0], self.process_group
        d_weights = (*basic_op_grad_extra_outputs[0], None, None, None, None)[3]
        if not (self.weighted and ctx.needs.extra_inputs[1]):
            d_weights = None
        dx = grad_output if ctx.needs.input else None
        if group_size(group) > 1:
            route = Route(*ctx.saved_tensors)
            dx = None if dx is None else send_back(dx, route, group)
            d_weights = None if d_weights is None else send_back(d_weights, route, group)
        return dx, [()], [(None, d_weights)[: self.num_extra_inputs]]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        refuse_reference(self.process_group, "Dispatch")
        sizes, weights = (*extra_inputs, None)[:2]
        assert sizes is not None
        weights = None if weights is None else weights.clone()
        return input_.clone(), *_on_one_rank(input_, sizes, weights)

    def _check(self, x: Tensor, split_sizes: Tensor, weights: Tensor | None) -> None:
        invariant = ""
        if x.dim() != 2:
            invariant = "Rows must be (R, D)"
        elif split_sizes.shape != (self.num_experts,) or split_sizes.is_floating_point():
            invariant = f"There must be ({self.num_experts},) integers, the rows of each expert"
        elif weights is not None and weights.shape != x.shape[:1]:
            invariant = "There must be a weight for each row"
        elif self.padded and x.shape[0] % self.num_experts:
            invariant = f"Padded rows must be a multiple of the {self.num_experts} experts"
        if invariant:
            received = f"input {tuple(x.shape)}, split sizes {tuple(split_sizes.shape)} of "
            received += str(split_sizes.dtype)
            if weights is not None:
                received += f", weights {tuple(weights.shape)}"
            raise InputError.explained(invariant, where="Dispatch", received=received)

    def extra_repr(self) -> str:
        text = f"num_experts={self.num_experts}, {super().extra_repr()}"
        return text + ", weighted=False" * (not self.weighted) + ", padded=True" * self.padded


def _on_one_rank(x: Tensor, split_sizes: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
    """The extra outputs where nothing moves."""
    row_order = torch.arange(x.shape[0], device=x.device)
    out = row_order, torch.full((2, 1), x.shape[0], device="cpu"), split_sizes.long()
    return out if weights is None else (*out, weights)
