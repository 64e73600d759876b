"""A module as one sequence of operations, which is read from a trace of its own forward."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..applying.decisions import check_modes
from ..applying.descriptions import children_called, operations_in
from ..attention.masks import hides_queries
from ..change_tracking import has_hooks, replaces_forward
from ..context import COMPUTE_DTYPES
from ..errors import ArgumentError, ArgumentTypeError, NotSupportedError, explain
from ..op import FusibleOperation
from ..reading.construction import Built, build
from ..reading.dataflow import Value, map_leaves
from ..reading.grammar import read
from ..reading.kept import KeptError
from ..reading.operations import Attention, Called, Dropout, Reading
from ..reading.tracer import Trace, trace
from ..sequential import Sequential

__all__ = ["from_torch"]

Example = Mapping[str, Any] | Sequence[Any] | Tensor

# Sizes of batch and sequence, which hardly any module has among its own.
_SIZES = 11, 13, 17, 19, 23, 29, 31, 37
_WIDTHS_AT_MOST = 4
_APPLY = "opfuser.apply(model) has sequences compute those of its parts that are"


def from_torch(module: nn.Module, *, example: Example | None = None) -> Sequential:
    """The sequence of operations that computes what a module does, with the module's parameters.

    The module's own forward is traced on the meta device, in training and in evaluation, and every
    operation of it explained, as by :func:`opfuser.apply`. The sequence holds the same
    ``Parameter`` objects: an optimiser of either serves both, and what the module loads, both
    have. It computes what the module does when it is read: attributes that are set and parameters
    and modules that are replaced later do not count. A child that is not explained, has hooks or is
    parametrised is called by the sequence, and is the same object. Devices, meta included, dtypes
    and ``requires_grad`` are those of the module, which does not change.

    An operation whose parameters are those of one child has the child's name, so that the
    ``state_dict`` of a ``torch.nn.Sequential`` of layers has the same keys. A norm without a weight
    has one of ones that needs no gradient.

    Values and gradients are those of the module up to rounding. Dropout draws other numbers, and is
    that of ``train()`` and ``eval()`` of the sequence.

    Args:
        module: that computes one tensor of rows of one tensor, the same for each row but for
            attention. A sequence is returned as it is.
        example: arguments of one call: a mapping of keywords, a tuple of positional arguments, or
            one tensor. Of a tensor alone, dtype, rank and last dimension count. With several, the
            sequence is called with arguments of the same structure, such as masks of attention,
            as the module is. Without an example, one tensor is made of the sizes of the parameters.

    Returns:
        The sequence, in the mode of the module.

    Raises:
        NotSupportedError: the module is not one sequence of operations. The text names the
            operation and its place.
        ArgumentTypeError: ``module`` is no ``torch.nn.Module``.
        ArgumentError: no call could be made without an example, or sizes of the example are equal
            that may differ.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            explain("Modules are converted", where="from_torch", received=type(module).__name__)
        )
    if isinstance(module, Sequential):
        return module
    if isinstance(module, FusibleOperation):
        return Sequential(module)
    try:
        _check(module)
        call = _made(module) if example is None else _given(module, example)
        reading = _read_in_all_modes(module, call)
        built = build(reading, module)
    except KeptError as kept:
        raise NotSupportedError(
            explain(
                "opfuser.from_torch converts a module that is one sequence of operations",
                received=f"{type(module).__name__}, which {kept.reason}",
                remedy=_APPLY,
            )
        ) from None
    made = Sequential(_named(built.sequence, module))
    if built.arguments:
        made.register_forward_pre_hook(
            _Arguments(call, inspect.signature(module.forward), reading, built), with_kwargs=True
        )
    return made.train(module.training)


