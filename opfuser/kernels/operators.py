"""Kernels as operators of torch, so that what torch.compile traces can hold them.

In eager mode a call goes to the launcher or to the CPU path directly: torch's dispatcher would
cost some microseconds. Operators are functional: they write to nothing that they are given, and
return nothing that they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .launch import runs

__all__ = ["operator"]

_LIBRARY = torch.library.Library("opfuser", "DEF")


def operator(
    schema: str,
    *,
    launch: Callable[..., Any],
    plain: Callable[..., Any],
    results: Callable[..., Any] | None = None,
    wanted: Callable[..., Sequence[bool]] | None = None,
) -> Callable[..., Any]:
    """Registers ``opfuser::…`` and returns the function that eager and traced code calls.

    Args:
        schema: name, arguments and results, as in ``"rms_norm(Tensor x, float eps) -> Tensor"``.
            The first argument is a tensor and decides where the call goes.
        launch: runs the kernel; contiguous results.
        plain: the same in plain torch, for every device and dtype, also without data: results of
            the same shapes, dtypes and strides. The path of a CPU, and what torch.compile fuses
            there.
        results: the NamedTuple that ``launch``, ``plain`` and the returned function return, where
            that is more than one tensor.
        wanted: from the arguments, which fields of ``results`` are tensors and not None. Then the
            schema ends in ``-> Tensor[]``, as operators cannot return None.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)

    def registered(function: Callable[..., Any]) -> Callable[..., Any]:
        if wanted is None:
            return function
        return lambda *args: [tensor for tensor in function(*args) if tensor is not None]

    def implementation(x: Tensor, *args: Any) -> Any:
        return launch(x, *args) if runs(x) else plain(x, *args)

    _LIBRARY.impl(name, registered(implementation), "CompositeExplicitAutograd")
    _LIBRARY.impl(name, registered(plain), "Meta")
    packet = getattr(torch.ops.opfuser, name).default

    def traced(x: Tensor, *args: Any) -> Any:
        made = packet(x, *args)
        if results is None:
            return made
        if wanted is None:
            return results(*made)
        fields: list[Tensor | None] = []
        position = 0
        for want in wanted(x, *args):
            fields.append(made[position] if want else None)
            position += 1 if want else 0  # torch 2.11 traces no flag as a number
        return results(*fields)

    def call(x: Tensor, *args: Any) -> Any:
        if not runs(x):
            return plain(x, *args)
        return traced(x, *args) if torch.compiler.is_compiling() else launch(x, *args)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = plain.__doc__
    return call
