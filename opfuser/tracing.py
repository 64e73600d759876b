"""What code asks that torch.compile or torch.export may trace, which record it for later calls.

Few have to ask whether that is so: ``kernel_or_plain`` calls another function then, and a traced
program says so in the contexts of its operations. The functions here are safe where a graph breaks:
Dynamo traces each by itself then, in calls that run eagerly, and what is true of a traced call, if
it is said of another one, costs time alone. ``torch.compiler.is_compiling()`` stays in the function
that asks where that would be wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .torch_internals import dispatch_mode_stack, dispatch_modes, exporting, transforms_active

__all__ = ["exporting", "functional", "keeps_products", "stands_in", "transforms_active"]


def stands_in(t: Tensor) -> bool:
    """Whether ``t`` stands for tensors of later calls, or is of a subclass.

    Its size is not to be asked then, as the graph would hold for that alone; nor does it have an
    address, or a layout that may be relied on.
    """
    return torch.compiler.is_compiling() or type(t) not in (Tensor, nn.Parameter)


def functional() -> bool:
    """Whether nothing takes an ``out`` or is overwritten: while traced, and under torch.vmap."""
    return torch.compiler.is_compiling() or transforms_active()


def keeps_products() -> bool:
    """Whether somebody may keep what matrix products return, so that it must not be overwritten.

    While traced, under torch.vmap, and in a selective checkpoint, first and again.
    """
    if functional():
        return True
    if not dispatch_modes():  # the usual case
        return False
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in dispatch_mode_stack())
