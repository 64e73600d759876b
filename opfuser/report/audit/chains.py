"""Operations of a plain model that follow each other, as sequences that can be planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ...basic import MakeExtraOutput
from ...core.fusion import Stage
from ...engine.plan import Plan
from ...errors import OpfuserError
from ...op import BasicOperation, FusedOperation
from ...sequential import Sequential
from .estimates import like
from .finding import Found
from .operations import GATED, operation
from .tracing import VIEWS, Trace, facts_of, name_of


class Chain(NamedTuple):
    """Operations of which each reads the output of the one before it.

    Attributes:
        found: the operations; None where several read the output of the one before.
        modules: their like in opfuser, on the meta device, in the same order.
    """

    found: tuple[Found | None, ...]
    modules: tuple[nn.Module, ...]

    @property
    def differentiated(self) -> bool:
        """Whether a gradient flows through it."""
        last = next(f for f in self.found[::-1] if f is not None)
        facts = facts_of(last.output)
        return facts is not None and facts.requires_grad

    @property
    def nodes(self) -> list[fx.Node]:
        """The calls of the model that compute it."""
        return [node for f in self.found if f is not None for node in f.nodes]

    def cut(self, at: slice) -> Chain:
        """Some of its operations."""
        return Chain(self.found[at], self.modules[at])


class Fused(NamedTuple):
    """A fusion that would match in a chain.

    Attributes:
        name, stage: of the fusion.
        part: the operations that it joins.
        whole: the same, with those that other fusions join with one of them: all of these belong
            into one Sequential.
    """

    name: str
    stage: Stage
    part: Chain
    whole: Chain


class Residual(NamedTuple):
    """A sum in a chain with what was read before.

    Attributes:
        stop: the index of the sum.
        is_shared: whether others, outside of the chain, read that tensor too.
    """

    stop: int
    is_shared: bool


def merged(found: list[Found]) -> list[Found]:
    """Linear operations that read one tensor, as one; in the order of those that it replaces."""
    groups: dict[fx.Node, list[Found]] = {}
    for f in found:
        if f.kind == "linear" and name_of(f.output) == "linear":
            groups.setdefault(f.inputs[0], []).append(f)
    gates = {f.inputs[0] for f in found if f.kind in GATED}
    out: list[Found] = []
    for f in found:
        group = groups.get(f.inputs[0], []) if f.kind == "linear" else []
        if len(group) < 2 or f not in group:
            out.append(f)
        elif f is group[-1]:
            parts = sorted(group, key=lambda p: p.output not in gates)
            nodes = tuple(node for p in group for node in p.nodes)
            outputs = [p.output for p in parts]
            out.append(
                Found("merged_linear", nodes, f.output, f.inputs,
                      {"parts": parts, "outputs": outputs})
            )  # fmt: skip
    return out


def chains(found: list[Found], trace: Trace) -> list[Chain]:
    """The longest sequences of operations; every operation is in one at most."""
    order = {node: n for n, node in enumerate(trace.graph.nodes)}
    reads: dict[fx.Node, list[Found]] = {}
    for f in found:
        for node in f.inputs if f.kind in ("add", *GATED) else f.inputs[:1]:
            reads.setdefault(_source(node), []).append(f)
    linked: dict[int, Found] = {}
    heads = {id(f): f for f in found}
    for f in found:
        readers = sorted(reads.get(f.output, []), key=lambda r: order[r.output])
        first = next((r for r in readers if id(r) not in linked), None)
        if first is not None and _may_follow(f, first, readers):
            linked[id(first)] = f
    follow = {id(before): heads[behind] for behind, before in linked.items()}
    out: list[Chain] = []
    for f in found:
        if id(f) in linked:
            continue
        chain = [f]
        while id(chain[-1]) in follow:
            chain.append(follow[id(chain[-1])])
        out += _split(chain, trace)
    return [chain for chain in out if len(chain.found) > 1]


def _source(node: fx.Node) -> fx.Node:
    """Where a tensor comes from, through views that keep its last dimension."""
    while name_of(node) in VIEWS:
        before, now = facts_of(node.args[0]), facts_of(node)
        if before is None or now is None or before.shape[-1:] != now.shape[-1:]:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def _may_follow(f: Found, reader: Found, readers: list[Found]) -> bool:
    if f.kind == "merged_linear":
        outputs = f.values["outputs"]
        return reader.kind in GATED and {_source(n) for n in reader.inputs} == set(outputs)
    if reader.kind in GATED:
        return False
    return reader.kind != "add" or len(readers) == 1


def _split(chain: list[Found], trace: Trace) -> Iterator[Chain]:
    """The parts of a chain of which all operations have a like in opfuser."""
    found: list[Found | None] = []
    modules: list[nn.Module] = []
    for n, f in enumerate(chain):
        module = operation(f)
        if module is None:
            yield Chain(tuple(found), tuple(modules))
            found, modules = [], []
            continue
        shared = _others_read(chain[n - 1], f) if found else _is_shared(f)
        if shared:
            found.append(None)
            modules.append(MakeExtraOutput())
        found.append(f)
        modules.append(module)
    yield Chain(tuple(found), tuple(modules))


def _others_read(before: Found, behind: Found) -> bool:
    users = set()
    for output in before.outputs:
        users |= _real_users(output)
    return not users <= set(behind.nodes)


def _is_shared(first: Found) -> bool:
    """Whether the input of a chain is read by others too, and gets a gradient from each."""
    node = first.inputs[0]
    facts = facts_of(node)
    needs = facts is not None and facts.requires_grad
    return needs and first.kind != "add" and not _real_users(node) <= set(first.nodes)


def _real_users(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for user in node.users:
        found |= _real_users(user) if _source(user) is not user else {user}
    return found


def fused(found: list[Chain]) -> Iterator[Fused]:
    """The fusions that would match if chains were Sequentials.

    Those that join nothing but what one operation of the model computes are left out, and so are
    those that a later one takes in.
    """
    plans: dict[Any, Plan | None] = {}
    for chain in found:
        key = signature(chain)
        if key not in plans:
            plans[key] = _plan(chain)
        plan, owners = plans[key], _owners(chain)
        if plan is None:
            continue
        steps: dict[tuple[str, tuple[int, ...]], slice] = {}
        for step in (*plan.forward, *plan.backward):
            at = sorted({owners[index] for index in step.indices})
            if step.fusion is not None and len(at) > 1:
                steps[step.fusion, step.indices] = slice(at[0], at[-1] + 1)
        for (name, _), part in steps.items():
            whole = chain.cut(_joined(part, steps.values()))
            yield Fused(name, plan.record(name).stage, chain.cut(part), whole)


def _joined(part: slice, others: Iterable[slice]) -> slice:
    """The union of a part with those that overlap it, and with what overlaps these."""
    start, stop = part.start, part.stop
    in_order = sorted(others, key=lambda part: int(part.start))
    for other in (*in_order[::-1], *in_order):
        if other.start < stop and start < other.stop:
            start, stop = min(start, other.start), max(stop, other.stop)
    return slice(start, stop)


def residuals(chain: Chain) -> dict[int, Residual]:
    """The sums of a chain with what it read before, by the index where it is read."""
    out: dict[int, Residual] = {}
    open_: list[tuple[int, fx.Node]] = []
    inside = set(chain.nodes)
    for n, (f, after) in enumerate(zip(chain.found, (*chain.found[1:], None))):
        if f is None and after is not None:
            open_.append((n, _source(after.inputs[0])))
        elif f is not None and f.kind == "add":
            read = {_source(node) for node in f.inputs}
            # What is directly before a sum is its first operand.
            before = [k for k, (at, node) in enumerate(open_) if node in read and at < n - 1]
            if before:
                start, node = open_[before[-1]]
                out[start] = Residual(n, not _real_users(node) <= inside)
                del open_[before[-1] :]
    return out


def signature(chain: Chain) -> tuple[Any, ...]:
    """Equal for chains that have one plan."""
    return tuple(
        None if f is None else (
            f.kind, facts_of(f.inputs[0]), facts_of(f.output), f.values.get("bias") is None
        )
        for f in chain.found
    )  # fmt: skip


def _owners(chain: Chain) -> list[int]:
    """For each basic operation, which of the chain's it is of."""
    out: list[int] = []
    for n, module in enumerate(chain.modules):
        out += [n] * len(parts_of(module))
    return out


def parts_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """The basic operations of an operation."""
    return tuple(module.basic_ops) if isinstance(module, FusedOperation) else (module,)


def _plan(chain: Chain) -> Plan | None:
    with torch.set_grad_enabled(chain.differentiated):
        try:
            return Sequential(*chain.modules).plan(*inputs_of(chain))
        except OpfuserError:
            return None


def inputs_of(chain: Chain) -> tuple[Tensor, ...]:
    """Input and extra inputs of a Sequential of a chain's modules, without data."""
    first = next(f for f in chain.found if f is not None)
    facts = facts_of(first.inputs[0])
    assert facts is not None
    if first.kind in GATED:
        facts = facts._replace(shape=(*facts.shape[:-1], 2 * facts.shape[-1]))
    extras: list[Tensor] = []
    for f, module in zip(chain.found, chain.modules):
        if f is not None and isinstance(module, BasicOperation) and module.num_extra_inputs:
            loss = f.kind == "cross_entropy"
            other = facts_of(f.inputs[-1] if loss else f.output)
            assert other is not None
            # What a view has changed before it is as it was.
            last = () if loss else other.shape[-1:]
            extras.append(like(other._replace(shape=(*facts.shape[:-1], *last))))
    return like(facts), *extras
