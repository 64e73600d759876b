"""Calls of modules as examples, and how calls of a sequence follow one."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..applying.application import bound_example
from ..applying.descriptions import masks_in
from ..attention.masks import hides_queries
from ..errors import ArgumentError, NotSupportedError
from ..reading.built import Built
from ..reading.dataflow import map_leaves
from ..reading.operations import Reading

Example = Mapping[str, Any] | Sequence[Any] | Tensor

_WIDTHS_AT_MOST = 4


class ExampleCall(NamedTuple):
    """Arguments of a call of a module, in the order of its forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of_arguments(cls, bound: inspect.BoundArguments) -> ExampleCall:
        """A call with these arguments, and the defaults of all others."""
        bound.apply_defaults()
        return cls(bound.args, bound.kwargs)

    @property
    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        map_leaves(lambda x: found.append(x) if isinstance(x, Tensor) else None, tuple(self))
        return found

    def of(
        self, module: nn.Module, number: int, rank: int, width: int, *, single: bool = False
    ) -> ExampleCall:
        """The call with a tensor of other sizes in place of one.

        Args:
            number: of the tensor.
            rank: of the other one.
            width: its last dimension, unless it holds integers.
            single: whether dimensions between the first and the last one have one entry.
        """
        x = self.tensors[number]
        rows = _sizes(module, rank)
        if single:
            rows[1:-1] = [1] * (rank - 2)
        y = _like(x, rows if _is_integral(x) else (*rows[:-1], width))
        return ExampleCall(*map_leaves(lambda leaf: y if leaf is x else leaf, tuple(self)))


def calls_made(module: nn.Module) -> Iterator[ExampleCall]:
    """Calls with one tensor, of rows as wide as parameters are, or of numbers of rows of a table.

    Raises:
        ArgumentError: the module takes other arguments than a tensor.
    """
    weights = [p for p in module.parameters() if not is_lazy(p) and p.is_floating_point()]
    sizes = dict.fromkeys(n for p in weights if p.dim() for n in (p.shape[-1], p.shape[0]))
    widths = [n for n in sizes if n > 1][:_WIDTHS_AT_MOST] or [6]
    like = weights[0] if weights else torch.empty(0)
    shapes = [(*_sizes(module, rank - 1), width) for rank in (3, 2) for width in widths]
    examples = [_like(like, shape) for shape in shapes]
    examples.append(_like(torch.empty(0, dtype=torch.int64, device=like.device), _sizes(module, 2)))
    signature = inspect.signature(module.forward)
    try:
        yield from [ExampleCall.of_arguments(signature.bind(x)) for x in examples]
    except TypeError as error:
        raise needs_example(module, str(error)) from None


def needs_example(module: nn.Module, why: str) -> ArgumentError:
    """The error for a module that could not be called without an example, and why."""
    return ArgumentError.explained(
        "Without example=, a module is called with one tensor as wide as its parameters, which "
        "has to work",
        where="from_torch",
        received=f"{type(module).__name__}: {why}",
        remedy="Pass the arguments of one call as example=, unless its forward depends on values",
    )


def given_call(module: nn.Module, example: Example) -> ExampleCall:
    """The call that an example is; of one tensor alone, one like it.

    Raises:
        ArgumentTypeError: the forward takes no such arguments.
        ArgumentError: a tensor is there twice.
    """
    call = ExampleCall.of_arguments(bound_example(module, example, "from_torch"))
    tensors = call.tensors
    if len({*map(id, tensors)}) < len(tensors):
        raise ArgumentError.explained(
            "Each tensor of an example is there once",
            where="from_torch",
            received="one that is passed twice",
            remedy="Pass a clone",
        )
    if len(tensors) != 1 or not tensors[0].dim():
        return call
    (x,) = tensors
    return call.of(module, 0, x.dim(), x.shape[-1])


def _sizes(module: nn.Module, count: int) -> list[int]:
    """Sizes that no parameter or buffer has, and hardly any forward has among its constants."""
    own = {n for t in (*module.parameters(), *module.buffers()) if not is_lazy(t) for n in t.shape}
    free = (n for n in itertools.count(11, 2) if n not in own)
    return [*itertools.islice(free, count)]


def _is_integral(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex()


def _like(x: Tensor, shape: Sequence[int]) -> Tensor:
    needs_grad = not _is_integral(x)
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=x.dtype, device=x.device, requires_grad=needs_grad)


class Arguments:
    """A hook that hands the arguments of calls of a sequence on to its operations."""

    def __init__(
        self, call: ExampleCall, signature: inspect.Signature, reading: Reading, built: Built
    ) -> None:
        self.facts = map_leaves(_fact, tuple(call))
        self.signature, self.input, self.arguments = signature, built.input, built.arguments
        self.masks = masks_in(reading)

    def __call__(self, sequence: Any, args: Any, kwargs: Any) -> Any:
        try:
            call = ExampleCall.of_arguments(self.signature.bind(*args, **kwargs))
        except TypeError as error:
            raise self.refusal(str(error)) from None
        if map_leaves(_fact, tuple(call)) != self.facts:
            shapes = ", ".join(f"{t.dtype} of {tuple(t.shape)}" for t in call.tensors)
            raise self.refusal(f"other arguments, with tensors {shapes}")
        inputs = call.tensors
        differentiated = torch.is_grad_enabled()
        if any(
            (strictly or differentiated) and hides_queries(inputs[n], strictly)
            for n, strictly in self.masks
        ):
            raise NotSupportedError.explained(
                "Gradients of a query whose keys are all hidden by large numbers are not exact",
                where="a sequence of opfuser.from_torch",
                received="an additive mask with such a query",
                remedy="Pass a bool mask",
            )
        given: dict[Any, dict[str, Any]] = {}
        for argument in self.arguments:
            given.setdefault(argument.op, {})[argument.keyword] = argument.value(inputs)
        return (inputs[self.input],), {"op_kwargs": given}

    def refusal(self, received: str) -> ArgumentError:
        return ArgumentError.explained(
            "A sequence is called with arguments of the structure of its example",
            where="opfuser.from_torch",
            received=received,
            remedy="Convert the module again with such an example, or use opfuser.apply",
        )


def _fact(leaf: Any) -> Any:
    """What is the same in all calls of one structure."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.dim(), "floating" if leaf.is_floating_point() else str(leaf.dtype)
