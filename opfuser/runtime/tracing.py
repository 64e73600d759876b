"""What code asks that torch.compile or torch.export may trace, which record it for later calls.

Few have to ask whether that is so: ``kernel_or_plain`` calls another function then, and a traced
program says so in the contexts of its operations. The functions here are safe where a graph breaks:
Dynamo traces each by itself then, in calls that run eagerly, and what is true of a traced call, if
it is said of another one, costs time alone. ``torch.compiler.is_compiling()`` stays in the function
that asks where that would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from ..torch_internals import dispatch_mode_stack, dispatch_modes, exporting, transforms_active

__all__ = [
    "columns",
    "each_column",
    "exporting",
    "fixed",
    "functional",
    "joined_columns",
    "keeps_products",
    "stands_in",
    "transforms_active",
]

_COLUMNS = "_opfuser_columns"


def stands_in(t: Tensor) -> bool:
    """Whether ``t`` stands for tensors of later calls, or is of a subclass.

    Its size is not to be asked then, as the graph would hold for that alone; nor does it have an
    address, or a layout that may be relied on.
    """
    return torch.compiler.is_compiling() or type(t) not in (Tensor, nn.Parameter)


def functional() -> bool:
    """Whether nothing takes an ``out`` or is overwritten: while traced, and under torch.vmap."""
    return torch.compiler.is_compiling() or transforms_active()


def fixed(size: int) -> int:
    """The size, of which a trace that knows it as a symbol is for this one alone from here on."""
    return len(range(size)) if torch.compiler.is_compiling() else size  # int() leaves a symbol


def keeps_products() -> bool:
    """Whether somebody may keep what matrix products return, so that it must not be overwritten.

    While traced, under torch.vmap, and in a selective checkpoint, first and again.
    """
    if functional():
        return True
    if not dispatch_modes():  # the usual case
        return False
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in dispatch_mode_stack())


def joined_columns(parts: Iterable[Tensor]) -> Tensor:
    """``torch.cat(parts, -1)``, which :func:`columns` takes apart again.

    Operations hand each other packed tensors, such as queries, keys and values, or gates and linear
    units. A kernel of ours writes and reads them where they are. A compiler that sees them joined
    by one operation and split by the next copies them, and saves the copy for backward; of what is
    traced here, the joined tensor is part of no result unless somebody reads it as a whole.
    """
    parts = tuple(parts)
    whole = torch.cat(parts, -1)
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
        # Under Dynamo itself tensors take no attributes.
        setattr(whole, _COLUMNS, (parts, _versions(whole, *parts)))
    return whole


def columns(whole: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The columns of a tensor, ``sizes`` of them each: those it was joined of, or views."""
    parts = _parts(whole)
    if parts is not None and [t.shape[-1] for t in parts] == list(sizes):
        return parts
    return whole.split_with_sizes(sizes, -1)


def each_column(function: Callable[[Tensor], Tensor], whole: Tensor) -> Tensor:
    """``function(whole)`` of an elementwise function, applied to what ``whole`` was joined of."""
    parts = _parts(whole)
    return function(whole) if parts is None else joined_columns(map(function, parts))


def _parts(whole: Tensor) -> Sequence[Tensor] | None:
    parts, versions = getattr(whole, _COLUMNS, ((), ()))
    # Unless one of them has been written to.
    return parts if parts and versions == _versions(whole, *parts) else None


def _versions(*tensors: Tensor) -> list[int]:
    return [t._version for t in tensors]
