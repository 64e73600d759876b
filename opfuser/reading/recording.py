"""The time of a trace: what code is executed and which attributes are read, in one thread alone."""

from __future__ import annotations

import dis
import importlib.util
import inspect
import io
import logging
import operator
import os
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date, datetime
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn.modules import module as module_file
from torch.utils.checkpoint import checkpoint

from .. import torch_internals as internals
from ..runtime import is_own
from .arguments import is_number
from .observed import Observed, attributes_of
from .reads import MISSING, SLOTS, is_of_python, is_scalar
from .replaced_methods import replaced
from .stand_ins import LayerIndex

_FRAMEWORK = vars(module_file)
_OWN = tuple(f"{__name__.partition('.')[0]}.{part}" for part in ("applying", "reading"))
# Names in code that reads attributes without their objects.
_HIDDEN = {"getattr_static"}, {"object", "__getattribute__"}
_OPERATORS = vars(operator).keys() & vars(int).keys() - {"__doc__"}
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_COLLECTIVES = frozenset(
    """all_gather all_gather_into_tensor all_reduce all_to_all all_to_all_single barrier broadcast
    gather irecv isend recv reduce reduce_scatter reduce_scatter_tensor scatter send""".split()
)
_WRAPPERS = "nn.parallel.", "distributed.fsdp."
# What is set for a whole process and no part of the key of a call, and what is never the same.
_SETTINGS = internals.SETTINGS.union(
    (globals, os.urandom, date.today, datetime.now, datetime.today, datetime.utcnow),
    (f for f in vars(time).values() if inspect.isbuiltin(f)),
)
# Modules of functions in C that are asked for the state of the interpreter.
_OF_PROCESS = frozenset(("gc", "sys"))
# What others may replace in modules of torch, as it was before.
_BEFORE = {id(module): dict(vars(module)) for module in (torch, torch.nn.functional)}
_FUNCTIONS = type(torch.autograd.Function)
# What draws by methods that are seen when they are called, and by which thread. Those of NumPy are
# not, and are of types of which a forward that reads one is kept.
_GENERATORS = random.Random, torch.Generator
# Importers that others have put before Python's, such as pytest's, are no part of a forward.
_IMPORT = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
# One trace at a time: it replaces attributes of nn.Module, and sets those that a forward sets.
ONE_AT_A_TIME = threading.RLock()
_UNDER_WAY: list[int] = []  # the thread of the trace
_plain = object.__getattribute__


def is_tracing() -> bool:
    """Whether a trace is under way in this thread."""
    return threading.get_ident() in _UNDER_WAY


