"""Numbers that operations are made with."""

from __future__ import annotations

from numbers import Real

from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError


def real_number(value: object, name: str, where: str, remedy: str = "") -> float:
    """``value`` as torch takes it: an int or a float as it is, any other real number as a float.

    Others are fractions, NumPy's scalars, and bool.

    Raises:
        ArgumentTypeError: it is none; the text says so about ``name`` of the operation ``where``.
    """
    if type(value) is int or type(value) is float:
        return value
    if isinstance(value, Real):
        return float(value)
    raise ArgumentTypeError.explained(
        f"{name} must be a real Python number",
        where=where,
        received="a tensor" if isinstance(value, Tensor) else repr(value),
        remedy=remedy,
    )


def is_one_of(size: object, *others: object) -> bool:
    """Whether a size or shape is equal to one of others.

    Where torch.compile traces, ``in`` finds no size that may vary.
    """
    return any(size == other for other in others)


def check_sizes(where: str, **sizes: int) -> None:
    """Raises ArgumentError if one of the sizes of an operation's table is negative."""
    if min(sizes.values()) < 0:
        raise ArgumentError.explained(
            "Sizes must not be negative",
            where=where,
            received=", ".join(f"{name}={size}" for name, size in sizes.items()),
        )
