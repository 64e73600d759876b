"""The forward of a module to which ``apply`` was applied, and what is known of its calls."""

from __future__ import annotations

import copy
import inspect
import sys
import types
import weakref
from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .. import torch_internals as internals
from ..attention.masks import hides_queries
from ..core.recomputation import computed_again, parts_under_way
from ..errors import OpfuserError, QuantizedWeightError, RecomputationError
from ..quantization.operation_state import restore_state_of_parameters
from ..quantization.recipe_state import COMPUTED_BY
from ..reading.built import Memory
from ..reading.call_key import autocast_dtypes
from ..reading.captured_outputs import captured
from ..reading.kept import NotNowError
from ..reading.reads import is_hooked
from ..runtime import is_own
from ..runtime.tracing import transforms_active
from .caches import WithoutGradients
from .compiled import CompiledCalls, traced_call
from .decisions import Application, Decision, arranged
from .deferred import without_deferred
from .layouts import Given, Layout, given_of, layout_of

_STATE = COMPUTED_BY
_REDUCE = "__reduce_ex__"
_LOAD = "_load_from_state_dict"
# What a module does that was read so often without end is left alone.
_DECISIONS_AT_MOST = 200
_KINDS_AT_MOST = 16
_HIDES_QUERIES = (
    "adds a mask that hides all keys of a query by large numbers, with gradients enabled"
)
_OF_SCALES = QuantizedWeightError, RecomputationError
_SIZES_AT_MOST = 1024
_AS_BEFORE = "is computed again in a checkpoint, where its own forward was called before"


def forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What a module returns to which ``apply`` was applied.

    It stands in the module as a method of it, of which copies get one of their own. The names of
    globals in this function count as read by a module that is traced while it calls this one: there
    are none but torch and one function.
    """
    if torch.compiler.is_compiling():
        return traced_call(module, args, kwargs)
    # The attribute itself is what the trace would take for read with all its contents.
    own = object.__getattribute__(module, "__dict__")
    state = own.get("_opfuser_applied")
    if state is None or state.local.tracing:
        return type(module).forward(module, *args, **kwargs)
    return state.call(module, own, args, kwargs)


def _load_from_state_dict(
    module: Any, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """Loads a module to which ``apply`` was applied, also scales that it has no place for yet.

    It stands in the module as :func:`forward` does.
    """
    restore_state_of_parameters(module, state_dict, prefix)
    type(module)._load_from_state_dict(module, state_dict, prefix, *others)


# Of each class of modules, the function above with the signature of the class's own forward, which
# others ask for: a Trainer which columns of data it takes, generation whether it takes positions.
_functions: weakref.WeakKeyDictionary[type, types.FunctionType] = weakref.WeakKeyDictionary()
_CODE = forward.__code__


def _forward_of(kind: Any) -> types.FunctionType:
    made = _functions.get(kind)
    if made is None:
        made = types.FunctionType(_CODE, globals(), "forward")
        made.__doc__ = kind.forward.__doc__
        with suppress(TypeError, ValueError):  # of what is no function of Python, it has none
            made.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
        _functions[kind] = made
    return made


# What was found out for a call, and its sizes that may differ in others.
_Found = tuple[Decision, tuple[int, ...]]


@dataclass(eq=False)
class _Kind:
    """Calls of one layout.

    Attributes:
        layout: tells whether a call is of this kind.
        modes: shapes and modes of the last call, and what was found out for it.
        known: all of them.
    """

    layout: Layout
    modes: Hashable = None
    last: _Found | None = None
    known: dict[Hashable, _Found] = field(default_factory=dict)

    def note(self, modes: Hashable, found: _Found) -> None:
        if len(self.known) >= _SIZES_AT_MOST:
            self.known = {}
        self.known[modes] = found
        self.modes, self.last = modes, found


class State(CompiledCalls):
    """What is known of the calls of one module.

    Attributes:
        application: what it has in common with the other modules of its model.
        local: of the application.
        before: what stood in the module's ``__dict__`` as its forward; None if nothing did.
        decisions: what computes its calls, in order of the first ones.
        passed: how many calls its own forward took for reasons outside of it.
        module: in which it stands, weakly.
    """

    def __init__(self, application: Application, before: Any = None) -> None:
        self.application, self.local = application, application.local
        self.before = before
        self.decisions: list[Decision] = []
        self.passed = Counter()
        self.module = lambda: None
        self._left: weakref.WeakSet[Any] | None = None  # parts that its own forward computed
        self._kinds: tuple[_Kind, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        application = copy.deepcopy(self.application, memo)
        made = type(self)(application, copy.deepcopy(self.before, memo))
        if (copied := memo.get(id(self.module()))) is not None:
            made.module = weakref.ref(copied)
        return made

    def sequences(self) -> list[nn.Module] | None:
        """What computes the calls of the module, for :func:`opfuser.init_recipe_state`."""
        found: list[nn.Module] = []
        for decision in self.decisions:
            if decision.built is not None:
                found.append(decision.built.sequence)
                found += [e.sequence for e in decision.built.extras if isinstance(e, Memory)]
        return found if self.decisions else None

    def call(self, module: Any, own: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """The result of a call of the module."""
        if getrefcount(own["_opfuser_applied"]) > _REFERENCES:
            copied = _called_copy(module)
            if copied is not None:
                return copied.forward(*args, **kwargs)
        reason = _reason_outside()
        if not reason and self._left and (part := computed_again()) and part.key in self._left:
            reason = _AS_BEFORE
        if reason:
            return self._passed(module, reason, args, kwargs)
        kind: _Kind | None
        for kind in self._kinds:
            given = kind.layout(args, kwargs)
            if given is not None:
                break
        else:
            kind, given = self._new_kind(args, kwargs)
        reason = ""
        try:
            decision = self._decision(module, kind, given, args, kwargs)
        except NotNowError as kept:
            reason = kept.reason
        else:
            if given[2] is not None:
                reason = _reason_of_cache(decision, given)
            if decision.masks and not reason:
                reason = _reason_of_masks(decision, given)
        if reason:
            return self._passed(module, reason, args, kwargs)
        return self._computed(module, decision, given, args, kwargs)

    def _passed(self, module: Any, reason: str, args: Any, kwargs: Any) -> Any:
        """The result of the module's own forward, which a checkpoint around it calls again."""
        self.passed[reason] += 1
        if parts := parts_under_way():
            self._left = self._left or weakref.WeakSet()
            self._left.update(parts)
        return type(module).forward(module, *args, **kwargs)

    def reason_outside(self) -> str:
        return _reason_outside()

    def decide(self, module: nn.Module, args: Any, kwargs: Any) -> Decision:
        return self._decide(module, args, kwargs)[0]

    def _computed(
        self, module: Any, decision: Decision, given: Given, args: Any, kwargs: Any
    ) -> Any:
        inputs, _, cache = given
        head = decision.head
        if head is not None and self.local.within and not is_hooked(module):
            # A checkpoint calls the head once more, outside of a call of the model.
            deferred = None if parts_under_way() else head.deferred(inputs)
            if deferred is not None:
                return deferred
        decision.calls += 1
        if decision.built is None:
            return type(module).forward(module, *args, **kwargs)
        if cache is not None and torch.is_grad_enabled():
            cache = WithoutGradients(cache)
        try:
            y = decision.built(inputs, cache)
        except OpfuserError as error:
            # A cache may be extended by now; the own forward has not the scales that are asked for.
            if decision.tried or _fills(decision, given) or isinstance(error, _OF_SCALES):
                raise
            decision.give_up(f"is refused by opfuser: {str(error).partition('. ')[0]}")
            return type(module).forward(module, *args, **kwargs)
        decision.tried = True
        if decision.places is None:
            return y
        return arranged(decision.places, y if decision.built.outputs > 1 else (y,), inputs)

    def _new_kind(self, args: Any, kwargs: Any) -> tuple[_Kind | None, Given]:
        layout = layout_of(args, kwargs)
        if layout is None:
            return None, given_of(args, kwargs)
        kind = _Kind(layout)
        self._kinds = (kind, *self._kinds)[:_KINDS_AT_MOST]
        given = layout(args, kwargs)
        assert given is not None
        return kind, given

    def _decision(
        self, module: nn.Module, kind: _Kind | None, given: Given, args: Any, kwargs: Any
    ) -> Decision:
        _, shapes, cache = given
        modes = (
            shapes,
            module.training,
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            captured(),
            autocast_dtypes() if internals.any_autocast() else (),
        )
        found = None
        if kind is not None:
            found = kind.last if modes == kind.modes else kind.known.get(modes)
        if found is not None:
            decision, sizes = found
            reads = decision.reads
            current = decision.current(self.application) if reads is None else reads.current()
            if current and (cache is None or _takes(decision, sizes, module, cache)):
                return decision
        found = self._decide(module, args, kwargs)
        if kind is not None:
            kind.note(modes, found)
        return found[0]

    def _decide(self, module: nn.Module, args: Any, kwargs: Any) -> _Found:
        decisions = self.decisions
        if len(decisions) < _DECISIONS_AT_MOST:
            for child in module.modules():  # a copy that no call has come to yet
                state, own = state_of(child), child.__dict__.get("forward")
                if state is not None and state.module() is not child and is_applied(own):
                    install(child, type(state)(state.application))
            found = self.application.decide(module, args, kwargs, decisions)
            if found[0] not in decisions:
                decisions.append(found[0])
            return found
        if len(decisions) == _DECISIONS_AT_MOST:
            decisions.append(Decision("reads what keeps changing"))
        return decisions[-1], ()


