"""The dataflow of a module's forward: which operations of torch it calls, with which values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

_Leaf = TypeVar("_Leaf")
Origin = Literal["input", "parameter", "buffer", "constant", "node"]


@dataclass(eq=False)
class Value:
    """A tensor of a dataflow.

    Attributes:
        origin: what it is: an input, parameter or buffer of the module, a constant that the forward
            took from elsewhere, or the result of a node.
        name: of an input, its number; of a parameter or buffer, its path.
        meta: a tensor on the meta device with its shape, strides and dtype.
        node: the node that it is a result of.
        real: the tensor that a parameter, buffer or constant stands for.
        requires_grad: whether the tensor does; a stand-in has no graph, which would keep it alive.
        foreign: why it may compute something else than a tensor does, as a predicate; or empty.
        counted: whether its sizes depend on the numbers in tensors.
    """

    origin: Origin
    name: str
    meta: Tensor
    node: Node | None = None
    real: Tensor | None = None
    requires_grad: bool = False
    foreign: str = ""
    counted: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.meta.shape))

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class Node:
    """A call of one function of torch.

    Attributes:
        op: the function's name, as ``__torch_function__`` sees it; of a property, the property's.
        function: the function.
        args, kwargs: what it was called with, tensors as values.
        given: both, in which a size that may differ between calls is a :class:`.sizes.Size`.
        place: path of the module whose forward called it, relative to the module that was read.
        results: the tensors that it returned.
        effect: what it does besides returning them, as a predicate, such as "writes in place by
            add_". Empty for nearly all.

    A node that has an effect is explained by no rule for its op, and can only be part of a child
    that is called as it is. Three ops are no functions of torch:

    - ``effect``: an effect alone, such as that of an attribute that is set;
    - ``call_module``: a call of the child at ``place``, which has hooks, with its arguments;
    - ``cache.update``: an update of a cache, with the effect "updates a cache", by keys and values
      (``args``) of a layer (``kwargs["layer"]``); its results are all keys and values so far.
    """

    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: str
    results: list[Value] = field(default_factory=list)
    effect: str = ""
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})


@dataclass(eq=False)
class Call:
    """A call of a child module, whose nodes are ``nodes[start:end]`` of the dataflow.

    ``switched`` says that gradients or autocast were, in or out, between the module's call and it.
    """

    module: nn.Module
    path: str
    start: int
    end: int = -1
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    switched: bool = False


@dataclass(eq=False)
class Dataflow:
    """What a forward calls, in order.

    Attributes:
        inputs: the tensors among its arguments, in order of arguments and keywords.
        nodes: every call of a function of torch.
        calls: every call of a child.
        result: what it returned, tensors as values.
    """

    inputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    result: Any = None

    @property
    def outputs(self) -> list[Value]:
        """The tensors in the result that are no inputs, each once; an input if all are."""
        found = list(dict.fromkeys(values_in(self.result)))
        return [v for v in found if v.origin != "input"] or found[:1]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure of tuples, lists, dicts and slices, with each leaf mapped."""
    if isinstance(tree, (tuple, list)):
        made = [map_leaves(function, leaf) for leaf in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*made)
        return tuple(made) if isinstance(tree, tuple) else made
    if isinstance(tree, dict):
        return {key: map_leaves(function, leaf) for key, leaf in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_leaves(function, part) for part in (tree.start, tree.stop, tree.step)))
    return function(tree)


def leaves_in(tree: Any, kind: type[_Leaf]) -> list[_Leaf]:
    """The leaves of a type, in order."""
    found: list[_Leaf] = []
    map_leaves(lambda leaf: found.append(leaf) if isinstance(leaf, kind) else None, tree)
    return found


def values_in(tree: Any) -> list[Value]:
    """The values among the leaves, in order."""
    return leaves_in(tree, Value)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves, in order."""
    return leaves_in(tree, Tensor)


def form_of(tree: Any) -> str:
    """The structure of a result, and which of its leaves are tensors or None."""

    def kind(leaf: Any) -> str | None:
        if leaf is None:
            return None
        return "tensor" if isinstance(leaf, (Tensor, Value)) else "other"

    return repr(map_leaves(kind, tree))
