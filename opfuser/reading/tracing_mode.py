"""Records the functions of torch that a forward calls, and calls them with stand-ins on meta."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..torch_internals import DisableTorchFunction, FakeTensorMode
from .call_key import is_dtensor, is_plain
from .dataflow import Call, Dataflow, Node, Value, map_leaves, tensors_in, values_in
from .kept import KeptError
from .reads import is_scalar
from .recording import Recording
from .sizes import Size, Sizes, plain
from .stand_ins import CacheStandIn, LayerIndex, Update, cached_length, ignores_more, is_cache
from .torch_functions import (
    DRAWS,
    OF_DEVICE,
    OF_STRIDES,
    QUESTIONS,
    autocasts,
    chosen_by_entries,
    computed,
    described,
    device_answer,
    keeps_gradients,
    name_of,
    opened,
    with_devices,
)
from .traced_sizes import note_results, note_sizes, sizes_in
from .turns import turns

_FUNCTIONAL = dict(vars(functional))
# Whose parts are recorded, as it is none of the operations that readers know.
_COMPOSITE = functional.multi_head_attention_forward
# Loops over experts have as many turns as there are experts.
_TURNS_AT_MOST = 1024


def _nothing() -> None:
    """Stands in nodes that call no function of torch."""


class TracingMode(TorchFunctionMode):
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
        self.recording = Recording(root, self.note_effect, self.keep)
        self.grad_enabled = torch.is_grad_enabled()
        self.device = device
        # Under autocast, stand-ins on the device itself: no other tensors are cast.
        self.autocast = autocasts(device)
        self.fake: Any = FakeTensorMode() if self.autocast else nullcontext()
        self.stand_in_device = device if self.autocast else torch.device("meta")
        self.failed: KeptError | None = None
        self.caches: list[Any] = []
        self.stand_ins: list[CacheStandIn] = []
        self.updates: list[Update] = []
        self.muted = 0  # how many calls of children that are one node are open
        self.open_calls: list[Call] = []
        self.paths = {id(m): path for path, m in root.named_modules()}
        self.names = {id(t): ("buffer", path) for path, t in root.named_buffers()}
        self.names |= {id(t): ("parameter", path) for path, t in root.named_parameters()}
        self.values: dict[int, Value] = {}
        self.kept_alive: list[Any] = []  # so that no id occurs twice

    @property
    def place(self) -> str:
        return self.open_calls[-1].path if self.open_calls else ""

    @property
    def switched(self) -> bool:
        """Whether the forward has switched gradients or autocast."""
        grads = torch.is_grad_enabled() != self.grad_enabled
        return grads or autocasts(self.device) != self.autocast

    def call(self, forward: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        try:
            with self:
                result = forward(module, *args, **kwargs)
        except KeptError:
            raise
        except Exception as error:
            raise self.failed or KeptError(f"could not be traced: {described(error)}") from error
        if self.failed is not None:  # and the forward went on all the same
            raise self.failed
        return result

    def keep(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        """Ends the trace, even where the forward goes on after an exception."""
        self.failed = self.failed or KeptError(reason)
        raise self.failed from cause

    def forget(self) -> None:
        """Lets tensors and caches of the call go, which cycles would hold."""
        for held in (self.values, self.kept_alive, self.caches, self.open_calls):
            held.clear()
        for stand_in in self.stand_ins:
            stand_in.forget()

    # Tensors and values

    def take(self, leaf: Any) -> Any:
        """What the forward gets in place of a leaf of its arguments."""
        if is_cache(leaf):
            self.recording.has_cache = True
            if not any(leaf is cache for cache in self.caches):
                self.caches.append(leaf)
            is_first = leaf is self.caches[0]
            self.stand_ins.append(CacheStandIn(leaf, self.update, self.keep, is_first))
            return self.stand_ins[-1]
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self.values:
            value = self.leaf(leaf, "input", str(len(self.dataflow.inputs)))
            self.dataflow.inputs.append(value)
        return self.values[id(leaf)].meta

    def leaf(self, t: Tensor, origin: Any, name: str) -> Value:
        if t.device != self.device and not (t.dim() == 0 and t.is_cpu):
            self.keep(f"has tensors on {self.device} and on {t.device}")
        if t.layout != torch.strided or t.is_nested or t.is_quantized:
            self.keep("has tensors that are sparse, nested or quantized")
        with torch.inference_mode(False), self.fake:
            meta = torch.empty_strided(
                t.shape, t.stride(), dtype=t.dtype, device=self.stand_in_device
            )
            if type(t) is nn.Parameter:
                meta = nn.Parameter(meta, requires_grad=False)
        real = None if origin == "input" else t
        value = Value(origin, name, meta, real=real, requires_grad=t.requires_grad)
        if not (is_plain(t) or is_dtensor(t)):
            value.foreign = f"computes with a {type(t).__name__}"
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
        if id(leaf) not in self.recording.observed.tensors:  # what made it was not seen
            value.foreign = "computes with a tensor of unknown origin"
        return value

    def stand_in(self, leaf: Any) -> Any:
        """What a function of torch is called with in place of a leaf of its arguments."""
        if isinstance(leaf, Value):
            return leaf.meta
        if not isinstance(leaf, torch.device) or leaf == self.stand_in_device:
            return leaf
        if leaf.type != self.device.type or leaf.index not in (None, self.device.index):
            self.keep(f"has tensors on {self.device} and on {leaf}")
        return self.stand_in_device

    def result_leaf(self, leaf: Any) -> Any:
        value = self.value_of(leaf)
        if isinstance(value, Value) and value.foreign:
            raise KeptError(f"{value.foreign}, which it returns")
        if not isinstance(value, (Value, CacheStandIn)) and not is_scalar(value):
            raise KeptError(f"returns a {type(value).__name__}")
        return value

    # Functions of torch

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is _COMPOSITE:
            self.note_function(function.__name__, function)
            with self, self.sizes.ignored():
                return opened(function)(*args, **(kwargs or {}))
        # What this does, and a function of torch inside, is no part of the forward.
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            return self.called(name_of(function), function, args, kwargs or {})
        finally:
            sys.setprofile(profile)

    def called(self, op: str, function: Any, args: Any, kwargs: Any) -> Any:
        if op == "_set_grad_enabled":
            return function(*args, **kwargs)
        if op in QUESTIONS:
            return self.answer(op, function, args, kwargs)
        if op == "unbind" and args[1:] == (0,) and self.value_of(args[0]).counted:
            count = self.value_of(args[0]).shape[0]
            if count > _TURNS_AT_MOST:
                self.keep(f"has a loop of up to {count} turns in '{self.place}'")
            return turns(args[0], count, self.note_effect)
        if op == "__bool__" and self.value_of(args[0]).counted:
            self.note_effect("decides by the numbers of entries", op, Tensor.__bool__, args)
            return False
        args, kwargs = map_leaves(self.value_of, (args, kwargs))
        node = Node(op, function, args, kwargs, self.place, given=(args, kwargs))
        note_sizes(node, self.sizes)
        sized = sizes_in((node.args, node.kwargs))
        node.args, node.kwargs = map_leaves(plain, (node.args, node.kwargs))
        operands, keywords = map_leaves(self.stand_in, with_devices(node))
        tensors = tensors_in((operands, keywords))
        versions = [t._version for t in tensors]
        try:
            # What makes tensors of none makes them on the device of the stand-ins.
            made_on = nullcontext() if tensors else self.stand_in_device
            with torch.no_grad(), self.fake, made_on:
                result = computed(node, operands, keywords)
        except (RuntimeError, NotImplementedError) as error:
            self.keep(f"computes {op} in '{self.place}' ({described(error)})", error)
        self.note_function(op, function)
        written = [t for t, version in zip(tensors, versions) if t._version != version]
        note_results(node, sized, tensors_in(result), self.sizes)
        self.add(node, result, tensors, written)
        return result

    def note_function(self, op: str, function: Any) -> None:
        """Notes where a function of torch was found, as others may replace it."""
        for space in (vars(functional), vars(torch)):
            if space.get(op) is function:
                self.recording.observed.row(space, op, function)
        if _FUNCTIONAL.get(op) is function is not vars(functional).get(op):
            self.note_effect(f"finds another torch.nn.functional.{op} than torch's")

    def answer(self, op: str, function: Any, args: Any, kwargs: Any) -> Any:
        """The answer to a question about a tensor that does not depend on its entries."""
        value: Value = self.value_of(args[0])
        if op in OF_DEVICE:
            return device_answer(op, self.device)
        graph = op in ("grad_fn", "is_leaf") or (op == "requires_grad" and value.origin != "input")
        if op in OF_STRIDES or graph:
            self.note_effect(f"asks for {op}")
        if op in ("shape", "size", "numel", "nelement", "__len__") and value.counted:
            self.note_effect("asks how many entries there are")
        if op == "requires_grad":
            return value.requires_grad
        if op in ("shape", "size"):
            shape = self.sizes.shape(value.shape, value.origin == "input")
            where = [*args[1:], *kwargs.values()]
            return shape[where[0]] if where and where[0] is not None else shape
        if op in ("numel", "nelement"):
            return math.prod(self.sizes.shape(value.shape, value.origin == "input"))
        if op == "__len__":  # which has to be an integer for the interpreter
            self.sizes.fix(value.shape[0])
        return function(value.meta, *args[1:], **kwargs)

    def add(self, node: Node, result: Any, operands: list[Tensor], written: list[Tensor]) -> None:
        results, op = tensors_in(result), node.op
        in_place = bool(written) or op.endswith(".__set__") or (op[-1] == "_" and op[-2] != "_")
        if not in_place and results and all(any(t is o for o in operands) for t in results):
            return  # a cast to the same dtype, dropout in evaluation: nothing was computed
        results += [t for t in written if not any(t is r for r in results)]
        values, chosen = values_in((node.args, node.kwargs)), chosen_by_entries(node)
        effects = [v.foreign for v in values if v.foreign]
        if in_place:
            effects.append(f"writes in place by {op}")
        elif chosen:
            effects.append(f"returns the places of a number of entries by {op}")
            for t in results:
                any(map(self.sizes.derive, t.shape))
            if op == "nonzero":  # whoever asks for it has an effect
                self.sizes.constants.add(results[0].shape[0])
        elif op in DRAWS:
            effects.append(f"draws random numbers by {op}")
        elif not results:
            effects.append(f"calls {op}")
        enabled = torch.is_grad_enabled()
        differentiated = any(v.requires_grad for v in values)
        if enabled != self.grad_enabled and differentiated:
            effects.append(f"computes {op} with gradients switched")
        if autocasts(self.device) != self.autocast:
            effects.append(f"computes {op} with autocast switched")
        node.effect = ", ".join(effects)
        self.append(node, results, enabled and differentiated and keeps_gradients(op))
        others = {v.shape for v in values if not v.counted}
        counted = any(v.counted for v in values)
        for v in node.results:
            v.counted = chosen or (counted and v.shape not in others)

    def append(self, node: Node, results: list[Tensor], requires_grad: bool = False) -> None:
        number = len(self.dataflow.nodes)
        for index, tensor in enumerate(results):
            name = f"{node.op}#{number}.{index}"
            value = self.values[id(tensor)] = Value("node", name, tensor, node)
            of_numbers = tensor.dtype.is_floating_point or tensor.dtype.is_complex
            value.requires_grad = requires_grad and of_numbers
            node.results.append(value)
            self.kept_alive.append(tensor)
        if not self.muted:
            self.dataflow.nodes.append(node)

    def note_effect(
        self, text: str, op: str = "effect", function: Any = _nothing, args: Any = ()
    ) -> None:
        """Adds a node for what the forward does besides calling functions of torch."""
        operands = map_leaves(self.value_of, args)
        self.append(Node(op, function, operands, {}, self.place, effect=text), [])

    def update(self, cache: Any, keys: Tensor, values: Tensor, index: Any, more: bool) -> Any:
        """Records the update of a cache by the keys and values of a layer."""
        holder, layer = index.of_cache() if type(index) is LayerIndex else (None, int(index))
        if more and not ignores_more(cache, layer):
            self.keep("updates its cache with more than keys and values")
        given = self.value_of(keys), self.value_of(values)
        node = Node("cache.update", _nothing, given, {"layer": layer}, self.place)
        node.effect = "updates a cache"
        with unrecorded():
            queries = given[0].shape[-2]
            length = cached_length(cache, queries, layer)
            shapes = ((*v.shape[:-2], length, v.shape[-1]) for v in given)
            results = tuple(given[0].meta.new_empty(shape) for shape in shapes)
        added = self.sizes.of(queries)
        known = added.text if isinstance(added, Size) else str(added)
        if not known:  # a size that another one may only happen to equal
            self.sizes.fix_all()
        self.sizes.add(length)
        number = next(i for i, c in enumerate(self.caches) if c is cache)
        path = self.paths.get(id(holder))
        self.updates.append(Update(number, path, layer, known or str(queries), more))
        self.append(node, list(results), requires_grad=True)
        return results


@contextmanager
def unrecorded() -> Iterator[None]:
    """Functions of torch are called as they are, and what is read is not noted."""
    profile = sys.getprofile()
    sys.setprofile(None)
    try:
        with DisableTorchFunction():
            yield
    finally:
        sys.setprofile(profile)