class RootState(State):
    """What is known of the calls of a model, within which logits may be deferred."""

    def call(self, module: Any, own: dict[str, Any], args: Any, kwargs: Any) -> Any:
        if self.local.within:
            return super().call(module, own, args, kwargs)
        self.local.within = True
        try:
            result = super().call(module, own, args, kwargs)
        finally:
            self.local.within = False
        return without_deferred(result)


def _takes(decision: Decision, sizes: tuple[int, ...], module: nn.Module, cache: Any) -> bool:
    """Whether a decision for a call of such sizes holds with a cache as it is now."""
    trace = decision.trace
    if trace is None or not trace.updates:
        return True
    return trace.takes(trace.key._replace(sizes=sizes, caches=(cache,)), module)


def _fills(decision: Decision, given: Given) -> bool:
    """Whether a call extends a cache."""
    return decision.built is not None and decision.built.fills and given[2] is not None


def _reason_of_cache(decision: Decision, given: Given) -> str:
    """Why a call is not computed because of its cache; empty if it is, or has none."""
    cache, built = given[2], decision.built
    if cache is None or built is None or not torch.is_grad_enabled():
        return ""
    if getattr(cache, "is_compileable", False):
        return "writes to a cache, with gradients enabled"
    if any(bool(cache.get_seq_length(layer) > 0) for _, layer in built.cached):
        return "reads keys of other calls, with gradients enabled"
    return ""


def _reason_of_masks(decision: Decision, given: Given) -> str:
    """Why a call is not computed because of its masks; empty if it is."""
    if decision.built is None:
        return ""
    differentiated = torch.is_grad_enabled()
    for number, strictly in decision.masks:
        if (strictly or differentiated) and hides_queries(given[0][number], strictly):
            if not strictly:
                return _HIDES_QUERIES
            return "may hide all keys of a query by large numbers that it adds to scores"
    return ""


def _reason_outside() -> str:
    """Why no sequence may compute anything now; empty if there is nothing."""
    if transforms_active():
        return "torch.func transforms it"
    if any(internals.GLOBAL_HOOKS):
        return "hooks are registered for all modules"
    for number in range(internals.function_modes()):
        mode = type(internals.function_mode_at(number))
        # Those of opfuser, such as that of the audit, are told of what sequences do.
        if mode is not internals.DeviceContext and not is_own(mode.__module__):
            return "a TorchFunctionMode is on"
    if internals.in_forward_mode():
        return "forward-mode derivatives are computed"
    if internals.jit_traces():
        return "torch.jit traces it"
    return ""


