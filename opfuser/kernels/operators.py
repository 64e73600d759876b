"""Kernels, their twins in plain torch, and which of them torch.compile traces.

In eager mode a call goes to the launcher or to plain torch directly: torch's dispatcher would cost
some microseconds. Traced, it is plain torch, for which the compiler makes kernels of its own, fused
with what stands around; or an operator ``opfuser::…``, which runs the kernel. Operators are
functional: they write to nothing that they are given, and return nothing that they were given. What
works in place is :func:`kernel_or_plain` alone.

Where there is both a kernel and plain torch, one of these two functions decides between them; for
chains of element-wise operations, which are no operators, ``pointwise.Chain`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .launch import runs

__all__ = ["Traced", "kernel_or_plain", "operator"]

_LIBRARY = torch.library.Library("opfuser", "DEF")

_Function = Callable[..., Any]


class Traced:
    """What torch.compile traces where there are kernels.

    Attributes:
        as_operators: whether it is the operators; else plain torch. Compiled code calls each of
            them through Python.
    """

    as_operators: bool = False


def kernel_or_plain(
    *, launch: _Function, plain: _Function, accepts: Callable[..., bool] | None = None
) -> _Function:
    """The function that calls ``launch`` where a kernel takes its arguments, and else ``plain``.

    Args:
        launch: runs the kernel.
        plain: the same in plain torch, for every device and dtype.
        accepts: from the arguments, whether the kernel takes them, as far as that is not decided by
            the first one's device and dtype; None is always.
    """

    def call(*args: Any) -> Any:
        if runs(args[0]) and (accepts is None or accepts(*args)):
            return launch(*args)
        return plain(*args)

    return call


def operator(
    schema: str,
    *,
    launch: _Function,
    plain: _Function,
    accepts: Callable[..., bool] | None = None,
    results: _Function | None = None,
    wanted: Callable[..., Sequence[bool]] | None = None,
    flatten: Callable[..., tuple[Any, ...]] | None = None,
    unflatten: Callable[..., tuple[Any, ...]] | None = None,
) -> _Function:
    """Registers ``opfuser::…`` and returns the function that eager and traced code calls.

    Args:
        schema: name, arguments and results, as in ``"rms_norm(Tensor x, float eps) -> Tensor"``.
            The first argument is a tensor and decides where the call goes.
        launch: runs the kernel; contiguous results.
        plain: the same in plain torch, for every device and dtype, also without data: results of
            the same shapes and dtypes. The path of a CPU, and what torch.compile fuses there.
        accepts: as in :func:`kernel_or_plain`.
        results: the NamedTuple that ``launch``, ``plain`` and the returned function return, where
            that is more than one tensor.
        wanted: from the arguments, which fields of ``results`` are tensors and not None. Then the
            schema ends in ``-> Tensor[]``, as operators cannot return None.
        flatten: makes the schema's arguments out of those of ``launch``, ``plain`` and the returned
            function, where some of these are named values.
        unflatten: the inverse.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    eager = kernel_or_plain(launch=launch, plain=plain, accepts=accepts)

    def registered(function: _Function) -> _Function:
        def implementation(*args: Any) -> Any:
            out = function(*args) if unflatten is None else function(*unflatten(*args))
            # What it returns is as contiguous as a kernel's results, whichever of them has run.
            if isinstance(out, Tensor):
                return out.contiguous()
            tensors = [tensor.contiguous() for tensor in out if tensor is not None]
            return tensors if wanted is not None else tuple(tensors)

        return implementation

    _LIBRARY.impl(name, registered(eager), "CompositeExplicitAutograd")
    _LIBRARY.impl(name, registered(plain), "Meta")
    packet = getattr(torch.ops.opfuser, name).default

    def traced(*args: Any) -> Any:
        made = packet(*args) if flatten is None else packet(*flatten(*args))
        if results is None:
            return made
        if wanted is None:
            return results(*made)
        fields: list[Tensor | None] = []
        position = 0
        for want in wanted(*args):
            fields.append(made[position] if want else None)
            position += 1 if want else 0  # torch 2.11 traces no flag as a number
        return results(*fields)

    def call(*args: Any) -> Any:  # 0.05 us less than with a name for the first one
        if not runs(args[0]):
            return plain(*args)
        # The operator itself asks what ``accepts`` decides: the graph is to hold for every size.
        if torch.compiler.is_compiling():
            return traced(*args) if Traced.as_operators else plain(*args)
        if accepts is None or accepts(*args):
            return launch(*args)
        return plain(*args)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = plain.__doc__
    return call