class Recording:
    """Notes what a forward reads besides tensors, and undoes what it writes.

    Args:
        root: the module that is traced.
        note_effect: is told what the forward does besides computing, as a predicate.
        keep: is told why the module is kept, where the forward must not go on.
    """

    def __init__(
        self,
        root: nn.Module,
        note_effect: Callable[[str], None],
        keep: Callable[[str], NoReturn],
    ) -> None:
        self.note_effect, self.keep = note_effect, keep
        self.has_cache = False
        self._drawn: dict[int, Callable[[], object]] = {}  # by generator, what puts it back
        self._created: dict[int, nn.Module] = {}
        self._used: set[tuple[int, str]] = set()  # numbers of layers that were used
        self._seen: dict[tuple[int, int], types.CodeType] = {}
        self._function: types.FrameType | None = None
        self._apart: types.FrameType | None = None
        registry = _class("transformers.utils.generic", "GeneralInterface")
        self._configuration = _class("transformers.configuration_utils", "PreTrainedConfig")
        opaque = tuple(kind for kind in (registry, self._configuration) if kind is not None)
        self.observed = Observed(root, opaque, note_effect, keep)
        watched: list[tuple[Any, Callable[[types.FrameType], None]]] = [
            (checkpoint, self._effect("is checkpointed")),
            (torch.autograd.graph.saved_tensors_hooks.__init__, self._effect("has saved hooks")),
            (nn.Module.__init__, self._creation),
            (threading.current_thread, self._thread),
            (type(os.environ).__getitem__, self._environment),
            (type(os.environ).__iter__, self._environment_whole),
        ]
        if registry is not None:
            watched.append((registry.__getitem__, self._registry_entry))
        self._watched = {id(inspect.unwrap(f).__code__): note for f, note in watched}

    @contextmanager
    def active(self) -> Iterator[None]:
        """The time of the trace, within :data:`ONE_AT_A_TIME`.

        Meanwhile the attribute access of modules and configurations is replaced. Afterwards
        attributes, containers, globals and random numbers are as they were.
        """
        with ExitStack() as undo:
            _UNDER_WAY.append(threading.get_ident())
            undo.callback(_UNDER_WAY.pop)
            undo.callback(self.observed.undo)
            if "torch._dynamo" in sys.modules:  # or else nothing can have been compiled
                # Of the process: while no other trace is under way, which would leave it behind.
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            undo.callback(lambda: [put_back() for put_back in self._drawn.values()])
            for kind, name, recorded in (
                (nn.Module, "__getattribute__", self._getattribute),
                (nn.Module, "__getattr__", self._getattr),
                (nn.Module, "__setattr__", self._setattr),
                (self._configuration, "__getattribute__", self._of_configuration),
            ):
                if kind is not None:
                    undo.enter_context(replaced(kind, name, recorded(getattr(kind, name))))
            undo.callback(sys.setprofile, sys.getprofile())
            sys.setprofile(self._profile)
            yield

    # Attributes

    def _getattribute(self, original: Any) -> Callable[[nn.Module, str], Any]:
        observed, frame = self.observed, sys._getframe

        def recorded(module: nn.Module, name: str) -> Any:
            value = original(module, name)
            if name == "__class__" or id(module) in self._created:
                return value
            if name in SLOTS:
                observed.container(value)
            elif frame(1).f_globals is not _FRAMEWORK:
                observed.modules[id(module)] = module
                if name == "__dict__":
                    for part in observed.container(value):
                        if isinstance(part, (dict, list, set)):
                            observed.container(part)
                    return value
                observed.attribute(module, _plain(module, "__dict__"), name, value)
                if name == "layer_idx" and self.has_cache and type(value) is int:
                    return self._layer_index(module, value)
            return value

        return recorded

    def _layer_index(self, module: nn.Module, value: int) -> Any:
        row = id(_plain(module, "__dict__")), "layer_idx"
        free = self.observed.free
        if row not in self._used:
            free.add(row)

        def used() -> None:
            self._used.add(row)
            free.discard(row)

        return LayerIndex(value, module, used)

    def _getattr(self, original: Any) -> Callable[[nn.Module, str], Any]:
        observed = self.observed

        def recorded(module: nn.Module, name: str) -> Any:
            if id(module) in self._created:
                return original(module, name)
            observed.modules[id(module)] = module
            attributes = attributes_of(module)
            for held in attributes[1:]:
                if name in held:
                    observed.row(held, name, held[name])
                    return held[name]
            for held in attributes:
                observed.row(held, name, MISSING)
            observed.kind(type(module), name)
            return original(module, name)

        return recorded

    def _setattr(self, original: Any) -> Callable[[nn.Module, str, Any], None]:
        def recorded(module: nn.Module, name: str, value: Any) -> None:
            if id(module) not in self._created:
                self.note_effect(f"sets its attribute '{name}'")
                for held in attributes_of(module):
                    self.observed.hold(held)
            original(module, name, value)

        return recorded

    def _of_configuration(self, original: Any) -> Callable[[Any, str], Any]:
        observed = self.observed

        def recorded(configuration: Any, name: str) -> Any:
            if name in ("__class__", "__dict__", "attribute_map"):
                return original(configuration, name)
            own = _plain(configuration, "__dict__")
            name = _plain(configuration, "attribute_map").get(name, name)
            observed.hold(own)
            try:
                value = original(configuration, name)
            except AttributeError:
                observed.row(own, name, MISSING)
                raise
            observed.attribute(configuration, own, name, value)
            return value

        return recorded

    # Code

    def _profile(self, frame: types.FrameType, event: str, argument: Any) -> None:
        """Notes the globals that the code of a called function names."""
        if event != "call":  # most events, so that this comes first
            if event == "return":
                self._returns(frame, argument)
            elif event == "c_call":
                self._calls_builtin(frame, argument)
            elif frame is self._function:
                self._function = None
                internals.set_grad_enabled(True)
            return
        code, around = frame.f_code, frame.f_globals
        if self._apart is None and (code is _IMPORT or id(code) in self.observed.cached):
            self._apart = frame
        if self._apart is not None:  # runs once in the process, whatever it reads
            return
        if (watched := self._watched.get(id(code))) is not None:
            watched(frame)
        if (id(code), id(around)) in self._seen:
            return
        self._seen[id(code), id(around)] = code
        self._new_code(frame)

    def _calls_builtin(self, frame: types.FrameType, function: Any) -> None:
        """Notes what a function in C does that a frame calls."""
        own = function.__self__
        if function in _SETTINGS:
            self.note_effect(f"asks for {function.__name__.removeprefix('_get_')}")
        elif (
            function.__module__ in _OF_PROCESS or function is dir or internals.is_private(function)
        ):
            if not is_of_python(file := _file(frame)) and not is_own(file):
                self.note_effect(f"asks for {function.__name__}")
        elif isinstance(own, _GENERATORS):
            self._drawn.setdefault(id(own), _state_of(own))
            self.note_effect("draws random numbers")
        elif isinstance(own, _FUNCTIONS) and function.__name__ == "apply":
            self.note_effect(f"has an autograd function, {own.__name__}")
            if torch.is_grad_enabled():  # as it would save for a backward, and tell hooks of that
                self._function = frame
                internals.set_grad_enabled(False)
        elif function is print:
            self.keep("prints")
        elif isinstance(own, io.IOBase) and not is_of_python(_file(frame)):  # as logging is
            self.keep(f"calls {function.__name__} of a file")

    def _new_code(self, frame: types.FrameType) -> None:
        """Notes what code is that is executed for the first time."""
        code, around = frame.f_code, frame.f_globals
        if code.co_argcount and isinstance(frame.f_locals.get(code.co_varnames[0]), FunctionCtx):
            self._watched[id(code)] = self._apply_part
            self._apply_part(frame)
        file = _file(frame)
        top, _, rest = file.partition(".")
        if rest == "distributed.distributed_c10d":
            if code.co_name in _COLLECTIVES:
                self.keep(f"communicates by {code.co_name}")
            self.observed.kind(torch.distributed.GroupMember, "WORLD")
        if top == "torch" and rest.startswith(_WRAPPERS):
            self.keep(f"runs torch.{rest}, which coordinates devices")
        if is_of_python(file) or file.startswith(_OWN):
            return
        self._note_code(code, around)

    def _note_code(self, code: types.CodeType, around: dict[str, Any]) -> None:
        """Notes what code that is executed for the first time reads and writes."""
        self.observed.execute(code)
        self.observed.names.update(code.co_names)
        self.observed.texts.update(_names_in(code.co_consts))
        if stores := _STORE_GLOBAL in code.co_code[::2]:
            self.note_effect("writes to a global")
        if code.co_freevars and _writes_to_closure(code):
            self.note_effect("writes to a variable of another function")
        if _tells_types_apart(code):
            self.note_effect("may tell integers of two types apart")
        for hidden in _HIDDEN:
            if hidden <= set(code.co_names):
                self.note_effect(f"reads by {'.'.join(sorted(hidden, reverse=True))}")
        if _IMPORT_NAME in code.co_code[::2]:
            for module in _imported_by(code, around):
                self.observed.look_into(module.__name__, module)
        for name in code.co_names:
            if name in around:
                self._named(around, name, code.co_names)
            elif stores:
                self.observed.row(around, name, MISSING)

    def _returns(self, frame: types.FrameType, result: Any) -> None:
        cache = self.observed.cached.get(id(frame.f_code))
        if cache is not None and not is_scalar(result):
            self.observed.kept_results.add(cache)
        if frame is self._apart:
            self._apart = None

    def _named(self, holder: dict[str, Any], name: str, names: tuple[str, ...]) -> None:
        """Notes what a name stands for, and in modules and classes what other names may."""
        value = holder[name]
        if isinstance(value, types.ModuleType):
            own, known = vars(value), is_of_python(value.__name__)
            if not known:
                self.observed.named[id(value)] = value
            before = _BEFORE.get(id(value), own)
            for attribute in own.keys() & set(names):
                # Of Python and torch, what others may have set; they do not replace functions.
                found = own[attribute]
                if not known or is_number(found) or found is not before.get(attribute):
                    self._named(own, attribute, names)
            return
        if isinstance(value, logging.Logger):
            return
        if isinstance(value, type):
            if is_of_python(value.__module__):
                return
            for attribute in names:
                if hasattr(value, attribute) and not attribute.startswith("__"):
                    self.observed.kind(value, attribute)
        self.observed.row(holder, name, value)
        self.observed.look_into(name, value)

    def _apply_part(self, frame: types.FrameType) -> None:
        """Forward or ``setup_context`` of an autograd function, which code in C may have called."""
        context = type(frame.f_locals[frame.f_code.co_varnames[0]]).__name__
        self.note_effect(f"has an autograd function, {context.removesuffix('Backward')}")

    def _effect(self, text: str) -> Callable[[types.FrameType], None]:
        return lambda frame: self.note_effect(text)

    def _thread(self, frame: types.FrameType) -> None:
        if frame.f_back is not None and not is_of_python(_file(frame.f_back)):
            self.note_effect("asks for current_thread")

    def _creation(self, frame: types.FrameType) -> None:
        made = frame.f_locals["self"]
        self._created[id(made)] = made

    def _environment(self, frame: types.FrameType) -> None:
        """Notes a variable of the environment."""
        own = frame.f_locals["self"]
        name = own.encodekey(frame.f_locals["key"])
        self.observed.row(own._data, name, own._data.get(name, MISSING))

    def _environment_whole(self, frame: types.FrameType) -> None:
        self.observed.container(frame.f_locals["self"]._data)

    def _registry_entry(self, frame: types.FrameType) -> None:
        """Notes an entry of a registry of transformers, in its own mapping and its class's."""
        registry, key = frame.f_locals["self"], frame.f_locals["key"]
        for mapping in (registry._local_mapping, type(registry)._global_mapping):
            self.observed.row(mapping, key, mapping.get(key, MISSING))


