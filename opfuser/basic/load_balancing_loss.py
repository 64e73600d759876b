"""The load-balancing loss of several routers together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..errors import ArgumentError, InputError
from ..op import BasicOperation, Dtypes


class LoadBalancingLoss(BasicOperation):
    r"""Adds the joint load-balancing loss L of R routers to its input: ``y = x + c L``.

    .. math:: L = E \sum_e f_e P_e

    Of each router, f is the number of tokens of expert e over that of all tokens, and P the mean of
    its scores; :math:`f_e` and :math:`P_e` are their means over the routers. Expert e is therefore
    balanced over the layers of a model, not in each of them. It is what transformers computes of
    the logits of all layers, and for R = 1 the ``aux_loss`` of :class:`opfuser.TopKRouter`.

    Shapes: x any, such as the loss of a model, to each element of which it is added; y that of x,
    and of its dtype. Extra inputs: R times the terms (f, P) as :class:`opfuser.TopKRouter` returns
    them with ``balance_terms``, (2, E), of fp32 or fp64. Extra output: L, 0-d, of their dtype.
    Where c is 0, x is handed on.

    Saves the means, (2, E).

    Source: Fedus et al., "Switch Transformers", 2021, eq. 4-6.

    Args:
        num_routers: R.
        coefficient: c, such as 0.01 or 0.001.

    Raises:
        ArgumentError: there is no router, or the coefficient is not finite.
        InputError: in forward, if the terms are not all (2, E).
        OpKwargsError: in forward, if it is given keywords.
    """

    num_extra_inputs: int = 1
    num_extra_outputs: int = 1
    takes_keywords = False
    read_only: ClassVar[frozenset[str]] = frozenset({"num_routers", "num_extra_inputs"})

    class Saved(NamedTuple):
        means: Tensor

    class Settings(NamedTuple):
        coefficient: float

    def __init__(self, num_routers: int, coefficient: float = 0.0) -> None:
        if num_routers < 1:
            raise ArgumentError.explained(
                "num_routers must be positive",
                where="LoadBalancingLoss",
                received=f"num_routers={num_routers}",
            )
        self.num_extra_inputs = num_routers
        super().__init__()
        self.num_routers = num_routers
        self.coefficient = coefficient
        self.make_settings()

    def make_settings(self) -> LoadBalancingLoss.Settings:
        if not math.isfinite(self.coefficient):
            raise ArgumentError.explained(
                "coefficient must be finite",
                where="LoadBalancingLoss",
                received=f"coefficient={self.coefficient}",
            )
        return self.Settings(self.coefficient)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.input

    def extra_output_dtypes(self, dtypes: Dtypes) -> tuple[torch.dtype, ...]:
        return (dtypes.extra_inputs[0],)

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        ctx = basic_op_ctxs[0]
        (coefficient,) = self.frozen_settings(ctx)
        terms = [t for t in given["basic_op_extra_inputs"][0] if t is not None]
        _check(terms)
        means = torch.stack(terms).mean(0)
        loss = means.prod(0).sum() * means.shape[1]
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(means))
        y = torch.add(input_, loss, alpha=coefficient).to(input_.dtype) if coefficient else input_
        return y, [(loss,)]

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor | None,
        *,
        basic_op_grad_extra_outputs: Extras,
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        (coefficient,) = self.frozen_settings(ctx)
        (d_loss,) = basic_op_grad_extra_outputs[0] or (None,)
        dx = grad_output if ctx.needs.input else None
        none = [None] * self.num_extra_inputs
        if not any(ctx.needs.extra_inputs):
            return dx, [()], [none]
        (means,) = ctx.saved_tensors
        if coefficient and grad_output is not None:
            added = coefficient * grad_output.to(means.dtype).sum()
            d_loss = added if d_loss is None else d_loss + added
        if d_loss is None:
            return dx, [()], [none]
        routers, experts = self.num_extra_inputs, means.shape[1]
        d_terms = means.flip(0) * (d_loss * (experts / routers))
        return dx, [()], [d_terms.repeat(routers, 1, 1).unbind()]

    def reference(
        self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        (coefficient,) = self.make_settings()
        _check(extra_inputs)
        fractions, probabilities = torch.stack(extra_inputs, 1).mean(1)
        loss = len(fractions) * (fractions * probabilities).sum()
        return (input_ + coefficient * loss).to(input_.dtype), loss

    def extra_repr(self) -> str:
        return f"num_routers={self.num_routers}, coefficient={self.coefficient}"


def _check(terms: Sequence[Tensor]) -> None:
    shapes = [tuple(t.shape) for t in terms]
    if len({*shapes}) > 1 or len(shapes[0]) != 2 or shapes[0][0] != 2:
        raise InputError.explained(
            "The terms of every router must be (2, E)",
            where="LoadBalancingLoss",
            received=", ".join(map(str, shapes)),
        )