def _called_copy(module: nn.Module) -> nn.Module | None:
    """The copy of a module that was called, which now has a forward of its own; None if none was.

    A copy that was made of the module's ``__dict__`` alone, as replicas of DataParallel are, holds
    the forward that is bound to the original. Which of the two was called, only the frame of
    torch's ``__call__`` tells.
    """
    frame = sys._getframe(3)
    if frame.f_globals is globals():  # of a RootState
        frame = sys._getframe(4)
    called = frame.f_locals.get("self") if frame.f_globals is vars(torch_module) else None
    if called is None or called is module:
        return None
    state = state_of(module)
    if state is None or called.__dict__.get(_STATE) is not state:
        return None
    if called.__dict__.get("_is_replica"):  # of DataParallel, made for one call
        del called.__dict__["forward"], called.__dict__[_STATE]
    else:
        install(called, type(state)(state.application))
    return cast(nn.Module, called)


def state_of(module: nn.Module) -> State | None:
    """What is known of the calls of a module; None if ``apply`` was not applied to it."""
    state = module.__dict__.get(_STATE)
    return state if isinstance(state, State) else None


def install(module: nn.Module, state: State) -> None:
    """Has the calls of a module be looked at."""
    module.__dict__[_STATE] = state
    state.module = weakref.ref(module)
    module.__dict__["forward"] = types.MethodType(_forward_of(type(module)), module)
    module.__dict__[_REDUCE] = types.MethodType(_reduced, module)
    module.__dict__.setdefault(_LOAD, types.MethodType(_load_from_state_dict, module))


def _reduced(module: nn.Module, protocol: Any) -> Any:
    """What copies and pickles are made of, in place of the method of the module's class.

    A pickle needs no opfuser, and is of a module as it was. A shallow copy is applied like the
    module, and computes with its own attributes.
    """
    around = sys._getframe(1)
    copies = around.f_globals is vars(copy)
    if copies:  # of what was copied from the module's __dict__, this is bound to the original
        module = around.f_locals.get("x", module)
    made: Any = type(module).__reduce_ex__(module, protocol)
    state = state_of(module)
    deep = copies and around.f_code is copy.deepcopy.__code__  # copies methods and states, too
    if deep or state is None or len(made) < 3 or not isinstance(made[2], dict):
        return made
    function, args, content, *others = made
    content = {name: v for name, v in content.items() if name not in (_STATE, _REDUCE)}
    if _loads(content.get(_LOAD)):
        del content[_LOAD]
    if is_applied(content.get("forward")):
        del content["forward"]
        if copies:
            function, args = _new_copy, (type(state)(state.application), function, *args)
    return function, args, content, *others


def _loads(value: Any) -> bool:
    return getattr(value, "__func__", None) is _load_from_state_dict


def _new_copy(state: State, function: Any, *args: Any) -> Any:
    made = function(*args)
    install(made, state)
    return made


def is_applied(value: Any) -> bool:
    """Whether a value is a method that :func:`install` has set."""
    # Objects of others may raise whatever they like when they are asked for what they have not.
    is_method = isinstance(value, types.MethodType)
    return is_method and getattr(value.__func__, "__code__", None) is _CODE


def uninstall(module: nn.Module) -> None:
    """Gives a module back what it had, also where others have kept the forward since."""
    own = module.__dict__
    own.pop(_REDUCE, None)
    if _loads(own.get(_LOAD)):
        del own[_LOAD]
    state = own.pop(_STATE, None)
    before = state.before if isinstance(state, State) else None
    for name, value in list(own.items()):
        if not is_applied(value):
            continue
        if name == "forward" and before is None:
            del own[name]
        else:
            own[name] = before or types.MethodType(type(module).forward, module)


class _Probe:
    """Counts the references to a state that one module alone holds, as ``State.call`` does."""

    local = Application().local

    def call(self, module: Any, own: dict[str, Any], args: Any, kwargs: Any) -> int:
        return getrefcount(own["_opfuser_applied"])


def _references() -> int:
    module = nn.Module()
    module.__dict__[_STATE] = _Probe()
    return cast(int, forward(module))


_REFERENCES = _references()