def _file(frame: types.FrameType) -> str:
    """The name of the module that executed code is of."""
    return str(frame.f_globals.get("__name__", ""))


def _state_of(generator: random.Random | torch.Generator) -> Callable[[], object]:
    """A function after which a generator goes on as it would now."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def _tells_types_apart(code: types.CodeType) -> bool:
    """Whether code may tell that sizes are integers of another type during a trace."""
    names, before = set(code.co_names), None
    if not {"type", "int"} <= names:
        return "SymInt" in names or not names.isdisjoint(_OPERATORS)
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and before != "LOAD_CONST":
            return True
        before = instruction.opname
    return "issubclass" in names


def _names_in(constants: Any) -> Iterator[str]:
    """The texts among the constants of code that may be names of attributes."""
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _writes_to_closure(code: types.CodeType) -> bool:
    return any(
        instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars
        for instruction in dis.get_instructions(code)
    )


def _imported_by(code: types.CodeType, around: dict[str, Any]) -> Iterator[types.ModuleType]:
    """The modules that code imports, and what they are parts of, as far as they are loaded."""
    instructions = list(dis.get_instructions(code))
    for level, _, instruction in zip(instructions, instructions[1:], instructions[2:]):
        if instruction.opname == "IMPORT_NAME":
            name = "." * level.argval + instruction.argval
            name = importlib.util.resolve_name(name, str(around.get("__package__")))
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                if isinstance(found := sys.modules.get(".".join(parts[:end])), types.ModuleType):
                    yield found


def _class(module: str, name: str) -> Any:
    """A class of another package, if that is imported."""
    return getattr(sys.modules.get(module), name, None)
