"""Calls that torch.compile traces of modules to which ``apply`` was applied.

Code that Dynamo has traced runs again as long as its guards hold, and Dynamo guards what it
interprets. So it interprets the forward of the module's class, as for the plain model, and what
that puts into the graph is removed. What has been read of this forward is one function of the
graph in its place, which Dynamo does not look into. It is traced anew exactly when the plain
model is.

What decides and removes runs as ordinary Python during the trace; Dynamo sees constants.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_internals as internals
from ..core.traced_calls import Functions
from ..errors import OpfuserError
from ..quantization.region import open_regions, refuse_to_trace
from ..reading.built import Built
from ..reading.construction import build
from ..reading.dataflow import map_leaves
from ..reading.kept import KeptError
from ..reading.operations import Called, Experts, Reading
from ..reading.reads import is_scalar
from ..registry import registry
from ..runtime.tracing import exporting
from .decisions import Application, Decision, arranged
from .descriptions import operations_in
from .layouts import given_of

functions = Functions()
_named: dict[Hashable, str] = {}


@dataclass(eq=False)
class _Call:
    """A call that Dynamo traces.

    Attributes:
        state: of the module.
        output: of Dynamo, weakly.
        graph: of this, in which the call is.
        start: the last node before the call.
        end: the last node of the class's own forward.
        reading: whether the class's own forward is being traced for its guards.
        decision: for the call.
        reason: why there is none.
        paths: where the inputs are in its positional arguments and keywords.
    """

    state: CompiledCalls
    output: Callable[[], Any]
    graph: Any
    start: Any
    end: Any = None
    reading: bool = False
    decision: Decision | None = None
    reason: str = ""
    paths: tuple[tuple[Any, ...], ...] = ()

    def is_open(self, state: CompiledCalls) -> bool:
        """Whether what is being traced is this call of a module, after no graph break."""
        output = internals.graph_of_dynamo()
        if output is None or self.state is not state:
            return False
        return self.output() is output and output.graph is self.graph


class _Now(threading.local):
    call: _Call | None = None


_now = _Now()


def traced_call(module: Any, args: Any, kwargs: Any) -> Any:
    """What a call of a module returns, for Dynamo to trace."""
    if open_regions.count:
        refuse_to_trace(open_regions.changes)
    state = getattr(module, "_opfuser_applied", None)
    if state is None or not state.opens() or not torch.compiler.is_dynamo_compiling():
        return type(module).forward(module, *args, **kwargs)
    if not _is_simple(args) or not _is_simple(kwargs):
        state.notes_foreign()
        return type(module).forward(module, *args, **kwargs)
    functions.decide(args, kwargs)  # type: ignore[attr-defined]
    if not state.begins(registry.stamp):
        return type(module).forward(module, *args, **kwargs)
    plain = type(module).forward(module, *args, **kwargs)
    found = state.ends()
    if found is None:  # the graph was broken, and this has been computed
        return plain
    name, owned, paths, places = found
    parameters = []
    for path, own in owned:
        holder = module
        for part in path:
            holder = holder._modules[part]
        parameters.append(holder._parameters[own])
    y = getattr(functions, name)(args, kwargs, parameters)
    if not state.computes():
        return plain
    if places is None:
        return y
    inputs = [_at((args, kwargs), path) for path in paths]
    return arranged(places, y if isinstance(y, tuple) else (y,), inputs)


def _is_simple(tree: Any) -> bool:
    """Whether arguments are tensors and constants, which a graph has as arguments of a function."""
    if isinstance(tree, (tuple, list)):
        return all(map(_is_simple, tree))
    if isinstance(tree, dict):
        return all(map(_is_simple, tree.values()))
    return tree is None or isinstance(tree, (Tensor, bool, int, float, str, torch.dtype))


def _at(given: Any, path: tuple[Any, ...]) -> Any:
    """What stands at a place among arguments."""
    for part in path:
        given = given[part]
    return given


def _paths_in(tree: Any, *path: Any) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
    """The tensors in a structure of arguments, and where they are."""
    if isinstance(tree, Tensor):
        yield tree, path
    elif isinstance(tree, (tuple, list, dict)):
        for place, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _paths_in(part, *path, place)


class CompiledCalls:
    """What Dynamo asks while it traces a call of one module.

    Methods are told nothing of the module, whose identity would be guarded: layers that are alike
    share their code.
    """

    application: Application
    passed: Counter[str]
    module: Callable[[], nn.Module | None]

    def reason_outside(self) -> str:
        """Why no sequence may compute anything now; empty if there is nothing."""
        raise NotImplementedError

    def decide(self, module: nn.Module, args: Any, kwargs: Any) -> Decision:
        """What computes a call."""
        raise NotImplementedError

    @internals.constant_result
    def opens(self) -> bool:
        """Whether a sequence may compute a call that is about to be traced."""
        output, around = internals.graph_of_dynamo(), _now.call
        if self.application.local.tracing:
            return False
        if around is not None and around.reading and around.output() is output:
            return False  # it is part of a forward whose operations are removed
        reason = "torch.export traces it" if exporting() else self.reason_outside()
        if reason:
            self.passed[reason] += 1
        if reason or output is None:
            return False
        if not hasattr(functions, "decide"):
            functions.decide = torch.compiler.allow_in_graph(_decide)  # type: ignore[attr-defined]
        _now.call = _Call(self, weakref.ref(output), output.graph, _last(output.graph))
        return True

    @internals.constant_result
    def notes_foreign(self) -> bool:
        """Notes that a call is kept because of its arguments."""
        self._keep("is given a cache or other objects, which no function of a graph takes")
        return True

    @internals.constant_result
    def begins(self, registered: object) -> bool:
        """Whether a sequence computes the call; then the class's forward comes next.

        Args:
            registered: the stamp of the registry, on which code that is traced depends.
        """
        call = _now.call
        if call is None or not call.is_open(self):
            return False
        _remove(call.graph, _last(call.graph), call.start)
        if call.decision is None:
            if call.reason:
                self._keep(call.reason)
            _now.call = None
            return False
        call.reading = True
        return True

    @internals.constant_result
    def ends(self) -> tuple[str, Any, Any, Any] | None:
        """The name of the sequence's function, places of parameters, inputs and results.

        None where the graph was broken since :meth:`begins`.
        """
        call, _now.call = _now.call, None
        if call is None or not call.is_open(self) or call.decision is None:
            self._keep("breaks the graph")
            return None
        call.reading, call.end = False, _last(call.graph)
        for node in _between(call.graph, call.start, call.end):
            for number in filter(_is_number, node.all_input_nodes):
                _fix(number.meta.get("example_value"))
        _now.call = call
        decision, module = call.decision, self.module()
        assert decision.built is not None
        assert decision.reading is not None
        assert module is not None
        names = {id(m._parameters): path for path, m in module.named_modules()}
        owned = tuple(
            (tuple(names[id(a.source)].split(".")) if names[id(a.source)] else (), a.source_name)
            for a in decision.built.aliases
        )
        name = _name_of(decision.reading, decision.built, module)
        return name, owned, call.paths, decision.places

    @internals.constant_result
    def computes(self) -> bool:
        """Whether the sequence has computed the call; the nodes of the other one are removed."""
        call, _now.call = _now.call, None
        if call is None or not call.is_open(self) or call.decision is None:
            return False
        if call.reason:
            _remove(call.graph, _last(call.graph), call.end)
            self._keep(call.reason)
            return False
        _remove(call.graph, call.end, call.start)
        call.decision.calls += 1
        return True

    def _keep(self, reason: str) -> None:
        self.passed[f"{reason}, under torch.compile"] += 1
        if not self.application.warned:
            self.application.warned = True
            warnings.warn(
                f"opfuser.apply: under torch.compile, some modules are computed by the forwards of "
                f"their classes. The first one {reason}. opfuser.applying.report(model) has all.",
                stacklevel=2,
            )


def _last(graph: Any) -> Any:
    return next(iter(reversed(graph.nodes)), None)


def _between(graph: Any, before: Any, last: Any) -> list[Any]:
    """The nodes of a graph after one, up to the last, from which they start."""
    found: list[Any] = []
    for node in reversed(graph.nodes):
        if node is before:
            break
        if found or node is last:
            found.append(node)
    return found


def _remove(graph: Any, last: Any, before: Any) -> None:
    """Removes the nodes of a graph after one, up to the last, unless others use them.

    Of numbers that vary, Dynamo may use what there is again.
    """
    for node in _between(graph, before, last):
        kept = node.op in ("placeholder", "get_attr") or node.target == "item"
        if not kept and not node.users:
            graph.erase_node(node)


def _is_number(node: Any) -> bool:
    """Whether a node is a number of Python that no guard fixes, and no size of a tensor.

    Dynamo takes attributes and variables for such numbers once they have changed.
    """
    given = node.meta.get("grapharg")
    if given is None:
        return node.target == "item" and any(map(_is_number, node.all_input_nodes))
    of_tensor = type(given.source).__name__ == "TensorPropertySource"
    return given.pass_arg_as_tensor or not (of_tensor or isinstance(given.example, Tensor))


def _fix(number: Any) -> None:
    """Has code be traced anew for another number, as what has been read holds this one."""
    if isinstance(number, torch.SymFloat):
        number.node.guard_float(__file__, 0)
    elif isinstance(number, torch.SymInt):
        number.node.guard_int(__file__, 0)


def _decide(args: Any, kwargs: Any) -> None:
    """Finds out what computes the open call, whose tensors Dynamo stands in for."""
    call = _now.call
    module = None if call is None else call.state.module()
    if call is None or module is None or internals.graph_of_dynamo() is None:
        return
    try:
        with internals.without_modes(), internals.compiling(False):
            made: dict[int, Any] = {}  # so that what is given twice is one input
            args, kwargs = map_leaves(
                lambda leaf: made.setdefault(id(leaf), _like(leaf)), (args, kwargs)
            )
            decision = call.state.decide(module, args, kwargs)
            if decision.built is None:
                decision.calls += 1
            else:
                inputs = given_of(args, kwargs)[0]
                _check(decision, inputs)
                found = [*_paths_in((args, kwargs))]
                call.paths = tuple(next(path for t, path in found if t is x) for x in inputs)
                call.decision = decision
    except KeptError as kept:
        call.reason = kept.reason


def _check(decision: Decision, inputs: Sequence[Tensor]) -> None:
    """Refuses what is no function of tensors alone.

    Raises:
        KeptError: says why.
    """
    built, reading = decision.built, decision.reading
    assert built is not None
    assert reading is not None
    for op in operations_in(reading):
        if isinstance(op, (Called, Experts)):
            path = op.path if isinstance(op, Called) else op.router.path
            raise KeptError(f"calls '{path}' as it is")
    if built.reads_buffers:
        raise KeptError("is given what is made of a buffer, which no function of a graph holds")
    for alias in built.aliases:
        if type(parameter := alias.source[alias.source_name]) not in (nn.Parameter, Tensor):
            raise KeptError(f"has parameters of type {type(parameter).__name__}")
    if any(strictly for _, strictly in decision.masks):
        raise KeptError("adds numbers to scores of attention that are not looked at")
    added = [inputs[n] for n, _ in decision.masks if inputs[n].is_floating_point()]
    if added and torch.is_grad_enabled():
        raise KeptError("adds a mask of numbers, which is not looked at, with gradients enabled")
    if any(mask.is_cuda for mask in added):  # cuDNN's, which is given them unseen
        raise KeptError("adds a mask of numbers, for which torch has a faster kernel on a GPU")


def _like(leaf: Any) -> Any:
    """A tensor of one's own in place of one that stands in for others."""
    if isinstance(leaf, Tensor):
        if type(leaf).__name__ not in ("FakeTensor", "Parameter", "Tensor"):
            raise KeptError(f"is given a {type(leaf).__name__}")
        shape = [_hint(size) for size in leaf.shape]
        stride = [_hint(size) for size in leaf.stride()]
        made = torch.empty_strided(shape, stride, dtype=leaf.dtype, device=leaf.device)
        if isinstance(leaf, nn.Parameter):
            return nn.Parameter(made, leaf.requires_grad)
        return made.requires_grad_(leaf.requires_grad)
    if leaf is None or is_scalar(leaf):
        return leaf
    raise KeptError(f"is given a {type(leaf).__name__} that varies")


