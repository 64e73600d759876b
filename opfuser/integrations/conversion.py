"""A module as one sequence of operations, which is read from a trace of its own forward."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from ..applying.decisions import check_modes
from ..applying.descriptions import children_called, operations_in
from ..core.change_tracking import has_hooks, replaces_forward
from ..core.context import COMPUTE_DTYPES
from ..errors import ArgumentError, ArgumentTypeError, NotSupportedError
from ..op import FusibleOperation
from ..reading.construction import build
from ..reading.dataflow import Value, leaves_in, values_in
from ..reading.grammar import read
from ..reading.kept import KeptError
from ..reading.operations import (
    Attention,
    Called,
    CrossAttention,
    Dropout,
    Input,
    Reading,
    Rotary,
    Rows,
)
from ..reading.tracer import Trace, trace
from ..sequential import Sequential
from .example_calls import Arguments, Example, ExampleCall, calls_made, given_call, needs_example

_APPLY = "opfuser.apply(model) has sequences compute those of its parts that are"


def from_torch(module: nn.Module, *, example: Example | None = None) -> Sequential:
    """Converts a module to a sequence of operations with the same parameters.

    The module's own forward is traced on the meta device, in training and in evaluation mode, and
    opfuser must understand every operation in it, as in :func:`opfuser.apply`. The sequence holds
    the same ``Parameter`` objects: one optimizer serves both, and a state dict loaded into the
    module is loaded into both. It computes what the module computes at the time of the conversion;
    attributes that are set, and parameters and modules that are replaced, later have no effect. A
    child that is not understood, has hooks or is parametrized stays the same object, and the
    sequence calls it. Devices (including meta), dtypes and ``requires_grad`` are those of the
    module, which does not change.

    An operation with the parameters of one child has the child's name, so the ``state_dict`` of a
    ``torch.nn.Sequential`` of layers keeps its keys. A norm without a weight gets a weight of ones
    that needs no gradient.

    Values and gradients are those of the module up to rounding. Dropout draws other numbers, and
    follows ``train()`` and ``eval()`` of the sequence.

    Args:
        module: computes one tensor from one tensor, row by row except for attention. A Sequential
            is returned unchanged.
        example: arguments of one call: a mapping of keywords, a tuple of positional arguments, or
            one tensor. For a single tensor, only dtype, rank and last dimension count. With several
            arguments, such as attention masks, call the sequence as you call the module, with
            arguments of the same structure. Without an example, tensors as wide as the parameters
            are tried.

    Returns:
        The sequence, in the module's mode.

    Raises:
        NotSupportedError: the module is not one sequence of operations. The message names the
            operation and its place.
        ArgumentTypeError: ``module`` is not a ``torch.nn.Module``.
        ArgumentError: no call succeeded without an example, or the example has equal sizes that may
            differ later.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError.explained(
            "Modules are converted", where="from_torch", received=type(module).__name__
        )
    if isinstance(module, Sequential):
        return module
    if isinstance(module, FusibleOperation):
        return Sequential(module)
    try:
        _check(module)
        call = _made(module) if example is None else given_call(module, example)
        reading = _read_in_all_modes(module, call)
        built = build(reading, module, checks=False)
    except KeptError as kept:
        raise NotSupportedError.explained(
            "opfuser.from_torch converts a module that is one sequence of operations",
            received=f"{type(module).__name__}, which {kept.reason}",
            remedy=_APPLY,
        ) from None
    made = Sequential(_named(built.sequence, module))
    if built.arguments:
        made.register_forward_pre_hook(
            Arguments(call, inspect.signature(module.forward), reading, built), with_kwargs=True
        )
    return made.train(module.training)


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
        if type(inner).train is not nn.Module.train or type(inner).eval is not nn.Module.eval:
            raise KeptError(f"has a train or eval of its own in '{path}'")
        if inner.training != module.training:
            raise KeptError(f"has '{path}' in another mode: call train() or eval() before")


def _made(module: nn.Module) -> ExampleCall:
    """A call that can be read.

    Raises:
        KeptError: none can be read.
        ArgumentError: none can be traced.
    """
    unread: KeptError | None = None
    untraced = ""
    for call in calls_made(module):
        try:
            traced = _traced(module, call)
        except KeptError as kept:
            shape = " x ".join(map(str, call.tensors[0].shape))
            untraced = untraced or f"with a tensor of {shape} it {kept.reason}"
            continue
        try:
            read(traced.dataflow)
        except KeptError as kept:
            unread = unread or kept
        else:
            return call
    raise unread or needs_example(module, untraced)


