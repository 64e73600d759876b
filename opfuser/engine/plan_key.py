"""The key of a plan: everything that a fusion may read, complete and hashable."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.context import TensorFacts, any_autocast, autocast_dtype
from ..recipe import Recipe


class CallFacts(NamedTuple):
    """What a plan may depend on in one call: modes, and tensors without their values.

    Attributes:
        dtype, device, requires_grad: of the input. Without grad mode nothing requires grad.
        autocast_dtype: dtype of the active autocast region, or None.
        parameter_dtypes, parameter_shapes: of all parameters, in order.
        parameters_require_grad: likewise; None without grad mode.
        extra_inputs: dtype of each, and whether it requires grad.
        recipe: of quantised compute, or None.
    """

    grad_enabled: bool
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    autocast_dtype: torch.dtype | None
    parameter_dtypes: tuple[torch.dtype, ...]
    parameter_shapes: tuple[torch.Size, ...]
    parameters_require_grad: tuple[bool, ...] | None
    extra_inputs: tuple[tuple[torch.dtype, bool], ...]
    recipe: Recipe | None

    @classmethod
    def frozen(cls, facts: tuple[Any, ...]) -> CallFacts:
        """What :func:`call_facts` has collected, by name and hashable."""
        return cls._make([tuple(fact) if isinstance(fact, list) else fact for fact in facts])

    def without_grad(self) -> CallFacts:
        """The same call where no gradient is needed."""
        extras = tuple((dtype, False) for dtype, _ in self.extra_inputs)
        return self._replace(
            grad_enabled=False,
            requires_grad=False,
            parameters_require_grad=None,
            extra_inputs=extras,
        )


def call_facts(
    input_: Tensor | TensorFacts,
    parameters: Sequence[Tensor],
    extra_inputs: Sequence[Tensor | TensorFacts],
    recipe: Recipe | None,
) -> tuple[Any, ...]:
    """The fields of :class:`CallFacts` for a call with these tensors in the current modes.

    A call whose facts no guard has collects them, and so does code that torch.compile traces. They
    are a plain tuple of lists, since Dynamo takes no names.
    """
    grad = torch.is_grad_enabled()
    return (
        grad,
        input_.dtype,
        input_.device,
        grad and input_.requires_grad,
        autocast_dtype(input_.device) if any_autocast() else None,
        [p.dtype for p in parameters],
        [p.shape for p in parameters],
        [p.requires_grad for p in parameters] if grad else None,
        [(t.dtype, grad and t.requires_grad) for t in extra_inputs] if extra_inputs else (),
        recipe,
    )


class PlanKey(NamedTuple):
    """Everything that a plan may depend on. A fusion may read nothing that is not in here."""

    fusions: Hashable
    operations: tuple[Hashable, ...]
    call: CallFacts
