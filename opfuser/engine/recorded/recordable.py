"""Which programs and calls are recorded at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ... import torch_internals as internals
from ...attention import context_parallel
from ...core.context import OperationContext
from ...core.op_base.kinds import is_built_in
from ...events import telling
from ...quantization.watch import is_watched
from ...runtime import is_own
from ..emission import step_name
from .functions import NotRecordableError
from .guards import is_plain


class _Switch:
    """Whether calls of programs that are made now are recorded."""

    on = os.environ.get("OPFUSER_SPECIALIZE", "1") != "0"


@contextmanager
def unrecorded() -> Iterator[None]:
    """Programs that are made within it record no call."""
    before, _Switch.on = _Switch.on, False
    try:
        yield
    finally:
        _Switch.on = before


def refusal_of_program(program: Any) -> str | None:
    """Why no call of a program is recorded."""
    plan = program.plan
    if not _Switch.on:
        return "OPFUSER_SPECIALIZE=0 is set"
    if plan.env.recipe is not None and plan.env.recipe.gemm != "torch":
        return f"products are those of {plan.env.recipe.gemm}"
    if plan.env.device.type not in ("cpu", "cuda"):
        return f"it runs on {plan.env.device.type}"
    if program.prepared_ops:
        return "an operation prepares each call"
    for step in (*plan.forward, *plan.backward):
        for op in (step.op, *[plan.basic_ops[i] for i in step.indices]):
            ours = is_built_in(op)
            if not (ours or vars(type(op)).get("recordable", False)):
                return f"{step_name(step)} is not opfuser's own, nor recordable by its class"
            # Collectives of the library are seen, each as a whole; those of others are not.
            if not (op.replayable or (ours and getattr(op, "communicates", False))):
                return f"{step_name(step)} does more than to call functions of torch"
    return None


def is_plain_call(x: Tensor, parameters: Sequence[Tensor], extra_inputs: Sequence[Tensor]) -> bool:
    """Whether what runs is what anybody would see run."""
    return (
        all(map(is_plain, (x, *parameters, *extra_inputs)))
        and x.numel() > 0
        and not internals.dispatch_modes()
        and not internals.function_modes()
        and not internals.transforms_active()
        and not context_parallel.is_active()
        and not is_watched()
        and not torch.is_anomaly_enabled()
        and not telling._State.subscriptions
        and not internals.in_forward_mode()
        and not (
            x.is_cuda and (internals.cuda_captures() or internals.cuda_device() != x.get_device())
        )
    )


def refuse_tensors(contexts: Sequence[OperationContext]) -> None:
    """Raises NotRecordableError where contexts hold anything that differs between calls."""
    for ctx in contexts:
        for name, value in vars(ctx).items():
            if name not in ("settings", "needs") and _holds_tensor(value):
                raise NotRecordableError(f"a context keeps {name}, a {type(value).__name__}")


def _holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or one of the library's or a collection that has any."""
    if isinstance(value, (Tensor, nn.Module)):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensor, value))
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    if is_own(type(value).__module__):
        own = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        return _holds_tensor([*own, *getattr(value, "__dict__", {}).values()])
    return False
