"""Arguments that the normalisations have in common."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ..errors import ArgumentError, InputError, NotSupportedError, explain

__all__ = ["canonical_shape", "refuse_input", "refuse_sm_margin"]


def canonical_shape(normalized_shape: Iterable[int] | int, where: str) -> tuple[int, ...]:
    """The sizes of the normalised dimensions as a tuple.

    Raises:
        ArgumentError: there is none, or one is not positive.
    """
    if not isinstance(normalized_shape, Iterable):
        normalized_shape = (normalized_shape,)
    shape = tuple(normalized_shape)
    if not shape or min(shape) < 1:
        raise ArgumentError(
            explain(
                "normalized_shape must hold one or more positive sizes",
                where=where,
                received=str(shape),
            )
        )
    return shape


def refuse_sm_margin(sm_margin: int | dict[str, int], where: str) -> None:
    """Raises NotSupportedError if multiprocessors are to be kept free."""
    margins = sm_margin.values() if isinstance(sm_margin, dict) else (sm_margin,)
    if any(margins):
        raise NotSupportedError(
            explain(
                "The kernels cannot be told to leave multiprocessors free",
                where=where,
                received=f"sm_margin={sm_margin}",
                remedy="Leave sm_margin out",
            )
        )


def refuse_input(input_: Tensor, where: str) -> None:
    """Raises InputError for an input that does not end in ``normalized_shape``."""
    raise InputError(
        explain(
            "The last dimensions of the input must be normalized_shape",
            where=where,
            received=f"shape {tuple(input_.shape)}",
            remedy="Pass a tensor whose last dimensions have these sizes",
        )
    )
