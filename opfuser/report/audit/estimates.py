"""Launches and bytes that a fusion saves, counted on tensors without data; nothing is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from ...basic import AddExtraInput, MakeExtraOutput
from ...core.op_base import BasicOperation
from ...errors import TargetError
from ...registry import disable, enable, fusions
from ...sequential import Sequential
from ..kernel_counts import size_of
from ..target import Target
from ..traffic import ModelTraffic, model_traffic
from .tracing import Facts, facts_of, name_of


class Cost(NamedTuple):
    """What one call of some operations takes more than their fusion, forward and backward.

    Attributes:
        launches: kernels.
        moved: bytes that they read and write.
        kept: bytes that autograd keeps from forward to backward.
    """

    launches: int = 0
    moved: int = 0
    kept: int = 0

    @property
    def bytes(self) -> int:
        """Less traffic, and less memory.

        A joint fusion may keep less and compute it again, so that it moves as much more; that does
        not take away from what it saves in memory.
        """
        return max(self.moved, 0) + max(self.kept, 0)

    @property
    def loses(self) -> bool:
        """Whether the fusion costs more bytes than it saves."""
        return self.moved + self.kept < 0


def like(facts: Facts) -> Tensor:
    """A tensor without data."""
    t = torch.empty(facts.shape, dtype=facts.dtype, device="meta")
    return t.requires_grad_(facts.requires_grad)


class _Nodes(nn.Module):
    """Runs nodes of a graph; their parameters are its own."""

    def __init__(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        super().__init__()
        self.nodes, self.outputs = nodes, outputs
        outside = dict.fromkeys(n for node in nodes for n in node.all_input_nodes)
        known = {n: facts for n in outside if n not in nodes and (facts := facts_of(n)) is not None}
        self.inputs = {n: like(facts) for n, facts in known.items() if n.op != "get_attr"}
        self.held = {
            n: nn.Parameter(like(facts), facts.requires_grad)
            for n, facts in known.items()
            if n.op == "get_attr"
        }
        for number, parameter in enumerate(self.held.values()):
            self.register_parameter(str(number), parameter)

    def forward(self, *inputs: Tensor) -> Any:
        values: dict[fx.Node, Any] = {**self.held, **dict(zip(self.inputs, inputs))}
        for node in self.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return tuple(values[n] for n in self.outputs)


def of_nodes(
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    instead: tuple[Sequential, tuple[Tensor, ...]] | None,
) -> Cost | None:
    """What functions of torch take more than the operation that computes the same.

    Where there is none, it is counted as one kernel in each pass: it reads inputs and parameters
    and writes outputs; in backward it reads the gradients of outputs, inputs and parameters, and
    writes those that are needed. It keeps its inputs.

    Args:
        outputs: those whose results others read.

    Returns:
        None if the functions cannot be run without data.
    """
    module = _Nodes(nodes, outputs)
    inputs = tuple(module.inputs.values())
    made = [facts for n in outputs if (facts := facts_of(n)) is not None]
    differentiated = any(facts.requires_grad for facts in made)
    try:
        with torch.set_grad_enabled(differentiated):
            before = model_traffic(Target("", module, inputs))
            if instead is not None:
                return _difference(before, model_traffic(Target("", *instead)))
    except TargetError:
        return None
    once = sum(map(size_of, inputs)) + sum(map(_read, module.held))
    once += sum(facts.bytes for facts in made)
    if not differentiated:
        return Cost(before.counts.launches - 1, before.counts.bytes - once)
    grads = sum(size_of(t) for t in (*inputs, *module.held.values()) if t.requires_grad)
    return Cost(
        before.counts.launches - 2,
        before.counts.bytes - 2 * once - grads,
        before.saved_bytes - sum(map(size_of, inputs)),
    )


def _read(parameter: fx.Node) -> int:
    """Bytes that are read of a parameter; of a table, what is looked up."""
    facts = facts_of(parameter)
    rows = [facts_of(n) for n in parameter.users if name_of(n) == "embedding"]
    looked_up = sum(found.bytes for found in rows if found is not None)
    return 0 if facts is None else looked_up or facts.bytes


_AS_IN_TORCH = "forward_linear_bias_activation"


@contextmanager
def unfused() -> Iterator[None]:
    """Switches fusions off, but for that of linear operations with their bias, as torch has it."""
    with disable("*"), disable(*_on()), enable(_AS_IN_TORCH):
        yield


@contextmanager
def only(name: str) -> Iterator[None]:
    """Switches one fusion on, and all off that :func:`unfused` does."""
    with unfused(), enable(name):
        yield


def _on() -> list[str]:
    """Fusions that were switched on by name, which a switch for all does not affect."""
    return [info.name for info in fusions() if info.enabled]


def of_sequence(
    sequence: Sequential,
    inputs: Iterable[Tensor],
    without: Callable[[], AbstractContextManager[Any]],
    within: Callable[[], AbstractContextManager[Any]],
) -> Cost | None:
    """What a Sequential takes more without fusions than with them.

    Returns:
        None if it cannot be run without data.
    """
    target = Target("", _Within(sequence), tuple(inputs))
    try:
        with without():
            before = model_traffic(target)
        with within():
            after = model_traffic(target)
    except TargetError:
        return None
    return _difference(before, after)


class _Within(nn.Module):
    """A Sequential in the middle of a model: nobody else refers to the gradients that it is given.

    What the products with 1 cost is the same with any fusion.
    """

    def __init__(self, sequence: Sequential) -> None:
        super().__init__()
        self.sequence = sequence

    def forward(self, *inputs: Tensor) -> Any:
        out = self.sequence(*inputs)
        return [t * 1 for t in (out if isinstance(out, tuple) else (out,))]


def _difference(before: ModelTraffic, after: ModelTraffic) -> Cost:
    return Cost(
        before.counts.launches - after.counts.launches,
        before.counts.bytes - after.counts.bytes,
        before.saved_bytes - after.saved_bytes,
    )


def segment(ops: Iterable[BasicOperation]) -> Sequential:
    """A Sequential of copies of operations of another one, on the meta device.

    What takes or gives an extra tensor takes it from, or gives it to the caller.
    """
    return Sequential(*(_copy(op) for op in ops))


def _copy(op: BasicOperation) -> BasicOperation:
    if isinstance(op, (AddExtraInput, MakeExtraOutput)):
        return type(op)()
    twin: BasicOperation = object.__new__(type(op))
    own = dict(op.__dict__)
    for derived in ("_alone", "_settings", "_stamp", "_serial", "_owner", "_state_place"):
        own.pop(derived, None)
    own.update(
        _extra_input_channels=[None] * op.num_extra_inputs,
        _extra_output_channels=[None] * op.num_extra_outputs,
        _extra_output_to_caller=[True] * op.num_extra_outputs,
        _routing_captured=False,
        _parameters={n: _on_meta(p) for n, p in op._parameters.items()},
        _buffers={n: _on_meta(b) for n, b in op._buffers.items()},
    )
    twin.__dict__.update(own)
    return twin


def _on_meta(t: Tensor | None) -> Tensor | None:
    if t is None or t.is_meta:
        return t
    other = t.detach().to("meta")
    return nn.Parameter(other, t.requires_grad) if isinstance(t, nn.Parameter) else other
