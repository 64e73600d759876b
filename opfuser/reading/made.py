"""Tensors that a forward makes of sizes and parameters, such as biases of positions, and masks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .call_key import is_plain
from .dataflow import Dataflow, Node, Origin, Value, tensors_in, values_in
from .operations import Constant, Made, Range, SizeOf, Taken
from .reads import is_scalar
from .sizes import Size, function_of
from .stand_ins import LayerIndex
from .torch_functions import DRAWS

_SIZE = re.compile(r"s\[(\d+)\]")


class _UnknownError(Exception):
    """Something is no function of sizes and of what may be read."""


def made_of(
    dataflow: Dataflow, v: Value, origins: Sequence[Origin] = ("parameter",)
) -> Made | None:
    """How a tensor is made of sizes and tensors of these origins; None if of anything else.

    The functions of torch that made it are called again, with the sizes of each call. Inputs that
    need a gradient are none of its.
    """
    try:
        nodes = _nodes_of(v)
        return _Recipe(dataflow, origins).made(v, [n for n in dataflow.nodes if n in nodes])
    except _UnknownError:
        return None


def _nodes_of(v: Value) -> set[Node]:
    """The nodes that a value depends on."""
    found: set[Node] = set()
    left = [v]
    while left:
        node = left.pop().node
        if node is None or node in found:
            continue
        if node.effect or node.op in DRAWS or "::" in node.op or node.op == "call_module":
            raise _UnknownError
        found.add(node)
        left += values_in((node.args, node.kwargs))
    return found


class _Recipe:
    """Numbers the tensors that functions take, in the order in which they are there."""

    def __init__(self, dataflow: Dataflow, origins: Sequence[Origin]) -> None:
        self.dataflow = dataflow
        self.leaves: dict[Origin, list[Value]] = {origin: [] for origin in origins}
        self.numbers: dict[Value, int] = {}

    def made(self, v: Value, nodes: Sequence[Node]) -> Made:
        given = [v, *(given for node in nodes for given in values_in((node.args, node.kwargs)))]
        for leaf in dict.fromkeys(given):
            if leaf.node is None:
                self.add(leaf)
        for origin in ("parameter", "buffer", "input"):
            for leaf in self.leaves.get(origin, ()):
                self.numbers[leaf] = len(self.numbers)
        calls = []
        for node in nodes:
            args, kwargs = node.given
            keywords = tuple((name, self.leaf(part)) for name, part in kwargs.items())
            calls.append((node.function, tuple(map(self.leaf, args)), keywords))
            for result in node.results:
                self.numbers[result] = len(self.numbers)
        parameters, buffers = (
            tuple(v.name for v in self.leaves.get(origin, ())) for origin in ("parameter", "buffer")
        )
        inputs = tuple(map(self.dataflow.inputs.index, self.leaves.get("input", ())))
        return Made(parameters, tuple(calls), self.numbers[v], buffers, inputs)

    def add(self, v: Value) -> None:
        plain = v.origin == "input" or (v.real is not None and is_plain(v.real))
        differentiated = v.origin == "input" and v.requires_grad
        if v.origin not in self.leaves or v.foreign or not plain or differentiated:
            raise _UnknownError
        self.leaves[v.origin].append(v)

    def leaf(self, part: Any) -> Any:
        """An argument as data that can be hashed."""
        if isinstance(part, Value):
            return Taken(self.numbers.get(part, -1))
        if isinstance(part, Size):
            return self.size(part)
        if isinstance(part, slice):
            return Range(*map(self.leaf, (part.start, part.stop, part.step)))
        if type(part) in (tuple, list):
            return tuple(map(self.leaf, part))
        if type(part) is type(...) or (is_scalar(part) and type(part) is not LayerIndex):
            return Constant(type(part), repr(part), part)
        raise _UnknownError

    def size(self, size: Size) -> SizeOf:
        """A size as an expression of dimensions of inputs."""
        numbers = list(dict.fromkeys(map(int, _SIZE.findall(size.text))))
        places = [self.place(size.sizes.values[number]) for number in numbers]
        if not size.text:
            raise _UnknownError
        return SizeOf(
            _SIZE.sub(lambda found: f"s[{numbers.index(int(found[1]))}]", size.text), tuple(places)
        )

    def place(self, size: int) -> tuple[int, int]:
        """An input and its dimension that has a size, which tells sizes apart that may differ."""
        for number, given in enumerate(self.dataflow.inputs):
            if size in given.shape:
                return number, given.shape.index(size)
        raise _UnknownError


class Maker(nn.Module):
    """Makes a tensor as a forward does.

    Args:
        made: how. Its parameters are attributes of this module, ``p0`` and so on.
        buffers: where its buffers are, each by what holds it and its name there.
    """

    def __init__(self, made: Made, buffers: Sequence[tuple[dict[str, Any], str]] = ()) -> None:
        super().__init__()
        self.made, self.buffers_of = made, tuple(buffers)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """The tensor for the inputs of a call."""
        known: list[Any] = [self._parameters[f"p{n}"] for n in range(len(self.made.parameters))]
        known += [holder[name] for holder, name in self.buffers_of]
        known += [inputs[number] for number in self.made.inputs]

        def leaf(part: Any) -> Any:
            if type(part) is Taken:
                return known[part.number]
            if type(part) is SizeOf:
                return function_of(part.text)(tuple([inputs[n].shape[d] for n, d in part.places]))
            if type(part) is Range:
                return slice(leaf(part.start), leaf(part.stop), leaf(part.step))
            return tuple(map(leaf, part)) if type(part) is tuple else part.value

        for function, args, kwargs in self.made.calls:
            result = function(*map(leaf, args), **{name: leaf(part) for name, part in kwargs})
            known += tensors_in(result)
        made: Tensor = known[self.made.number]
        return made
