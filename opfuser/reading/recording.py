"""Notes what a forward reads besides tensors while it is traced, and undoes what it writes."""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import logging
import random
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_file
from torch.utils.checkpoint import checkpoint

from .kept import KeptError
from .reads import HOOKS, MISSING, Reads, Row, contents, is_scalar, unchanged
from .stand_ins import LayerIndex

__all__ = ["Recording"]

_FRAMEWORK = vars(module_file)
_STRUCTURE = frozenset(("_parameters", "_buffers", "_modules"))
# Objects that are compared by identity: nothing inside them is read that is not noted elsewhere.
_OPAQUE = (
    Tensor,
    nn.Module,
    type,
    range,
    enum.Enum,
    logging.Logger,
    re.Pattern,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_DEEPEST = 6
_OWN = __name__.rpartition(".")[0]
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_COLLECTIVES = frozenset(
    """all_gather all_gather_into_tensor all_reduce all_to_all all_to_all_single barrier broadcast gather
    irecv isend recv reduce reduce_scatter reduce_scatter_tensor scatter send""".split()
)
# One trace at a time, as attributes of nn.Module are replaced meanwhile.
_LOCK = threading.RLock()
_plain = object.__getattribute__


class Recording:
    """What one traced forward reads of modules, configurations, globals and functions.

    Args:
        root: the module that is traced.
        note_effect: is told what the forward does besides computing, as a predicate.
        note_loop: is told that the forward counts by an integer, which cannot be followed.
    """

    def __init__(
        self,
        root: nn.Module,
        note_effect: Callable[[str], None],
        note_loop: Callable[[], None],
    ) -> None:
        self.root, self.note_effect, self.note_loop = root, note_effect, note_loop
        self.modules: dict[int, nn.Module] = {id(root): root}
        self.called: dict[int, nn.Module] = {}
        self.tensors: set[int] = set()
        self.has_cache = False
        self.free: set[tuple[int, str]] = set()  # rows in which siblings may differ
        self._rows: dict[tuple[int, str], Row] = {}
        self._kinds: dict[tuple[type, str], Any] = {}
        self._cells: dict[int, tuple[types.CellType, Any]] = {}
        self._containers: dict[int, tuple[Any, list[Any], Any]] = {}
        self._created: dict[int, nn.Module] = {}
        self._used: set[tuple[int, str]] = set()
        self._seen: set[types.CodeType] = set()
        self._owner = threading.get_ident()
        self._watched = {
            torch.autograd.Function.apply.__func__.__code__: self._autograd_function,
            inspect.unwrap(checkpoint).__code__: self._effect_of("is checkpointed"),
            torch.autograd.graph.saved_tensors_hooks.__init__.__code__: self._effect_of(
                "has hooks on saved tensors"
            ),
            nn.Module.__init__.__code__: self._created_module,
        }
        registry = getattr(sys.modules.get("transformers.utils.generic"), "GeneralInterface", None)
        if registry is not None:
            self._watched[registry.__getitem__.__code__] = self._registry_entry
        self._registry: Any = registry or ()
        configuration = sys.modules.get("transformers.configuration_utils")
        self._configuration: Any = getattr(
            configuration, "PreTrainedConfig", getattr(configuration, "PretrainedConfig", ())
        )

    # What is read

    def row(self, holder: dict[str, Any], name: str, value: Any) -> None:
        self._rows.setdefault((id(holder), name), (holder, name, value))
        if isinstance(value, Tensor):
            self.tensors.add(id(value))

    def kind(self, kind: type, name: str) -> None:
        if (kind, name) not in self._kinds:
            value = getattr(kind, name, MISSING)
            self._kinds[kind, name] = value
            if not isinstance(value, (types.FunctionType, property, types.MethodType)):
                self.look_into(name, value)

    def read_attribute(self, holder: Any, name: str, value: Any) -> None:
        own = _plain(holder, "__dict__")
        if name in own:
            self.row(own, name, value)
            self.look_into(name, value)
        else:
            self.row(own, name, MISSING)
            self.kind(type(holder), name)

    def look_into(self, name: str, value: Any, depth: int = 0) -> None:
        """Notes the contents of what may change inside."""
        if isinstance(value, Tensor):
            self.tensors.add(id(value))
        if is_scalar(value) or isinstance(value, (*_OPAQUE, self._configuration, self._registry)):
            return
        if value is MISSING or type(value).__module__.startswith("torch"):
            return
        if depth > _DEEPEST:
            self.note_effect(f"reads '{name}', a nested {type(value).__name__}")
            return
        inner: list[Any] = []
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self.cell(name, cell, depth)
        elif isinstance(value, types.MethodType):
            inner = [value.__self__]
        elif isinstance(value, functools.partial):
            inner = [value.func, value.args, value.keywords]
        elif isinstance(value, (tuple, frozenset)):
            inner = contents(value)
        elif isinstance(value, (list, dict, set)) or hasattr(value, "__dict__"):
            inner = self.container(value)
        else:
            self.note_effect(f"reads '{name}', a {type(value).__name__}")
        for part in inner:
            self.look_into(name, part, depth + 1)

    def cell(self, name: str, cell: types.CellType, depth: int) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not yet bound
            return
        if id(cell) not in self._cells:
            self._cells[id(cell)] = cell, value
            self.look_into(name, value, depth + 1)

    def container(self, holder: Any) -> list[Any]:
        """Notes the contents of a container, and returns them where that had not been done."""
        if id(holder) in self._containers:
            return []
        inside = contents(holder)
        copy = holder.copy() if isinstance(holder, (list, dict, set)) else dict(vars(holder))
        self._containers[id(holder)] = holder, inside, copy
        return inside

    # What code is executed

    def profile(self, frame: types.FrameType, event: str, argument: Any) -> None:
        """Notes the globals that the code of a called function names."""
        code = frame.f_code
        if event != "call" or (code in self._seen and code not in self._watched):
            return
        self._seen.add(code)
        if (watched := self._watched.get(code)) is not None:
            watched(frame)
        around = frame.f_globals
        file = str(around.get("__name__", ""))
        top, _, rest = file.partition(".")
        if rest == "distributed.distributed_c10d" and code.co_name in _COLLECTIVES:
            raise KeptError(f"communicates by {code.co_name}")
        if top == "torch" or top in sys.stdlib_module_names or file.startswith(_OWN):
            return
        stores = _STORE_GLOBAL in code.co_code[::2]
        if stores:
            self.note_effect("writes to a global")
        if "range" in code.co_names:
            self.note_loop()
        for name in code.co_names:
            if name in around:
                self._global(around, name, around[name], code.co_names)
            elif stores:
                self.row(around, name, MISSING)

    def _global(
        self, around: dict[str, Any], name: str, value: Any, names: tuple[str, ...]
    ) -> None:
        if isinstance(value, types.ModuleType):
            top = value.__name__.partition(".")[0]
            if top != "torch" and top not in sys.stdlib_module_names:
                for attribute in names:
                    if isinstance(entry := vars(value).get(attribute), types.FunctionType):
                        self.row(vars(value), attribute, entry)
        elif not isinstance(value, (type, logging.Logger)):
            self.row(around, name, value)
            if not isinstance(value, types.FunctionType):
                self.look_into(name, value)

    def _autograd_function(self, frame: types.FrameType) -> None:
        self.note_effect(f"has an autograd function, {frame.f_locals['cls'].__name__}")

    def _effect_of(self, text: str) -> Callable[[types.FrameType], None]:
        return lambda frame: self.note_effect(text)

    def _created_module(self, frame: types.FrameType) -> None:
        made = frame.f_locals["self"]
        self._created[id(made)] = made

    def _registry_entry(self, frame: types.FrameType) -> None:
        """Rows of the entry of a registry of transformers, in its own mapping and in its class's."""
        registry, key = frame.f_locals["self"], frame.f_locals["key"]
        for mapping in (registry._local_mapping, type(registry)._global_mapping):
            self.row(mapping, key, mapping.get(key, MISSING))

    # The time of the trace

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replaces the attribute access of modules and configurations, for this thread alone."""
        with _LOCK, ExitStack() as undo:
            if nn.Module.__getattr__ is not _MODULE_GETATTR:
                raise KeptError("is traced while another trace is under way")
            undo.enter_context(self._written_back())
            undo.enter_context(_random_states(self.note_effect))
            self._replace(undo, nn.Module, "__getattribute__", self._getattribute)
            self._replace(undo, nn.Module, "__getattr__", self._getattr(nn.Module.__getattr__))
            self._replace(undo, nn.Module, "__setattr__", self._setattr(nn.Module.__setattr__))
            if self._configuration:
                kind = self._configuration
                own = self._of_configuration(kind.__getattribute__)
                self._replace(undo, kind, "__getattribute__", own)
            undo.callback(sys.setprofile, sys.getprofile())
            sys.setprofile(self.profile)
            yield

    @staticmethod
    def _replace(undo: ExitStack, kind: type, name: str, function: Any) -> None:
        if name in vars(kind):
            undo.callback(setattr, kind, name, vars(kind)[name])
        else:
            undo.callback(delattr, kind, name)
        setattr(kind, name, function)

    @property
    def _getattribute(self) -> Callable[[nn.Module, str], Any]:
        owner, thread, frame = self._owner, threading.get_ident, sys._getframe

        def __getattribute__(module: nn.Module, name: str) -> Any:
            value = _plain(module, name)
            if name == "__class__" or thread() != owner or id(module) in self._created:
                return value
            if name in _STRUCTURE:
                self.container(value)
            elif frame(1).f_globals is not _FRAMEWORK:
                self.modules[id(module)] = module
                if name == "__dict__":
                    self.container(value)
                else:
                    self.read_attribute(module, name, value)
                    if name == "layer_idx" and self.has_cache and type(value) is int:
                        return self._layer_index(module, value)
            return value

        return __getattribute__

    def _layer_index(self, module: nn.Module, value: int) -> Any:
        row = id(_plain(module, "__dict__")), "layer_idx"
        if row not in self._used:
            self.free.add(row)

        def used() -> None:
            self._used.add(row)
            self.free.discard(row)

        return LayerIndex(value, used)

    def elsewhere(self) -> bool:
        """Whether another thread than the traced one asks."""
        return threading.get_ident() != self._owner

    def _getattr(self, original: Any) -> Callable[[nn.Module, str], Any]:
        owner, thread = self._owner, threading.get_ident

        def __getattr__(module: nn.Module, name: str) -> Any:
            if thread() != owner or id(module) in self._created:
                return original(module, name)
            own = _plain(module, "__dict__")
            self.modules[id(module)] = module
            for kind in ("_parameters", "_buffers", "_modules"):
                if name in own.get(kind, ()):
                    self.row(own[kind], name, own[kind][name])
                    return own[kind][name]
            for held in (own, *(own[kind] for kind in sorted(_STRUCTURE) if kind in own)):
                self.row(held, name, MISSING)
            self.kind(type(module), name)
            raise AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'")

        return __getattr__

    def _setattr(self, original: Any) -> Callable[[nn.Module, str, Any], None]:
        owner, thread = self._owner, threading.get_ident

        def __setattr__(module: nn.Module, name: str, value: Any) -> None:
            if thread() == owner and id(module) not in self._created:
                self.note_effect(f"sets its attribute '{name}'")
                for held in (_plain(module, "__dict__"), *_dicts(module)):
                    self.container(held)
            original(module, name, value)

        return __setattr__

    def _of_configuration(self, original: Any) -> Callable[[Any, str], Any]:
        owner, thread = self._owner, threading.get_ident

        def __getattribute__(configuration: Any, name: str) -> Any:
            if thread() != owner or name in ("__class__", "__dict__", "attribute_map"):
                return original(configuration, name)
            own = _plain(configuration, "__dict__")
            aliases = _plain(configuration, "attribute_map")
            actual = aliases.get(name, name)
            try:
                value = original(configuration, name)
            except AttributeError:
                self.row(own, actual, MISSING)
                raise
            self.read_attribute(configuration, actual, value)
            return value

        return __getattribute__

    # What is written

    @contextmanager
    def _written_back(self) -> Iterator[None]:
        """Afterwards, all attributes and containers are as they were."""
        held = [(d, dict(d)) for m in self.root.modules() for d in _dicts(m)]
        try:
            yield
        finally:
            for now, before in held:
                if not unchanged(contents(now), contents(before)):
                    self.note_effect("writes to the attributes of a module")
                    _refill(now, before)
            if any([_put_back(*row) for row in self._rows.values()]):
                self.note_effect("writes to what it reads")
            for holder, inside, copy in self._containers.values():
                if not unchanged(contents(holder), inside):
                    self.note_effect(f"writes to a {type(holder).__name__}")
                    _refill(holder, copy)

    def reads(self) -> Reads:
        """What was read, after the trace."""
        reads = Reads(self.root, free=frozenset(self.free))
        for module in self.called.values():
            self.modules[id(module)] = module
            self.row(module.__dict__, "forward", module.__dict__.get("forward", MISSING))
        for module in self.modules.values():
            self.kind(type(module), "forward")
        reads.modules = list(self.modules.values())
        reads.types = list(map(type, reads.modules))
        reads.hooks = [m.__dict__[name] for m in self.called.values() for name in HOOKS]
        reads.counts = list(map(len, reads.hooks))
        reads.hooked = any(reads.counts)
        for row in self._rows.values():
            reads.add_row(*row)
        for (kind, name), value in self._kinds.items():
            for column, entry in zip(reads.kinds, (kind, name, value)):
                column.append(entry)
        for cell, value in self._cells.values():
            reads.cells[0].append(cell)
            reads.cells[1].append(value)
        reads.containers = [(holder, inside) for holder, inside, _ in self._containers.values()]
        return reads


_MODULE_GETATTR = nn.Module.__getattr__


def _dicts(module: nn.Module) -> list[dict[str, Any]]:
    own = _plain(module, "__dict__")
    return [own, own["_parameters"], own["_buffers"], own["_modules"]]


def _put_back(holder: dict[str, Any], name: str, value: Any) -> bool:
    if holder.get(name, MISSING) is value:
        return False
    if value is MISSING:
        del holder[name]
    else:
        holder[name] = value
    return True


def _refill(holder: Any, copy: Any) -> None:
    if isinstance(holder, list):
        holder[:] = copy
        return
    held = holder if isinstance(holder, (dict, set)) else vars(holder)
    held.clear()
    held.update(copy)


@contextmanager
def _random_states(note_effect: Callable[[str], None]) -> Iterator[None]:
    """Afterwards, random numbers go on as if nothing had been traced."""
    numpy = sys.modules.get("numpy.random")

    def states() -> tuple[Any, ...]:
        of_numpy = numpy.get_state() if numpy is not None else None
        return random.getstate(), torch.get_rng_state(), of_numpy

    def comparable(states: tuple[Any, ...]) -> tuple[Any, ...]:
        python, tensor, of_numpy = states
        return python, tensor.tolist(), of_numpy and (of_numpy[1].tolist(), *of_numpy[2:])

    before = states()
    try:
        yield
    finally:
        if comparable(states()) != comparable(before):
            random.setstate(before[0])
            torch.set_rng_state(before[1])
            if numpy is not None:
                numpy.set_state(before[2])
            note_effect("draws random numbers")