class _Call(NamedTuple):
    """Arguments of a call of a module, in the order of its forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def bound(cls, signature: inspect.Signature, args: Any, kwargs: Any) -> _Call:
        """Raises TypeError where they do not fit."""
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return cls(bound.args, bound.kwargs)

    @property
    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        map_leaves(lambda x: found.append(x) if isinstance(x, Tensor) else None, tuple(self))
        return found

    def of(self, x: Tensor) -> _Call:
        """The call with another tensor in place of its only one."""
        return _Call(*map_leaves(lambda leaf: x if isinstance(leaf, Tensor) else leaf, tuple(self)))


def _check(module: nn.Module) -> None:
    """Refuses what a forward does not tell of the module.

    Raises:
        KeptError: something is around its forward, or in front of it.
    """
    if has_hooks(module) or replaces_forward(module):
        raise KeptError("carries hooks or a forward of its own")
    for path, inner in module.named_modules():
        if "_call_impl" in vars(inner):
            raise KeptError(f"has '_call_impl' replaced in '{path}'")
        if inner.training != module.training:
            raise KeptError(f"has '{path}' in another mode: call train() or eval() before")


# Calls


def _made(module: nn.Module) -> _Call:
    """A call with a tensor whose width is one of the sizes of the parameters, that can be read.

    Raises:
        KeptError: none can be read.
        ArgumentError: none can be traced.
    """
    weights = [p for p in module.parameters() if not is_lazy(p) and p.is_floating_point()]
    widths = dict.fromkeys(n for p in weights if p.dim() for n in (p.shape[-1], p.shape[0]))
    like = weights[0] if weights else torch.empty(0)
    rows = _sizes(module)
    shapes = [(*rows[:rank], w) for rank in (2, 1) for w in [*widths][:_WIDTHS_AT_MOST] or [6]]
    examples = [_like(like, shape) for shape in shapes]
    examples.append(torch.empty(rows[:2], dtype=torch.int64, device=like.device))
    unread: KeptError | None = None
    untraced: KeptError | None = None
    signature = inspect.signature(module.forward)
    for x in examples:
        try:
            call = _Call.bound(signature, (x,), {})
        except TypeError as error:
            raise _needs_example(module, str(error)) from None
        try:
            traced = _traced(module, call)
        except KeptError as kept:
            untraced = untraced or kept
            continue
        try:
            read(traced.dataflow)
        except KeptError as kept:
            unread = unread or kept
        else:
            return call
    if unread is not None:
        raise unread
    assert untraced is not None
    given = " x ".join(map(str, examples[0].shape))
    raise _needs_example(module, f"with a tensor of {given} it {untraced.reason}")


def _needs_example(module: nn.Module, why: str) -> ArgumentError:
    return ArgumentError(
        explain(
            "Arguments of a call of a module are made where it takes one tensor of a width that "
            "its parameters have",
            where="from_torch",
            received=f"{type(module).__name__}: {why}",
            remedy="Pass those of one call as example=",
        )
    )


def _given(module: nn.Module, example: Example) -> _Call:
    """The call that an example is; of one tensor alone, one like it.

    Raises:
        ArgumentTypeError: the forward takes no such arguments.
        ArgumentError: a tensor is there twice.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, Mapping):
        kwargs = dict(example)
    else:
        args = (example,) if isinstance(example, Tensor) else tuple(example)
    signature = inspect.signature(module.forward)
    try:
        call = _Call.bound(signature, args, kwargs)
    except TypeError as error:
        raise ArgumentTypeError(
            explain(
                "An example has the arguments of one call of the module",
                where="from_torch",
                received=f"{', '.join([*(type(a).__name__ for a in args), *kwargs])}: {error}",
                remedy=f"The forward takes {signature}",
            )
        ) from None
    tensors = call.tensors
    if len({*map(id, tensors)}) < len(tensors):
        raise ArgumentError(
            explain(
                "Each tensor of an example is there once",
                where="from_torch",
                received="one that is passed twice",
                remedy="Pass a clone",
            )
        )
    if len(tensors) != 1 or not tensors[0].dim():
        return call
    return call.of(_like(tensors[0], _shape(module, tensors[0], tensors[0].dim())))


