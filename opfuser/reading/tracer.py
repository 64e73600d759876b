"""One call of a module's own forward on the meta device, recorded as a dataflow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from .call_key import CallKey, call_key, constant_sizes, is_dtensor, is_plain
from .dataflow import Call, Dataflow, Node, Value, map_leaves, values_in
from .kept import KeptError
from .reads import Reads, contents, is_hooked, is_scalar, unchanged
from .recording import Recording
from .sizes import Sizes
from .stand_ins import CacheStandIn, is_cache
from .torch_functions import DRAWS, OF_DEVICE, OF_GRAPH, OF_STRIDES, QUESTIONS, name_of
from .traced_sizes import note_sizes

__all__ = ["Trace", "trace"]


@dataclass(eq=False)
class Trace:
    """What a module's forward computes in calls like one.

    Attributes:
        module: whose forward was traced.
        dataflow: its operations.
        reads: what it has read besides tensors; the trace holds while ``reads.current()``.
        key: of the call; the trace holds for calls with equal ``key.facts``.
        guards: conditions on the sizes ``s`` of other calls, as expressions of Python.
        takes: whether a call's ``key.sizes`` meet the guards.
    """

    module: nn.Module
    dataflow: Dataflow
    reads: Reads
    key: CallKey
    guards: tuple[str, ...]
    takes: Callable[[tuple[int, ...]], bool]


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    ignored_hooks: Callable[[Any], bool] = lambda hook: False,
) -> Trace:
    """What ``module``'s forward computes for a call with such arguments.

    The forward of the module's class runs once, with tensors on the meta device in place of the
    arguments, parameters and buffers. Nothing is copied or computed, and whatever the forward sets,
    appends or draws is as before when this returns or raises.

    A call of a child that has hooks is one node, ``call_module``: such a child is called as it is.

    Args:
        module: whose forward is called, without its own hooks.
        args: positional arguments of the call.
        kwargs: its keywords.
        ignored_hooks: whether a hook of a child is known to do nothing in such a call.

    Raises:
        KeptError: if the forward needs values of tensors, or cannot run on the meta device.
    """
    constants = constant_sizes(module)
    key = call_key(module, args, kwargs, constants)
    sizes = Sizes(key.sizes, constants.union(key.constants))
    tracer = _Tracer(module, _device_of(module, args, kwargs), sizes, ignored_hooks)
    args, kwargs = map_leaves(tracer.take, args), map_leaves(tracer.take, kwargs)
    given = [(c, contents(c)) for c in _containers((args, kwargs))]
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.set_grad_enabled(tracer.grad_enabled))
        if "torch._dynamo" in sys.modules:  # or else nothing can have been compiled
            modes.enter_context(torch.compiler.set_stance("force_eager"))
        with tracer.recording.active(), tracer.recorded_calls():
            result = tracer.call(type(module).forward, module, args, kwargs)
    if not all(unchanged(contents(c), before) for c, before in given):
        raise KeptError("writes to its arguments")
    tracer.dataflow.result = map_leaves(tracer.result_leaf, result)
    reads = tracer.recording.reads()
    if not reads.current():
        raise KeptError("changes what it reads")
    return Trace(module, tracer.dataflow, reads, key, sizes.guards, sizes.guard())


class _Tracer(TorchFunctionMode):
    """Records the functions of torch that are called, and calls them with tensors on meta."""

    def __init__(
        self,
        root: nn.Module,
        device: torch.device,
        sizes: Sizes,
        ignored_hooks: Callable[[Any], bool],
    ) -> None:
        super().__init__()
        self.sizes, self.ignored_hooks = sizes, ignored_hooks
        self.dataflow = Dataflow()
        self.recording = Recording(root, self.note_effect, sizes.fix_all)
        self.grad_enabled = torch.is_grad_enabled()
        self.device = device
        # Under autocast, stand-ins on the device itself: no other tensors are cast.
        self.autocast = _autocasts(device)
        self.fake: Any = FakeTensorMode() if self.autocast else nullcontext()
        self.stand_in_device = device if self.autocast else torch.device("meta")
        self.failed: KeptError | None = None
        self.muted = 0  # how many calls of children that are one node are open
        self.paused = False
        self.open_calls: list[Call] = []
        self.paths = {id(m): path for path, m in root.named_modules()}
        self.names: dict[int, tuple[Literal["parameter", "buffer"], str]] = {}
        for path, parameter in root.named_parameters():
            self.names[id(parameter)] = "parameter", path
        for path, buffer in root.named_buffers():
            self.names.setdefault(id(buffer), ("buffer", path))
        self.values: dict[int, Value] = {}
        self.foreign: dict[int, str] = {}  # why a value may not be what it seems
        self.kept_alive: list[Any] = []  # so that no id occurs twice

    @property
    def place(self) -> str:
        return self.open_calls[-1].path if self.open_calls else ""

    def call(self, forward: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        try:
            with self.stand_in_device, self:
                result = forward(module, *args, **kwargs)
        except KeptError:
            raise
        except Exception as error:
            raise self.failed or KeptError(f"could not be traced: {_described(error)}") from error
        if self.failed is not None:  # and the forward went on all the same
            raise self.failed
        return result

    # Tensors and values

    def take(self, leaf: Any) -> Any:
        """What the forward gets in place of a leaf of its arguments."""
        if is_cache(leaf):
            self.recording.has_cache = True
            return CacheStandIn(leaf, self.update)
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self.values:
            value = self.leaf(leaf, "input", str(len(self.dataflow.inputs)))
            self.dataflow.inputs.append(value)
        return self.values[id(leaf)].meta

    def leaf(self, t: Tensor, origin: Any, name: str) -> Value:
        if t.device != self.device and not (t.dim() == 0 and t.is_cpu):
            raise KeptError(f"has tensors on {self.device} and on {t.device}")
        own = {"dtype": t.dtype, "requires_grad": t.requires_grad, "device": self.stand_in_device}
        with torch.inference_mode(False), self.fake:
            meta = torch.empty_strided(t.shape, t.stride(), **own)
        value = Value(origin, name, meta, real=None if origin == "input" else t)
        if not (is_plain(t) or is_dtensor(t)):
            self.foreign[id(value)] = f"computes with a {type(t).__name__}"
        if origin != "input":
            self.sizes.constants.update(t.shape)
        self.kept_alive += [t, meta, value]
        self.values[id(t)] = self.values[id(meta)] = value
        return value

    def value_of(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if (known := self.values.get(id(leaf))) is not None:
            return known
        if (named := self.names.get(id(leaf))) is not None:
            return self.leaf(leaf, *named)
        value = self.leaf(leaf, "constant", f"constant {len(self.kept_alive)}")
        if id(leaf) not in self.recording.tensors:  # what made it was not seen
            self.foreign[id(value)] = "computes with a tensor of unknown origin"
        return value

    def stand_in(self, leaf: Any) -> Any:
        """What a function of torch is called with in place of a leaf of its arguments."""
        if isinstance(leaf, Value):
            return leaf.meta
        return self.stand_in_device if isinstance(leaf, torch.device) else leaf

    def result_leaf(self, leaf: Any) -> Any:
        value = self.value_of(leaf)
        if isinstance(value, Value) and id(value) in self.foreign:
            raise KeptError(f"{self.foreign[id(value)]}, which it returns")
        if not isinstance(value, (Value, CacheStandIn)) and not is_scalar(value):
            raise KeptError(f"returns a {type(value).__name__}")
        return value

    # Functions of torch

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        op, kwargs = name_of(function), kwargs or {}
        if self.paused or op == "_set_grad_enabled":
            return function(*args, **kwargs)
        if op in QUESTIONS:
            return self.answer(op, function, args, kwargs)
        given = map_leaves(self.value_of, (args, kwargs))
        note_sizes(op, *given, self.sizes)
        node = Node(op, function, *map_leaves(_plain, given), self.place)
        operands, keywords = map_leaves(self.stand_in, (node.args, node.kwargs))
        tensors = _tensors((operands, keywords))
        versions = [t._version for t in tensors]
        profile = sys.getprofile()
        sys.setprofile(None)  # what a function of torch does inside is its own matter
        try:
            with self.fake:
                result = _computed(op, function, operands, keywords)
        except (RuntimeError, NotImplementedError) as error:
            self.failed = KeptError(f"computes {op} in '{self.place}' ({_described(error)})")
            raise self.failed from error
        finally:
            sys.setprofile(profile)
        written = [t for t, version in zip(tensors, versions) if t._version != version]
        self.add(node, result, tensors, written)
        return result

    def answer(self, op: str, function: Any, args: Any, kwargs: Any) -> Any:
        """The answer to a question about a tensor that does not depend on its entries."""
        value: Value = self.value_of(args[0])
        if op in OF_DEVICE:
            return _of_device(op, self.device)
        if op in OF_STRIDES or (op in OF_GRAPH and value.origin != "input"):
            self.note_effect(f"asks for {op}")
        if op in ("shape", "size"):
            shape = self.sizes.shape(value.shape)
            where = [*args[1:], *kwargs.values()]
            return shape[where[0]] if where and where[0] is not None else shape
        if op in ("numel", "nelement"):
            count: Any = 1
            for size in self.sizes.shape(value.shape):
                count = size * count
            return count
        if op == "__len__":  # which has to be an integer for the interpreter
            self.sizes.fix(value.shape[0])
        return function(value.meta, *args[1:], **kwargs)

    def add(self, node: Node, result: Any, operands: list[Tensor], written: list[Tensor]) -> None:
        results = _tensors(result)
        if not written and results and all(any(t is o for o in operands) for t in results):
            return  # a cast to the same dtype, dropout in evaluation: nothing was computed
        results += [t for t in written if not any(t is r for r in results)]
        values = values_in((node.args, node.kwargs))
        effects = [self.foreign[id(v)] for v in values if id(v) in self.foreign]
        if written or node.op.endswith(".__set__"):
            effects.append(f"writes in place by {node.op}")
        elif node.op in DRAWS:
            effects.append(f"draws random numbers by {node.op}")
        elif not results:
            effects.append(f"calls {node.op}")
        differentiated = any(t.requires_grad for t in operands)
        if torch.is_grad_enabled() != self.grad_enabled and differentiated:
            effects.append(f"computes {node.op} with gradients switched")
        if _autocasts(self.device) != self.autocast:
            effects.append(f"computes {node.op} with autocast switched")
        node.effect = ", ".join(effects)
        self.append(node, results)

    def append(self, node: Node, results: list[Tensor]) -> None:
        number = len(self.dataflow.nodes)
        for index, tensor in enumerate(results):
            value = Value("node", f"{node.op}#{number}.{index}", tensor, node)
            node.results.append(value)
            self.values[id(tensor)] = value
            self.kept_alive.append(tensor)
        if not self.muted:
            self.dataflow.nodes.append(node)

    def note_effect(self, text: str) -> None:
        """Adds a node for what the forward does besides calling functions of torch."""
        self.append(Node("effect", _nothing, (), {}, self.place, effect=text), [])

    def update(self, keys: Tensor, values: Tensor, layer: int, made: Any) -> Any:
        """Records the update of a cache by the keys and values of a layer."""
        given = self.value_of(keys), self.value_of(values)
        node = Node("cache.update", _nothing, given, {"layer": layer}, self.place)
        node.effect = "updates a cache"
        with self.unrecorded():
            results = made()
        self.append(node, list(results))
        return results

    def versions(self, tensors: list[Tensor]) -> list[int]:
        with self.unrecorded():
            return [t._version for t in tensors]

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Functions of torch are called as they are, and what is read is not noted."""
        profile, paused = sys.getprofile(), self.paused
        sys.setprofile(None)
        self.paused = True
        try:
            yield
        finally:
            self.paused = paused
            sys.setprofile(profile)

    def renewed(self, leaf: Any) -> Any:
        """Another stand-in for a result, as a hook may return another tensor than the forward."""
        if not isinstance(leaf, Tensor):
            return leaf
        with self.unrecorded():
            return leaf.view_as(leaf)

    # Calls of children

    @contextmanager
    def recorded_calls(self) -> Iterator[None]:
        original = nn.Module.__call__

        def recorded(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if (path := self.paths.get(id(module))) is None or self.recording.elsewhere():
                return original(module, *args, **kwargs)
            self.recording.called[id(module)] = module
            call = Call(module, path, len(self.dataflow.nodes))
            call.args, call.kwargs = map_leaves(self.value_of, (args, kwargs))
            tensors = _tensors((args, kwargs))
            versions = self.versions(tensors)
            hooked = is_hooked(module, self.ignored_hooks)
            own = module.forward if is_hooked(module) else original.__get__(module)
            self.open_calls.append(call)
            if not self.muted:
                self.dataflow.calls.append(call)
            self.muted += hooked
            try:
                result = own(*args, **kwargs)
            finally:
                self.muted -= hooked
                self.open_calls.pop()
            if hooked:
                self.append(
                    Node("call_module", module, call.args, call.kwargs, path), _tensors(result)
                )
            call.end = len(self.dataflow.nodes)
            call.result = map_leaves(self.value_of, result)
            if self.versions(tensors) != versions:
                self.note_effect(f"has '{path}' write to its arguments")
            return result

        nn.Module.__call__ = recorded  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]


