"""Calls of one operation, outside of a Sequential."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .engine.autograd import Kwargs
from .engine.plan import expand
from .engine.routing import describe, public_routing, wrong_count
from .fuser import OperationFuser, call_traced
from .op_base import BasicOperation, FusibleOperation
from .op_base.kinds import has_called_parts


def _run_parts(
    parts: Sequence[BasicOperation], x: Any, extra_inputs: Sequence[Tensor], kwargs: Kwargs
) -> Any:
    """Calls operations as modules, one by one, with their hooks and their own forward."""
    asked = [
        describe(i, part) for i, part in enumerate(parts) for _ in range(part.num_extra_inputs)
    ]
    if len(extra_inputs) != len(asked):
        raise wrong_count(asked, len(extra_inputs))
    left, extra_outputs = list(extra_inputs), []
    for i, part in enumerate(parts):
        own, left = left[: part.num_extra_inputs], left[part.num_extra_inputs :]
        x = part(x, *own, **(kwargs[i] if kwargs else {}))
        if part.num_extra_outputs:
            x, *ys = x
            extra_outputs += ys
    return (x, *extra_outputs) if extra_outputs else x


def fuser_alone(op: FusibleOperation) -> OperationFuser:
    """The fuser of one operation called alone: no channel applies, none is captured."""
    if op._alone is None:
        op.__dict__["_alone"] = OperationFuser([op], routing=public_routing(expand(op)))
    fuser: OperationFuser = op._alone
    return fuser


def run_alone(
    op: FusibleOperation, input_: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs
) -> Any:
    """What an operation returns that is called by itself, as a module.

    Args:
        op: the operation.
        input_: of it.
        extra_inputs: of all its basic operations, in their order.
        kwargs: of each basic operation, or None.
    """
    if has_called_parts(op):
        return _run_parts(expand(op), input_, extra_inputs, kwargs)
    if kwargs is not None:
        for part, own in zip(expand(op), kwargs):
            part.check_keywords(own)
    if torch.compiler.is_compiling():
        return call_traced(op, op._guard_trace(), 0, input_, extra_inputs, kwargs)
    fuser = op._alone or fuser_alone(op)
    return fuser(input_, *extra_inputs, basic_op_kwargs=kwargs)
