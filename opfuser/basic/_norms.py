"""What the normalizations have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError, InputError, NotSupportedError


def canonical_shape(normalized_shape: Iterable[int] | int, where: str) -> tuple[int, ...]:
    """The sizes of the normalized dimensions as a tuple.

    Raises:
        ArgumentError: there is none, or one is not positive.
    """
    if not isinstance(normalized_shape, Iterable):
        normalized_shape = (normalized_shape,)
    shape = tuple(normalized_shape)
    if not shape or min(shape) < 1:
        raise ArgumentError.explained(
            "normalized_shape must hold one or more positive sizes",
            where=where,
            received=str(shape),
        )
    return shape


def check_eps(eps: float, where: str) -> None:
    """Raises ArgumentTypeError or ArgumentError unless ``eps`` is a finite number of 0 or more."""
    if not isinstance(eps, Real):
        raise ArgumentTypeError.explained(
            "eps must be a Python number", where=where, received=f"eps={eps!r}"
        )
    if not 0 <= eps < math.inf:
        raise ArgumentError.explained(
            "eps must be finite and not negative", where=where, received=f"eps={eps}"
        )


def refuse_sm_margin(sm_margin: int | dict[str, int], where: str) -> None:
    """Raises NotSupportedError if multiprocessors are to be kept free."""
    margins = sm_margin.values() if isinstance(sm_margin, dict) else (sm_margin,)
    if any(margins):
        raise NotSupportedError.explained(
            "The kernels cannot be told to leave multiprocessors free",
            where=where,
            received=f"sm_margin={sm_margin}",
            remedy="Leave sm_margin out",
        )


def refuse_input(input_: Tensor, where: str) -> None:
    """Raises InputError for an input that does not end in ``normalized_shape``."""
    raise InputError.explained(
        "The last dimensions of the input must be normalized_shape",
        where=where,
        received=f"shape {tuple(input_.shape)}",
        remedy="Pass a tensor whose last dimensions have these sizes",
    )


def as_rows(x: Tensor, cols: int) -> Tensor:
    """``x`` as ``(rows, cols)``, the elements of a row side by side; copied only if need be."""
    if x.dim() != 2 or x.shape[1] != cols:
        # Without columns, -1 could be any number.
        x = x.reshape(-1 if cols else math.prod(x.shape[:-1]), cols)
    return x if x.stride(1) == 1 else x.contiguous()


def side_by_side(x: Tensor) -> Tensor:
    """``x``, the elements of a row next to each other; copied only if need be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_vector(x: Tensor) -> Tensor:
    """A parameter, or a statistic of each row, in one dimension."""
    return x if x.dim() == 1 else x.reshape(-1)


def per_row(statistic: Tensor, rows: tuple[int, ...]) -> Tensor:
    """A statistic of each row, with ``rows`` as its shape."""
    # Integers are unpacked in half the time that a torch.Size takes, but there must be one.
    return statistic.view(*rows) if rows else statistic.view(())
