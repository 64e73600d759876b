"""The calls of torch's functions in one forward of a model, as an FX graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from ...applying import is_computed
from ...applying.deferred import Deferred
from ...engine.recorded.functions import is_in_place, tensors_in
from ...op import FusibleOperation
from ...runtime import is_own
from ...sequence.plain_modules import replacement
from ...sequential import Sequential
from ...torch_internals import memory_of
from ..observing import SequenceCall, calls_seen, observed

CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type_as", "type", "contiguous"})
VIEWS = frozenset({"view", "reshape", "flatten", "contiguous"})


class Facts(NamedTuple):
    """A tensor without its values.

    Attributes:
        shape: its dimensions.
        dtype: of its elements.
        requires_grad: as it was when the node had run.
        bytes: of its elements, however many of them share memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    bytes: int


class Place(NamedTuple):
    """Where a model calls a function of torch.

    Attributes:
        path: of the module whose forward it is in; empty for the model itself.
        kind: the name of that module's class.
        stack: files and lines of the statement and of those that called it, the innermost first,
            without those of torch; and the instruction, as one line may have several calls.
    """

    path: str
    kind: str
    stack: tuple[tuple[str, int, int], ...]

    @property
    def file(self) -> str:
        """File of the statement."""
        return self.stack[0][0] if self.stack else ""

    @property
    def line(self) -> int:
        """Line of the statement."""
        return self.stack[0][1] if self.stack else 0


class Trace(NamedTuple):
    """One forward of a model.

    Attributes:
        graph: a node for each call, named as torch's function. ``meta`` of a node has its
            ``facts``, its ``place``, and whether it ``writes`` memory. What a Sequential, an
            operation, or a module computes that :func:`opfuser.apply` has a sequence for, is one
            node, ``call_module``.
        calls: of the Sequentials of operations.
    """

    graph: fx.Graph
    calls: list[SequenceCall]


def trace(model: nn.Module, inputs: Iterable[Tensor]) -> Trace:
    """Runs a model once, and writes down what it calls.

    Values are computed where the tensors are: on the meta device nothing is. The model's modes
    and parameters stay as they are; buffers change as they do in any call.
    """
    given = tuple(inputs)
    recorder = _Recorder(model, given)
    with observed(model) as calls, recorder.modules(), recorder:
        model(*given)
    return Trace(recorder.graph, calls)


def facts_of(node: Any) -> Facts | None:
    """What is known of the tensor that a node returns; None of anything else."""
    found = node.meta.get("facts") if isinstance(node, fx.Node) else None
    return found if isinstance(found, Facts) else None


def name_of(node: Any) -> str:
    """The name of the function that a node calls, without what says in which form; else empty."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    # Of a property such as mT the name of that.
    name: str = node.args[1] if node.target is getattr else getattr(node.target, "__name__", "")  # type: ignore[assignment]
    name = name.strip("_")
    return _SPELLED.get(name, name)


# Operators in place.
_SPELLED = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "idiv": "div"}


class _Recorder(TorchFunctionMode):
    """Writes a graph of the functions that are called while it is active."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        # Tensors are kept, so that no address is used twice.
        self.nodes: dict[int, tuple[Tensor, fx.Node]] = {}
        self.named = {
            id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())
        }
        self.paths = {id(m): path for path, m in model.named_modules()}
        self.active: list[nn.Module] = []
        # Where what is called begins to be one node, and where it no longer is, by turns.
        self.borders: list[nn.Module] = []
        for n, t in enumerate(inputs):
            if isinstance(t, Tensor):
                self._note(t, self.graph.placeholder(f"input_{n}"), ())

    @property
    def opaque(self) -> bool:
        """Whether what is called belongs to one node."""
        return len(self.borders) % 2 == 1

    def modules(self) -> AbstractContextManager[None]:
        """Follows which module is running, while it is open."""

        def enter(module: nn.Module) -> None:
            self.active.append(module)
            # A plain module inside of a Sequential is looked into again.
            if _is_opaque(module, self.opaque) is not self.opaque:
                self.borders.append(module)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.active.pop()
            if self.borders and self.borders[-1] is module:
                was_opaque = self.opaque
                self.borders.pop()
                if was_opaque:
                    path = self.paths.get(id(module), type(module).__name__)
                    node = self._add("call_module", path, args, {}, output)
                    if node is not None:
                        node.meta["module"] = module

        return calls_seen(enter, leave)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.opaque or Deferred in types:  # of these a Sequential makes the loss
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if tensors_in(out):
            self._add("call_function", func, args, kwargs, out)
        elif func.__name__ == "__setitem__":
            self._add("call_function", func, args, kwargs, args[0])
        return out

    def _add(self, op: str, target: Any, args: Any, kwargs: Any, out: Any) -> fx.Node | None:
        given = tensors_in((args, kwargs))
        made = tensors_in(out)
        # Such as x.to() of the dtype that x has: nothing is called. Under no_grad,
        # requires_grad_() and the like change nothing either.
        unchanged = made and all(any(t is g for g in given) for t in made)
        if unchanged and op == "call_function" and not is_in_place(target.__name__):
            return None
        if getattr(target, "__name__", "") == "__get__":  # of a property
            target, args = getattr, (*args[:1], target.__self__.__name__)
        node = self.graph.create_node(
            op,
            target,
            map_aggregate(tuple(args), self._node),
            map_aggregate(dict(kwargs), self._node),
        )
        memory = {memory_of(t) for t in given}
        node.meta["writes"] = unchanged or any(memory_of(t) not in memory for t in made)
        node.meta["place"] = self._place()
        if isinstance(out, Tensor):
            self._note(out, node, given)
            return node
        for n, t in enumerate(made):
            part = self.graph.call_function(item, (node, n))
            part.meta.update(node.meta, writes=False)
            self._note(t, part, given)
        return node

    def _node(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        found = self.nodes.get(id(value))
        if found is not None:
            return found[1]
        name = self.named.get(id(value))
        with self.graph.inserting_before(self._first()):
            if name is None:  # made where nobody looks
                node = self.graph.placeholder(f"given_{len(self.nodes)}")
            else:
                node = self.graph.create_node("get_attr", name)
        self._note(value, node, ())
        return node

    def _first(self) -> fx.Node:
        return next(iter(self.graph.nodes), self.graph._root)

    def _note(self, t: Tensor, node: fx.Node, given: Iterable[Tensor]) -> None:
        size = t.numel() * t.element_size()
        node.meta["facts"] = Facts(tuple(t.shape), t.dtype, t.requires_grad, size)
        self.nodes[id(t)] = t, node

    def _place(self) -> Place:
        module = self.active[-1] if self.active else None
        path = next((self.paths[id(m)] for m in self.active[::-1] if id(m) in self.paths), "")
        stack = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not trace.__code__:
            name = frame.f_globals.get("__name__", "")
            if not (name.startswith("torch.") or is_own(name)):
                stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_lasti))
            frame = frame.f_back
        return Place(path, type(module).__name__, tuple(stack))


def item(values: Any, n: int) -> Any:
    """One of several tensors that a node returns."""
    return values[n]


def _is_opaque(module: nn.Module, inside: bool) -> bool:
    """Whether what a module computes is one node.

    Args:
        inside: whether in a Sequential; there a plain module that an operation could replace is an
            obstacle to fusions of the Sequential, and nothing by itself.
    """
    if isinstance(module, (Sequential, FusibleOperation)):
        return True
    if inside and not module._modules and replacement(module) is not None:
        return True
    return is_computed(module)
