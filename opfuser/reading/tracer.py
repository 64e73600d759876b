"""One call of a module's own forward on the meta device, recorded as a dataflow."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .dataflow import Call, Dataflow, Node, Value, map_leaves
from .kept import KeptError

__all__ = ["Trace", "trace"]

# What may be asked of a tensor whose answer is no tensor and does not depend on its entries.
_QUESTIONS = frozenset(
    """__len__ device dim dtype element_size get_device grad_fn is_complex is_contiguous is_cpu is_cuda
    is_floating_point is_leaf is_meta is_mps is_nested is_quantized is_same_size is_sparse is_xpu
    itemsize layout names ndim ndimension nelement numel requires_grad shape size storage_offset stride
    type""".split()
)
_OF_DEVICE = frozenset("device get_device is_cpu is_cuda is_meta is_mps is_xpu".split())
_DRAWS = frozenset(
    """bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_
    poisson rand rand_like randint randint_like randn randn_like random_ randperm uniform_""".split()
)
_OF_TORCH = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)


@dataclass(eq=False)
class Trace:
    """What a module's forward computed for one call.

    Attributes:
        module: that was traced.
        dataflow: its operations.
    """

    module: nn.Module
    dataflow: Dataflow


def trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """The dataflow of ``module``'s forward for a call with such arguments.

    The forward of the module's class runs once, with tensors on the meta device in place of the
    arguments, parameters and buffers. Nothing is copied, computed or written.

    Args:
        module: whose forward is called, without its own hooks.
        args: positional arguments of the call.
        kwargs: its keywords.

    Raises:
        KeptError: if the forward needs values of tensors, or cannot run on the meta device.
    """
    tracer = _Tracer(module)
    args, kwargs = map_leaves(tracer.take_input, args), map_leaves(tracer.take_input, kwargs)
    with tracer.recorded_calls():
        try:
            with torch.device("meta"), tracer:
                result = type(module).forward(module, *args, **kwargs)
        except KeptError:
            raise
        except Exception as error:
            raise KeptError(f"could not be traced: {_described(error)}") from error
    tracer.dataflow.result = map_leaves(tracer.value_of, result)
    return Trace(module, tracer.dataflow)


class _Tracer(TorchFunctionMode):
    """Records the functions of torch that are called, and calls them with tensors on meta."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        self.dataflow = Dataflow()
        self.open_calls: list[Call] = []
        self.paths = {id(m): path for path, m in root.named_modules()}
        self.names: dict[int, tuple[Any, str]] = {}
        for origin, named in (
            ("parameter", root.named_parameters()),
            ("buffer", root.named_buffers()),
        ):
            for path, tensor in named:
                self.names.setdefault(id(tensor), (origin, path))
        self.values: dict[int, Value] = {}
        self.kept_alive: list[Tensor] = []  # so that no id is used twice
        self.device = next((p.device for p in root.parameters()), torch.device("cpu"))

    @property
    def place(self) -> str:
        return self.open_calls[-1].path if self.open_calls else ""

    # Tensors and values

    def take_input(self, leaf: Any) -> Any:
        """The tensor on meta that the forward gets in place of an argument."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self.values:
            value = self.leaf(leaf, "input", str(len(self.dataflow.inputs)))
            self.dataflow.inputs.append(value)
        return self.values[id(leaf)].meta

    def leaf(self, tensor: Tensor, origin: Any, name: str) -> Value:
        meta = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device="meta",
            requires_grad=tensor.requires_grad,
        )
        value = Value(origin, name, meta, real=None if origin == "input" else tensor)
        self.kept_alive += [tensor, meta]
        self.values[id(tensor)] = self.values[id(meta)] = value
        return value

    def value_of(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if (known := self.values.get(id(leaf))) is not None:
            return known
        return self.leaf(leaf, *self.names.get(id(leaf), ("constant", "a constant")))

    # Functions of torch

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        op, kwargs = _name(function), kwargs or {}
        if op in _QUESTIONS:
            return self.answer(op, function, args, kwargs)
        node = Node(op, function, *map_leaves(self.value_of, (args, kwargs)), self.place)
        given = map_leaves(_on_meta, (node.args, node.kwargs))
        operands = _tensors(given)
        versions = [t._version for t in operands]
        try:
            result = function(*given[0], **given[1])
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise KeptError(f"needs values for {op} in '{self.place}'") from error
        written = any(t._version != v for t, v in zip(operands, versions))
        self.note(node, result, operands, written)
        return result

    def answer(self, op: str, function: Any, args: Any, kwargs: Any) -> Any:
        if op in _OF_DEVICE:
            return function(torch.empty(0, device=self.device), *args[1:], **kwargs)
        result = function(*args, **kwargs)
        return tuple(result) if isinstance(result, torch.Size) else result

    def note(self, node: Node, result: Any, operands: list[Tensor], written: bool) -> None:
        results = _tensors(result)
        if not written and results and all(any(t is o for o in operands) for t in results):
            return  # a cast to the same dtype, dropout in evaluation: nothing was computed
        if written:
            node.effect = f"writes in place by {node.op}"
        elif node.op in _DRAWS:
            node.effect = f"draws random numbers by {node.op}"
        elif not results:
            node.effect = f"calls {node.op}"
        for index, tensor in enumerate(results):
            name = f"{node.op}#{len(self.dataflow.nodes)}.{index}"
            value = Value("node", name, tensor, node)
            node.results.append(value)
            self.values[id(tensor)] = value
            self.kept_alive.append(tensor)
        self.dataflow.nodes.append(node)

    # Calls of children

    @contextmanager
    def recorded_calls(self) -> Iterator[None]:
        original = nn.Module.__call__

        def recorded(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if (path := self.paths.get(id(module))) is None:
                return original(module, *args, **kwargs)
            call = Call(module, path, len(self.dataflow.nodes))
            call.args, call.kwargs = map_leaves(self.value_of, (args, kwargs))
            self.dataflow.calls.append(call)
            self.open_calls.append(call)
            try:
                result = original(module, *args, **kwargs)
            finally:
                self.open_calls.pop()
                call.end = len(self.dataflow.nodes)
            call.result = map_leaves(self.value_of, result)
            return result

        nn.Module.__call__ = recorded  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]


def _name(function: Callable[..., Any]) -> str:
    """A function's name; of functions that are not torch's own, one that none of torch's has."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__") and isinstance(function, types.MethodWrapperType):
        attribute = getattr(function.__self__, "__name__", "?")
        return str(attribute) if name == "__get__" else f"{attribute}.__set__"
    if isinstance(function, _OF_TORCH):
        return name
    module = getattr(function, "__module__", None) or ""
    if isinstance(function, types.FunctionType) and module.split(".")[0] == "torch":
        return name
    return f"{module}::{function}" if isinstance(function, types.FunctionType) else f"::{function}"


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Value):
        return leaf.meta
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_leaves(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, tree)
    return found


def _described(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:80]}" if text else type(error).__name__