def _computed(op: str, function: Any, args: Any, kwargs: Any) -> Any:
    if not op.endswith("grouped_mm"):
        return function(*args, **kwargs)
    # On meta it takes bf16 alone, where a CPU takes fp32 as well.
    dtype = args[0].dtype
    args, kwargs = map_leaves(_bf16, (args, kwargs))
    return function(*args, **kwargs).to(dtype)


def _bf16(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.dtype.is_floating_point
    return leaf.bfloat16() if floating else leaf


def _nothing() -> None:
    """Stands in nodes that call no function of torch."""


def _plain(leaf: Any) -> Any:
    return int.__int__(leaf) if isinstance(leaf, int) and type(leaf) is not bool else leaf


def _autocasts(device: torch.device) -> bool:
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _of_device(op: str, device: torch.device) -> Any:
    """The answer to a question about the device of a tensor."""
    if op == "device":
        return device
    if op == "get_device":
        return -1 if device.index is None else device.index
    return op == f"is_{device.type}"


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_leaves(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, tree)
    return found


def _device_of(module: nn.Module, args: Any, kwargs: Any) -> torch.device:
    tensors = [*module.parameters(), *module.buffers(), *_tensors((args, kwargs))]
    return next((t.device for t in tensors if t.dim() > 0), torch.device("cpu"))


def _containers(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list, dict)):
        yield tree
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _containers(part)


def _described(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:80]}" if text else type(error).__name__
