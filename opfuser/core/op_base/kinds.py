"""What a module is to the engine: the library's own operation, or one that has to be called."""

from __future__ import annotations

from torch import nn

from ...runtime import is_own
from ..change_tracking import has_hooks, is_compiled, replaces_forward
from .fused import FusedOperation
from .fusible import FusibleOperation


def is_built_in(op: nn.Module) -> bool:
    """Whether an operation is the library's own, which promises more than the calling contract.

    Units of ``fully_shard`` are of classes that torch derives from theirs.
    """
    for cls in type(op).__mro__:
        if not cls.__module__.startswith(_OF_UNITS):
            return is_own(cls.__module__)
    return False


_OF_UNITS = "torch.distributed."


def must_be_called(op: nn.Module) -> str:
    """Why an operation has to be called as a module, or an empty string: "HOOK" or "FORWARD"."""
    if not isinstance(op, FusibleOperation):
        return ""
    own = type(op)
    if replaces_forward(op) or own.__call__ is not _CALL or is_compiled(op):
        return "FORWARD"
    if own.forward is not own._plain_forward and op.own_forward():
        return "FORWARD"
    return "HOOK" if has_hooks(op) else ""


_CALL = nn.Module.__call__


def has_called_parts(op: nn.Module) -> bool:
    """Whether ``op`` is a compound with a basic operation that has to be called as a module."""
    if not (isinstance(op, FusedOperation) and op.is_compound()):
        return False
    return any(map(must_be_called, op.basic_ops))
