"""Rows of experts, of which each takes no more than its capacity, and the way back."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..errors import ArgumentError, InputError
from ..op import BasicOperation, Dtypes


class DropTokens(BasicOperation):
    r"""Keeps the first C rows of each expert, and pads those of experts with fewer.

    The capacity C is ``ceil(capacity_factor R / E)`` for R rows and E experts. Row c of expert e
    becomes row ``e C + c``; rows of zeros, with weights of zero, stand where there is none. Rows of
    an expert are in the order of tokens: the last ones are dropped. A token is left with what its
    other experts compute, and its dropped rows have no gradient. :class:`RestoreTokens` goes back.

    Shapes: x ``(R, D)``, sorted by expert as :class:`Permute` returns them; y ``(E C, D)``. Extra
    inputs: the rows of each expert ``(E,)``, integers that add up to R, and with ``weighted`` the
    weights of rows ``(R,)``. Extra outputs: for each row of x that of y, or ``E C`` if it was
    dropped, ``(R,)``; the rows of each expert, all C, ``(E,)``; both int64; and with ``weighted``
    the weights ``(E C,)``, with a gradient. Dtypes are kept. Shapes follow from those of the
    inputs, so that nothing waits for the device: sizes that do not add up fail inside torch. With
    several ranks each one has a capacity of its own, and drops of its own.

    Sources: Lepikhin et al., "GShard", 2020; Fedus et al., "Switch Transformers", 2021.

    Args:
        num_experts: E.
        capacity_factor: 1 leaves room for what each expert gets if all get the same.
        weighted: whether it takes and returns weights.

    Raises:
        ArgumentError: an argument is not positive and finite.
        InputError: in forward, if shapes do not go together.
        OpKwargsError: in forward, if it is given keywords.
    """

    num_extra_inputs: int = 2
    num_extra_outputs: int = 3
    takes_keywords = False
    read_only: ClassVar[frozenset[str]] = frozenset(
        {"num_experts", "weighted", "num_extra_inputs", "num_extra_outputs"}
    )

    class Saved(NamedTuple):
        slots: Tensor

    class Settings(NamedTuple):
        capacity_factor: float

    def __init__(self, num_experts: int, capacity_factor: float, *, weighted: bool = True) -> None:
        if not weighted:
            self.num_extra_inputs, self.num_extra_outputs = 1, 2
        super().__init__()
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.weighted = weighted
        self.make_settings()

    def make_settings(self) -> DropTokens.Settings:
        factor = self.capacity_factor
        if self.num_experts < 1 or not (factor > 0 and math.isfinite(factor)):
            raise ArgumentError.explained(
                "num_experts must be positive, and capacity_factor positive and finite",
                where="DropTokens",
                received=f"num_experts={self.num_experts}, capacity_factor={factor}",
            )
        return self.Settings(factor)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.input

    def extra_output_dtypes(self, dtypes: Dtypes) -> tuple[torch.dtype, ...]:
        return torch.int64, torch.int64, *dtypes.extra_inputs[1:]

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        ctx = basic_op_ctxs[0]
        sizes, weights = (*given["basic_op_extra_inputs"][0], None)[:2]
        assert sizes is not None
        self._check(input_, sizes, weights)
        capacity = self._capacity(input_, self.frozen_settings(ctx).capacity_factor)
        stops = sizes.long().cumsum(0)
        rows = torch.arange(input_.shape[0], device=input_.device)
        ended = rows.new_zeros(rows.shape[0] + 1).index_add(0, stops, torch.ones_like(stops))
        expert = ended.cumsum(0)[:-1]
        place = rows - (stops - sizes).index_select(0, expert)
        number = self.num_experts * capacity
        slots = torch.where(place < capacity, expert * capacity + place, number)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(slots))
        source = _source(slots, number)
        out = slots, torch.full_like(stops, capacity)
        if weights is None:
            return _taken(input_, source), [out]
        return _taken(input_, source), [(*out, _taken(weights, source))]

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor | None,
        *,
        basic_op_grad_extra_outputs: Extras,
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        (slots,), needs = ctx.saved_tensors, ctx.needs
        dx = _taken(grad_output, slots) if needs.input and grad_output is not None else None
        if not self.weighted:
            return dx, [()], [(None,)]
        d_weights = (*basic_op_grad_extra_outputs[0], None, None, None)[2]
        if not needs.extra_inputs[1] or d_weights is None:
            return dx, [()], [(None, None)]
        return dx, [()], [(None, _taken(d_weights, slots))]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        capacity = self._capacity(input_, self.capacity_factor)
        sizes = extra_inputs[0].tolist()
        padded = []
        for values in (input_, *extra_inputs[1:]):
            parts = [own[:capacity] for own in values.split(sizes)]
            rest = [values.new_zeros(capacity - len(own), *own.shape[1:]) for own in parts]
            padded.append(torch.cat([t for pair in zip(parts, rest) for t in pair]))
        slots = [
            e * capacity + c if c < capacity else len(sizes) * capacity
            for e, size in enumerate(sizes)
            for c in range(size)
        ]
        out = torch.tensor(slots, dtype=torch.int64), torch.full((len(sizes),), capacity)
        return padded[0], *(t.to(input_.device) for t in out), *padded[1:]

    def _capacity(self, rows: Tensor, factor: float) -> int:
        return math.ceil(factor * rows.shape[0] / self.num_experts)

    def _check(self, x: Tensor, sizes: Tensor, weights: Tensor | None) -> None:
        fits = weights is None or weights.shape == x.shape[:1]
        if x.dim() != 2 or sizes.shape != (self.num_experts,) or not fits:
            received = f"input {tuple(x.shape)}, sizes {tuple(sizes.shape)}"
            if weights is not None:
                received += f", weights {tuple(weights.shape)}"
            raise InputError.explained(
                f"Rows (R, D) must come with the sizes ({self.num_experts},) of experts, and a "
                "weight for each row",
                where="DropTokens",
                received=received,
            )

    def extra_repr(self) -> str:
        text = f"num_experts={self.num_experts}, capacity_factor={self.capacity_factor}"
        return text if self.weighted else f"{text}, weighted=False"


class RestoreTokens(BasicOperation):
    """Puts rows back where :class:`DropTokens` took them from; dropped rows are zeros.

    Shapes: x ``(E C, D)``; y ``(R, D)``. Extra input: the first extra output of
    :class:`DropTokens`, ``(R,)``, int64. The dtype is kept. Saves that map. Nothing waits for the
    device.

    Raises:
        InputError: in forward, if the input has not two dimensions, or the map not one of int64.
        OpKwargsError: in forward, if it is given keywords.
    """

    num_extra_inputs: int = 1
    takes_keywords = False

    class Saved(NamedTuple):
        slots: Tensor

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        ctx, (slots,) = basic_op_ctxs[0], given["basic_op_extra_inputs"][0]
        assert slots is not None
        if input_.dim() != 2 or slots.dim() != 1 or slots.dtype != torch.int64:
            raise InputError.explained(
                "Rows (E C, D) must come with the map (R,) of int64 that DropTokens returns",
                where="RestoreTokens",
                received=f"input {tuple(input_.shape)}, map {tuple(slots.shape)} of {slots.dtype}",
            )
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(slots))
            ctx.number = input_.shape[0]
        return _taken(input_, slots), [()]

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        if not ctx.needs.input:
            return None, [()], [(None,)]
        return _taken(grad_output, _source(ctx.saved_tensors[0], ctx.number)), [()], [(None,)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        rows = torch.cat([input_, input_.new_zeros(1, *input_.shape[1:])])
        # Asked for one by one, a row that there is not is an IndexError on every device.
        taken = [rows[slot] for slot in extra_inputs[0].tolist()]
        return torch.stack(taken) if taken else input_[:0]


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Rows of ``x``, and zeros where the index is the number of its rows."""
    number = x.shape[0]
    if not number:
        return x.new_zeros(index.shape[0], *x.shape[1:])
    missing = index == number
    taken = x.index_select(0, index.masked_fill(missing, 0))
    return taken.masked_fill_(missing.view(-1, *[1] * (x.dim() - 1)), 0)


def _source(slots: Tensor, number: int) -> Tensor:
    """For each of so many slots the row that is in it, or the number of rows."""
    rows = slots.shape[0]
    source = slots.new_full((number + 1,), rows)
    # What is dropped all falls into the last place, which is cut off.
    return source.scatter_(0, slots, torch.arange(rows, device=slots.device))[:number]
