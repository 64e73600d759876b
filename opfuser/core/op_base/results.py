"""What forwards and backwards return, taken apart, and the errors about something else.

A tensor can be iterated over: where a list is expected its rows would pass for the list's entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ...errors import BackwardResultError, ForwardResultError


def refuse_output(step: str, result: object) -> ForwardResultError:
    """The error about a step that returned no tensor, or not what a fused forward returns."""
    return ForwardResultError.explained(
        "The forward of an operation returns a tensor",
        where=step,
        received=_described(result),
        remedy="Return the output from op_forward, and the pair of the output and the list of "
        "each basic operation's extra outputs from fuser_forward",
    )


def refuse_grads(step: str, result: object) -> BackwardResultError:
    """The error about a step whose backward returned something else than it should."""
    return BackwardResultError.explained(
        "The backward of an operation returns gradients in their order",
        where=step,
        received=_described(result),
        remedy="Return grad_input and a tuple of the parameters' gradients from op_backward, "
        "and from fuser_backward also the extra inputs', a tuple for each basic operation",
    )


def _described(result: object) -> str:
    name = type(result).__name__
    if isinstance(result, (tuple, list)):
        inside = ", ".join(type(part).__name__ for part in result)
        return f"a {name} of {inside or 'nothing'}"
    return name


def forward_parts(step: str, result: Any) -> tuple[Any, Sequence[Any]]:
    """Output and lists of extra outputs, which ``fuser_forward`` returned.

    Args:
        step: names the operation in errors.
        result: what it returned.

    Raises:
        ForwardResultError: these are no pair, or the second is no list.
    """
    parts = _parts(result, 2)
    if parts is None or not _is_list(parts[1]):
        raise refuse_output(step, result)
    return parts[0], parts[1]


def backward_parts(step: str, result: Any) -> tuple[Any, Sequence[Any], Sequence[Any]]:
    """Input gradient and lists of other gradients, which ``fuser_backward`` returned.

    Args:
        step: names the operation in errors.
        result: what it returned.

    Raises:
        BackwardResultError: these are no three parts, or the last two are no lists.
    """
    parts = _parts(result, 3)
    if parts is None or not (_is_list(parts[1]) and _is_list(parts[2])):
        raise refuse_grads(step, result)
    return parts[0], parts[1], parts[2]


def parameter_grads(step: str, result: Any) -> tuple[Any, Sequence[Any] | None]:
    """Input gradient and parameter gradients, which ``op_backward`` returned.

    Args:
        step: names the operation in errors.
        result: what it returned.

    Raises:
        BackwardResultError: these are no pair, or the second is neither iterable nor None.
    """
    parts = _parts(result, 2)
    if parts is None or not (parts[1] is None or _is_row(parts[1])):
        raise refuse_grads(step, result)
    return parts[0], None if parts[1] is None else tuple(parts[1])


def row_of_outputs(step: str, op: str, row: Any) -> Sequence[Any]:
    """The extra outputs of one basic operation, of those that ``fuser_forward`` returned.

    None stands for none.

    Raises:
        ForwardResultError: they are not iterable, or a tensor.
    """
    if row is None or _is_row(row):
        return tuple(row or ())
    raise ForwardResultError.explained(
        "fuser_forward returns a list of extra outputs for each basic operation",
        where=step,
        received=f"{type(row).__name__} as the list of {op}",
        remedy="Return (extra,) for a single one, and () for none",
    )


def row_of_grads(step: str, op: str, row: Any) -> Sequence[Any]:
    """The gradients of one basic operation, of those that ``fuser_backward`` returned.

    They are those of its parameters, or of its extra inputs. None stands for none.

    Raises:
        BackwardResultError: they are not iterable, or a tensor.
    """
    if row is None or _is_row(row):
        return tuple(row or ())
    raise BackwardResultError.explained(
        "fuser_backward returns lists of gradients for each basic operation",
        where=step,
        received=f"{type(row).__name__} as a list of {op}",
        remedy="Return (grad,) for a single one, and () for none",
    )


def _parts(result: Any, count: int) -> tuple[Any, ...] | None:
    """The parts of a result; None if these are not as many, or rows of a tensor."""
    parts = tuple(result) if _is_row(result) else ()
    return parts if len(parts) == count else None


def _is_list(value: object) -> bool:
    return type(value) is list or (isinstance(value, Sequence) and not isinstance(value, str))


def _is_row(value: object) -> bool:
    if type(value) in (tuple, list):  # Python asks abstract classes for a microsecond
        return True
    return isinstance(value, Iterable) and not isinstance(value, (Tensor, str))