def _read_in_all_modes(module: nn.Module, call: ExampleCall) -> Reading:
    """What a module computes in training, and but for dropout in evaluation.

    Raises:
        KeptError: it computes something else, or for tensors of another rank or width.
        ArgumentError: sizes are equal that may differ.
    """
    reading, evaluated = (
        _read(_traced(module, call, training=mode), for_all_sizes=True) for mode in (True, False)
    )
    if _without_reasons(reading, dropout=False) != _without_reasons(evaluated):
        raise KeptError("computes something else in evaluation, besides dropout")
    if _without_grad(module, call) not in (None, _without_reasons(evaluated)):
        raise KeptError("computes something else without gradients")
    x = call.tensors[reading.input]
    # Attention takes three dimensions.
    ranks = [] if any(isinstance(op, Attention) for op in operations_in(reading)) else [2, 3, 4]
    shapes = [(rank, x.shape[-1], False) for rank in ranks if rank != x.dim()]
    # A dimension of one entry can be dropped by a module that takes no others there.
    shapes += [(rank, x.shape[-1], True) for rank in ranks if rank > 2]
    shapes += [(x.dim(), 2 * x.shape[-1], False)] if x.is_floating_point() else []
    for rank, width, single in shapes:
        other = call.of(module, reading.input, rank, width, single=single)
        try:
            traced = _traced(module, other)
        except KeptError:  # what the module does not take
            continue
        if _without_reasons(_read(traced)) != _without_reasons(reading):
            shape = " x ".join(map(str, other.tensors[reading.input].shape))
            raise KeptError(f"computes something else of {shape} entries")
    return reading


def _without_grad(module: nn.Module, call: ExampleCall) -> Any:
    """What is read of an evaluation without gradients; None if it is a kernel of torch's."""
    with suppress(KeptError):
        return _without_reasons(_read(_traced(module, call, training=False, grad=False)))
    return None


def _traced(
    module: nn.Module, call: ExampleCall, *, training: bool = True, grad: bool = True
) -> Trace:
    with _mode(module, training), torch.set_grad_enabled(grad):
        return trace(module, *call)


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Meanwhile the module is in a mode, and autocast and inference mode are off."""
    before = module.training  # as it is of all modules inside
    device = next((p.device.type for p in module.parameters()), "cpu")
    with torch.inference_mode(False), ExitStack() as stack:
        if torch.amp.is_autocast_available(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.callback(_set_mode, module, before)
        _set_mode(module, training)
        yield


def _set_mode(module: nn.Module, training: bool) -> None:
    for inner in module.modules():
        inner.training = training


def _read(traced: Trace, *, for_all_sizes: bool = False) -> Reading:
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
    if any(isinstance(op, Attention) and op.bias is not None for op in operations_in(reading)):
        raise KeptError("adds a bias to the scores of attention, which sequences are given apart")
    if any(isinstance(op, Attention) and op.conditions for op in operations_in(reading)):
        raise KeptError("hides keys on a condition that it computes, as no operation does")
    for op in operations_in(reading):
        if isinstance(op, Called) and leaves_in(op.arguments, Input):
            raise KeptError(op.reason)
        if isinstance(op, Rotary) and any(isinstance(table, Rows) for table in op.tables):
            raise KeptError("turns heads by rows of a buffer")
    if any(isinstance(op, CrossAttention) for op in operations_in(reading)):
        raise KeptError("attends to another input, which no operation of a sequence projects")
    if for_all_sizes:
        _check_sizes(traced, reading)
    return reading


def _check_sizes(traced: Trace, reading: Reading) -> None:
    """Refuses what was read of sizes that others need not have."""
    x = traced.dataflow.inputs[reading.input]
    dtype = values_in(traced.dataflow.result)[0].meta.dtype
    if dtype not in COMPUTE_DTYPES:
        raise KeptError(f"computes in {dtype}")
    if traced.guards:
        shape = " x ".join(map(str, x.shape))
        raise KeptError(f"decides by sizes, for {shape} entries that {' and '.join(traced.guards)}")
    rows = x.shape[:-1] if x.meta.is_floating_point() else x.shape
    if len({*rows}.intersection(traced.key.sizes)) < len(rows):
        raise ArgumentError.explained(
            "Sizes of an example that may differ, such as batch and sequence, do differ, and "
            "are neither 1 nor sizes of parameters",
            where="from_torch",
            received=" x ".join(map(str, x.shape)),
            remedy="Pass tensors of other sizes, and masks of bool",
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
