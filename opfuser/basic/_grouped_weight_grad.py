"""Gradients of the weights of groups: computed, added to where they accumulate, or delayed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import gemm
from ..core.change_tracking import Note
from ..errors import InputError
from ._autograd_state import Destination, destination
from ._weight_grad import fitting_grad, grad_buffer, main_grad_buffer, mark_added

_WHERE = "GroupedLinear"


class GroupedLinearSettings(NamedTuple):
    accumulate_into_main_grad: bool
    accumulate_into_grad: bool
    delay_wgrad_compute: bool


class GroupedProduct(NamedTuple):
    """The gradients ``dy[rows of g]ᵀ x[rows of g]``, for GEMMs that compute them where they go.

    Attributes:
        dy: gradient of the output, (rows, out).
        x: input, (rows, in), of dy's dtype.
        groups: of the rows.
    """

    dy: gemm.Operand
    x: gemm.Operand
    groups: gemm.RowGroups

    def transposed(self) -> GroupedProduct:
        """The transposes of these gradients."""
        return GroupedProduct(self.x, self.dy, self.groups)

    def values(self, *, stacked: bool) -> Tensor | Sequence[Tensor]:
        """The gradients, as one tensor if ``stacked``."""
        return gemm.grouped_wgrad(self.dy, self.x, self.groups, stacked=stacked)

    def write(self, outs: Sequence[tuple[Tensor, bool] | None]) -> None:
        """As :func:`opfuser.gemm.grouped_wgrad_into`."""
        gemm.grouped_wgrad_into(outs, self.dy, self.x, self.groups)

    def versions(self) -> list[int]:
        """Change wherever what it is made of is written to."""
        # torch counts changes, of whatever shares the memory, but for tensors of inference mode.
        return [0 if t.is_inference() else t._version for t in (self.dy, self.x)]


class ScaledGroupedProduct(NamedTuple):
    """The same from codes, which are ours alone.

    Attributes:
        compute: the gradients in a dtype, (G, N, K) or G of them.
        dtype: of the gradients for autograd.
    """

    compute: Callable[[torch.dtype], Tensor | Sequence[Tensor]]
    dtype: torch.dtype

    def values(self, *, stacked: bool) -> Tensor | Sequence[Tensor]:
        """The gradients, as one tensor if ``stacked``."""
        grads = self.compute(self.dtype)
        if isinstance(grads, Tensor):
            return grads if stacked else grads.unbind(0)
        return torch.stack(list(grads)) if stacked else grads

    def write(self, outs: Sequence[tuple[Tensor, bool] | None]) -> None:
        """As :func:`opfuser.gemm.grouped_wgrad_into`, rounded once."""
        pairs = [(*to, dw) for to, dw in zip(outs, self.compute(torch.float32)) if to is not None]
        for accumulate, write in ((True, torch._foreach_add_), (False, torch._foreach_copy_)):
            own = [(out, dw) for out, add, dw in pairs if add == accumulate]
            if own:
                write([out for out, _ in own], [dw for _, dw in own])

    def versions(self) -> list[int]:
        """As of :class:`GroupedProduct`."""
        return []


class GroupedWgrad(NamedTuple):
    """All that the gradients of the weights are made of, and where they go.

    Attributes:
        product: the gradients.
        needed: for each weight whether its gradient is.
        weights: those that forward used; empty if they are not known and not asked for.
        stacked: whether the weights are one tensor.
        settings: those of forward.
        number: the backward pass; None outside of one.
    """

    product: GroupedProduct | ScaledGroupedProduct
    needed: tuple[bool, ...]
    weights: Sequence[nn.Parameter]
    stacked: bool
    settings: GroupedLinearSettings
    number: int | None

    def grads(self, delayed: DelayedWgrads, *, of_forward: bool) -> list[Tensor | None]:
        """What autograd gets for the weights now.

        Args:
            delayed: where it waits, if it is to.
            of_forward: whether ``weights`` are those of forward for certain.
        """
        settings = self.settings
        if not (settings.accumulate_into_main_grad or settings.delay_wgrad_compute):
            added = settings.accumulate_into_grad and self._add_to_grads(grad_buffer)
            return [None] * len(self.needed) if added else self._compute()
        goes = [destination(w) if n else None for w, n in zip(self.weights, self.needed)]
        if Destination.RETURNED in goes or (Destination.NOWHERE in goes and not of_forward):
            return self._compute()
        needed = tuple(to is Destination.ACCUMULATED for to in goes)
        if any(needed):
            work = self._replace(needed=needed)
            if settings.delay_wgrad_compute:
                delayed.add(work)
            else:
                work._add_to_main_grads()
        marks = settings.accumulate_into_main_grad
        return [mark_added(w) if n and marks else None for w, n in zip(self.weights, needed)]

    def accumulate(self) -> None:
        """Adds the gradients to ``grad`` or ``main_grad`` of the weights, after backward."""
        if self.settings.accumulate_into_main_grad:
            self._add_to_main_grads()
        elif not (self.settings.accumulate_into_grad and self._add_to_grads(fitting_grad)):
            for weight, dw in zip(self.weights, self._compute()):
                if dw is not None:
                    cast_dw = dw.to(weight.dtype)
                    weight.grad = cast_dw if weight.grad is None else weight.grad + cast_dw

    def _compute(self) -> list[Tensor | None]:
        dw = self.product.values(stacked=self.stacked)
        grads = [dw] if isinstance(dw, Tensor) else dw
        return [g if needed else None for g, needed in zip(grads, self.needed)]

    def _add_to_main_grads(self) -> None:
        self._add(
            [
                main_grad_buffer(weight, _WHERE, self.number) if needed else None
                for weight, needed in zip(self.weights, self.needed)
            ]
        )

    def _add_to_grads(self, buffer: Callable[[Tensor, Tensor], Tensor | None]) -> bool:
        """Adds to the ``grad`` of each weight, if ``buffer`` finds all of them; tells whether.

        Only where GEMMs can: for others autograd moves no more bytes.
        """
        product = self.product
        if not isinstance(product, GroupedProduct) or product.groups.bounds is None:
            return False
        if not self.weights:
            return False
        buffers: list[tuple[Tensor, bool] | None] = []
        for weight, needed in zip(self.weights, self.needed):
            grad = buffer(weight, product.x) if needed else None
            if needed and grad is None:
                return False
            buffers.append(None if grad is None else (grad, True))
        self._add(buffers)
        return True

    def _add(self, buffers: list[tuple[Tensor, bool] | None]) -> None:
        if self.stacked and buffers[0] is not None:
            whole, add = buffers[0]
            buffers = [(matrix, add) for matrix in whole]
        self.product.write(buffers)


class DelayedWgrads(Note):
    """What waits for ``backward_dw``. Not copied or pickled along with its operation."""

    def __init__(self) -> None:
        self.pending: deque[tuple[GroupedWgrad, list[int]]] = deque()
        self.hooks: list[Callable[[], None]] = []

    def add(self, work: GroupedWgrad) -> None:
        """Has ``work`` wait."""
        self.pending.append((work, work.product.versions()))

    def take(self) -> GroupedWgrad:
        """The work that waits longest.

        Raises:
            InputError: what it is made of was written to since.
        """
        work, versions = self.pending.popleft()
        if work.product.versions() != versions:
            raise InputError.explained(
                "Input and gradient of the output must stay as they are until backward_dw",
                where=_WHERE,
                received="one that was modified in place since the backward pass",
                remedy="Call backward_dw before a buffer that they lie in is written to again",
            )
        return work

    def __reduce__(self) -> tuple[type[DelayedWgrads], tuple[()]]:
        return type(self), ()
