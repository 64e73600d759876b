"""Which is called: a kernel, or the same in plain torch.

While torch.compile traces, it is plain torch, for which the compiler makes kernels of its own,
fused with what stands around. For chains of element-wise operations ``pointwise.Chain`` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .launch import DTYPES, runs

_Result = TypeVar("_Result")


def kernel_or_plain(
    *,
    launch: Callable[..., _Result],
    plain: Callable[..., _Result],
    traced: Callable[..., _Result] | None = None,
    accepts: Callable[..., bool] | None = None,
    dtypes: frozenset[torch.dtype] = DTYPES,
) -> Callable[..., _Result]:
    """The function that calls ``launch`` where a kernel takes its arguments, and else ``plain``.

    It takes positional arguments; the device and dtype of the first, a tensor, decide, and then
    ``accepts``.

    Args:
        launch: runs the kernel.
        plain: the same in plain torch, for every device and dtype, also without data.
        traced: the same for torch.compile to trace, which writes to nothing that it is given, and
            asks for no sizes; None is ``plain``, which does so then.
        accepts: from the arguments, whether the kernel takes them; None is always.
        dtypes: of the first argument that the kernel takes.
    """

    def call(*args: Any) -> _Result:  # 0.05 us less than with a name for the first one
        if runs(args[0], dtypes) and (accepts is None or accepts(*args)):
            return launch(*args)
        if traced is not None and torch.compiler.is_compiling():
            return traced(*args)
        return plain(*args)

    return call