def _sizes(module: nn.Module) -> list[int]:
    """Sizes of rows that no parameter or buffer has."""
    own = {n for t in (*module.parameters(), *module.buffers()) if not is_lazy(t) for n in t.shape}
    return [n for n in _SIZES if n not in own]


def _shape(module: nn.Module, x: Tensor, rank: int) -> tuple[int, ...]:
    rows = _sizes(module)
    return (*rows[: rank - 1], x.shape[-1]) if x.is_floating_point() else (*rows[:rank],)


def _like(x: Tensor, shape: Sequence[int]) -> Tensor:
    floating = x.is_floating_point()
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=x.dtype, device=x.device, requires_grad=floating)


# Readings


def _read_in_all_modes(module: nn.Module, call: _Call) -> Reading:
    """What a module computes in training, and but for dropout in evaluation.

    Raises:
        KeptError: it computes something else, or for tensors of another rank or width.
        ArgumentError: sizes are equal that may differ.
    """
    traced = _traced(module, call)
    reading = _read(traced)
    _check_sizes(traced, reading)
    if _without_dropout(reading) != _without_reasons(_read(_traced(module, call, training=False))):
        raise KeptError("computes something else in evaluation, besides dropout")
    if len(call.tensors) > 1:
        return reading
    (x,) = call.tensors
    attends = any(isinstance(op, Attention) for op in operations_in(reading))
    shapes = [_shape(module, x, rank) for rank in (2, 3, 4) if not attends and rank != x.dim()]
    if x.is_floating_point():
        shapes.append((*x.shape[:-1], 2 * x.shape[-1]))
    for shape in shapes:
        try:
            other = _traced(module, call.of(_like(x, shape)))
        except KeptError:  # what the module does not take
            continue
        if _without_reasons(_read(other)) != _without_reasons(reading):
            raise KeptError(f"computes something else of {' x '.join(map(str, shape))} entries")
    return reading