def _hint(size: Any) -> int:
    """A size that the traced call has, and others may have differently."""
    if type(size) is int:
        return size
    hint = size.node.hint
    if hint is None:
        raise KeptError("is given tensors of unknown sizes")
    return int(hint)


def _name_of(reading: Reading, like: Built, module: nn.Module) -> str:
    """The name in ``functions`` of the one that computes what was read.

    It goes from arguments and parameters to the output, and holds nothing of the module: all that
    is read alike has one function.
    """
    ones = tuple(op._parameters[own].dtype for op, own in like.ones)  # type: ignore[union-attr]
    key = reading, ones
    if key not in _named:
        name = f"applied_{len(_named)}"
        setattr(functions, name, _function(build(reading, module)))
        _named[key] = name
    return _named[key]


def _function(built: Built) -> Callable[..., Any]:
    places = [(alias.parameters, alias.name) for alias in built.aliases]
    ones = [((op._parameters, own), op._parameters[own]) for op, own in built.ones]
    built.forget_module()

    def opfuser_applied(args: Any, kwargs: Any, parameters: Sequence[Tensor]) -> Any:
        inputs = given_of(args, kwargs)[0]
        x = inputs[built.input]
        weights = [torch.ones(w.shape, dtype=w.dtype, device=x.device) for _, w in ones]  # type: ignore[union-attr]
        own = [*zip(places, parameters), *((place, w) for (place, _), w in zip(ones, weights))]
        before = [holder[name] for (holder, name), _ in own]
        try:
            for (holder, name), value in own:
                holder[name] = value
            with internals.compiling():
                return built(inputs)
        except OpfuserError as error:
            call = _now.call
            if call is None or call.end is None or internals.graph_of_dynamo() is None:
                raise
            call.reason = f"is refused by opfuser: {str(error).partition('. ')[0]}"
            return x.view_as(x)
        finally:
            for ((holder, name), _), value in zip(own, before):
                holder[name] = value

    torch.compiler.allow_in_graph(opfuser_applied)
    return opfuser_applied