def _traced(module: nn.Module, call: _Call, *, training: bool = True) -> Trace:
    with _mode(module, training):
        return trace(module, *call)


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Meanwhile the module is in a mode, gradients are recorded, and autocast is off."""
    before = module.training  # as it is of all modules inside
    device = next((p.device.type for p in module.parameters()), "cpu")
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        if torch.amp.is_autocast_available(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.callback(_set_mode, module, before)
        _set_mode(module, training)
        yield


def _set_mode(module: nn.Module, training: bool) -> None:
    for inner in module.modules():
        inner.training = training


def _read(traced: Trace) -> Reading:
    flow = traced.dataflow
    if not isinstance(flow.result, Value):
        raise KeptError(f"returns a {type(flow.result).__name__}")
    reading = read(flow)
    called = children_called(reading)
    if called and all(isinstance(op, Called) for op in reading.operations):
        raise KeptError(called[0][1])
    check_modes(flow, reading)
    if any(isinstance(op, Attention) and op.cache is not None for op in operations_in(reading)):
        raise KeptError("extends a cache of keys and values")
    return reading


def _check_sizes(traced: Trace, reading: Reading) -> None:
    """Refuses what was read of sizes that others need not have."""
    x = traced.dataflow.inputs[reading.input]
    if x.meta.is_floating_point() and x.meta.dtype not in COMPUTE_DTYPES:
        raise KeptError(f"computes in {x.meta.dtype}")
    if traced.guards:
        shape = " x ".join(map(str, x.shape))
        raise KeptError(f"decides by sizes, for {shape} entries that {' and '.join(traced.guards)}")
    rows = x.shape[:-1] if x.meta.is_floating_point() else x.shape
    if len({*rows}.intersection(traced.key.sizes)) < len(rows):
        raise ArgumentError(
            explain(
                "Sizes of an example that may differ, such as batch and sequence, do differ, and "
                "are neither 1 nor sizes of parameters",
                where="from_torch",
                received=" x ".join(map(str, x.shape)),
                remedy="Pass tensors of other sizes",
            )
        )


def _without_reasons(tree: Any, *, dropout: bool = True) -> Any:
    """A reading without the reasons for which children are called, to be compared."""
    if isinstance(tree, tuple):
        kept = [op for op in tree if dropout or not isinstance(op, Dropout)]
        return tuple(_without_reasons(op, dropout=dropout) for op in kept)
    if not is_dataclass(tree) or isinstance(tree, type):
        return tree
    inner = {f.name: _without_reasons(getattr(tree, f.name), dropout=dropout) for f in fields(tree)}
    if isinstance(tree, Called):
        inner["reason"] = ""
    if isinstance(tree, Attention) and not dropout:
        inner["dropout_p"] = 0.0
    return replace(tree, **inner)


def _without_dropout(reading: Reading) -> Any:
    return _without_reasons(reading, dropout=False)


# The sequence


def _named(operations: Sequential, module: nn.Module) -> dict[str, nn.Module]:
    """Operations by the names of the children whose parameters they hold, or by their numbers."""
    holders: dict[int, set[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), set()).add(path.rpartition(".")[0])
    names: list[str] = []
    for op in operations:
        found = [holders.get(id(p), set()) for p in op._parameters.values()]
        of = set.intersection(*found) if found else set()
        free = (
            name
            for name, child in module.named_children()
            if (child is op or name in of) and name not in names and not hasattr(operations, name)
        )
        names.append(next(free, ""))
    numbers = (str(n) for n in itertools.count() if str(n) not in names)
    return {name or next(numbers): op for name, op in zip(names, operations)}


class _Arguments:
    """Hands the arguments of a call of a module on to the operations of its sequence.

    Args:
        call: whose structure others have.
        signature: of the module's forward.
        reading: what was read of it.
        built: of this.
    """

    def __init__(
        self, call: _Call, signature: inspect.Signature, reading: Reading, built: Built
    ) -> None:
        self.facts = map_leaves(_fact, tuple(call))
        self.signature, self.input, self.arguments = signature, built.input, built.arguments
        attention = [op for op in operations_in(reading) if isinstance(op, Attention)]
        self.masks = sorted({mask.input for op in attention for mask in op.masks})

    def __call__(self, sequence: Any, args: Any, kwargs: Any) -> Any:
        try:
            call = _Call.bound(self.signature, args, kwargs)
        except TypeError as error:
            raise self.refusal(str(error)) from None
        if map_leaves(_fact, tuple(call)) != self.facts:
            shapes = ", ".join(f"{t.dtype} of {tuple(t.shape)}" for t in call.tensors)
            raise self.refusal(f"other arguments, with tensors {shapes}")
        inputs = call.tensors
        if torch.is_grad_enabled() and any(hides_queries(inputs[n]) for n in self.masks):
            raise NotSupportedError(
                explain(
                    "Gradients of a query whose keys are all hidden by large numbers are not exact",
                    where="a sequence of opfuser.from_torch",
                    received="an additive mask with such a query",
                    remedy="Pass a bool mask",
                )
            )
        given: dict[Any, dict[str, Any]] = {}
        for op, keyword, value in self.arguments:
            given.setdefault(op, {})[keyword] = value(inputs)
        return (inputs[self.input],), {"op_kwargs": given}

    def refusal(self, received: str) -> ArgumentError:
        return ArgumentError(
            explain(
                "A sequence is called with arguments of the structure of its example",
                where="opfuser.from_torch",
                received=received,
                remedy=f"Convert the module again with such an example; {_APPLY}",
            )
        )


def _fact(leaf: Any) -> Any:
    """What is the same in all calls of one structure."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.dim(), "floating" if leaf.is_floating_point() else str(leaf.dtype)
