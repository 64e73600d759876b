"""An audit of a model: everything that could be fused in it and is not."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ... import __version__
from ...core.fusion import Refusal
from ...errors import TargetError
from ...registry import fusions
from ...sequential import Sequential
from ..inputs import as_text
from ..target import Target, failed
from . import segments
from .chains import Chain, Fused, chains, fused, inputs_of, merged, signature
from .estimates import Cost, of_nodes, of_sequence, only, unfused
from .finding import Found, find
from .kernels import KNOWN, Existing, advice, look_up
from .operations import operation
from .remedies import Tried, places_of, tried, written
from .sequences import Blocked, blocked
from .todo import Estimate, Instance, MissedFusion, Todo
from .tracing import Place, Trace, facts_of, trace


class _Site(NamedTuple):
    """One finding before equal ones are put together."""

    where: tuple[Any, ...]
    entry: MissedFusion
    instance: Instance
    cost: Cost | None


def audit(model: nn.Module, inputs: Iterable[Tensor], name: str = "") -> Todo:
    """What a model could fuse and does not.

    The model is called once; on the meta device nothing is computed. In a Sequential of operations,
    registered fusions are sought that something keeps from matching. Everywhere else, formulas are
    sought that one kernel computes, and operations that would fuse in a Sequential.

    Args:
        model: of operations, of ``torch.nn``, of Hugging Face, or mixed.
        inputs: positional arguments of its call; those that require grad, and parameters that do,
            say whether backward counts.
        name: of the model; the name of its class if empty.

    Raises:
        TargetError: the model fails.
    """
    given = tuple(inputs)
    target = Target(name or type(model).__name__, model, given)
    try:
        traced = trace(model, given)
    except Exception as error:  # the user's code may raise anything
        raise TargetError(failed(target, error)) from error
    calls = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")
    sites: list[_Site] = []
    for call in traced.calls:
        found = [_of_blocked(missed) for missed in blocked(call)]
        sites += found * max(calls[call.path], 1)
    sites += _in_graph(target, traced)
    return Todo(target.name, _env(model, given), _joined(sites))


def _in_graph(target: Target, traced: Trace) -> Iterator[_Site]:
    found = merged(find(traced))
    formulas = [f for f in found if f.kind in KNOWN and len(f.launches) > 1]
    candidates = list(fused(chains(found, traced)))
    conversions = tried(target, {*(f.kind for f in formulas), *(c.name for c in candidates)})
    costs: dict[Any, Cost | None] = {}
    for f in formulas:
        yield _of_formula(f, conversions, costs)
    for one in candidates:
        yield _of_chain(one, conversions, costs)


def _of_formula(f: Found, conversions: list[Tried], costs: dict[Any, Cost | None]) -> _Site:
    facts = facts_of(f.output)
    gradient = facts is not None and facts.requires_grad
    source, recommendation = advice(f.kind, gradient)
    ops = tuple(segments.function(node) for node in f.launches)
    entry = MissedFusion(
        f.kind, source, "joint" if gradient else "forward", ops, look_up(f.kind),
        recommendation, None, _RISKS.get(f.kind, _ROUNDING),
    )  # fmt: skip
    key = f.kind, *((node.target, facts_of(node)) for node in f.nodes)
    if key not in costs:
        module = operation(f)
        like = None if module is None else Chain((f,), (module,))
        instead = None if like is None else (Sequential(*like.modules), inputs_of(like))
        costs[key] = of_nodes(f.nodes, f.outputs, instead)
    ours = any(kernel.source == "opfuser" for kernel in KNOWN[f.kind])
    calls = [found.call for found in conversions if ours and found.computes(f.kind, f.nodes)]
    notes = [f"computed by {len(ops)} functions of torch"]
    if ours:
        notes += _replacing(calls) or _kept(conversions, f.nodes)
    return _site(entry, f.nodes, notes, costs[key])


def _of_chain(one: Fused, conversions: list[Tried], costs: dict[Any, Cost | None]) -> _Site:
    source, existing = _registered(one.name)
    ops = tuple("sum of gradients" if f is None else f.kind for f in one.part.found)
    why = "called one by one; opfuser fuses operations of a Sequential"
    entry = MissedFusion(
        one.name, source, one.stage, ops, existing, "use_existing_kernel",
        Refusal("GROUP_SPLIT", why), _dropping(ops),
    )  # fmt: skip
    key = one.name, signature(one.part)
    if key not in costs:
        sequence = Sequential(*one.part.modules)
        # A joint fusion may take in what others have fused before it.
        within = nullcontext if one.stage == "joint" else partial(only, one.name)
        with torch.set_grad_enabled(one.part.differentiated):
            costs[key] = of_sequence(sequence, inputs_of(one.part), unfused, within)
    calls = [found.call for found in conversions if found.fuses(one.name, one.part)]
    instead = [f"write it as {written(one.whole)}", *_kept(conversions, one.part.nodes)]
    return _site(entry, one.part.nodes, _replacing(calls) or instead, costs[key])


def _kept(conversions: list[Tried], nodes: Sequence[fx.Node]) -> list[str]:
    """Why what computes a finding is not read as operations."""
    return [why for found in conversions[-1:] if (why := found.why_not(nodes))]


def _replacing(calls: list[str]) -> list[str]:
    return [f"{call} replaces this" for call in calls[:1]]


def _of_blocked(b: Blocked) -> _Site:
    source, existing = _registered(b.name)
    ops = tuple(type(op).__name__ for op in b.ops)
    risk = _dropping(ops)
    removable = b.keeps_results or b.why.code == "MISSING_PACKAGE"
    if b.remedies and not b.keeps_results:
        risk = "high: what stands there may compute something else"
    entry = MissedFusion(
        b.name, source, b.stage, ops, existing,
        "use_existing_kernel" if removable else "defer", b.why, risk,
    )  # fmt: skip
    at, cost = b.call.path, b.cost()
    paths = [f"{at}.{path}" if at else path for path in b.paths]
    where = f"{paths[0]} to {paths[-1]}" if paths[0] != paths[-1] else paths[0]
    notes = [str(b.why), *b.remedies, f"in the Sequential {at or '(root)'}", *_counted(cost)]
    segment = segments.modules(b.call.sequence, b.paths)
    instance = Instance(where, segment, "\n".join(b.steps), "; ".join(notes))
    return _Site((where,), entry, instance, cost)


def _counted(cost: Cost | None) -> list[str]:
    """What an estimate consists of."""
    if cost is None:
        return ["what it saves is not counted: it cannot be run without data"]
    launches = _change(cost.launches, "launch", "launches")
    moved = _change(cost.moved, "byte moved", "bytes moved")
    notes = [launches, f"{moved}, {_change(cost.kept, 'kept', 'kept')} for backward"]
    if cost.moved < 0 and cost.launches <= 0:
        notes.append("saves memory, not time")
    elif cost.loses:
        notes.append("pays only where launches take the time, as with small inputs")
    return notes


def _change(less: int, one: str, several: str) -> str:
    what = one if abs(less) == 1 else several
    return f"{abs(less)} {what} {'more' if less < 0 else 'less'}"


def _site(
    entry: MissedFusion, nodes: Sequence[fx.Node], notes: list[str], cost: Cost | None
) -> _Site:
    places = places_of(nodes)
    instance = Instance(
        segments.located(places[-1]) if places else "",
        segments.statements(places),
        segments.nodes(nodes),
        "; ".join([*notes, *_callers(places), *_counted(cost)]),
    )
    return _Site(tuple(dict.fromkeys(places)), entry, instance, cost)


def _callers(places: list[Place]) -> list[str]:
    """Where a function that holds the last statement is called."""
    stack = places[-1].stack if places else ()
    return [f"called from {segments.line(*stack[1][:2])}"] if len(stack) > 1 else []


def _joined(sites: list[_Site]) -> tuple[MissedFusion, ...]:
    """One entry for all sites of a kind; a site that is called again is one."""
    groups: dict[MissedFusion, list[_Site]] = {}
    for site in sites:
        # What is counted, and saves nothing, is no finding.
        if site.cost is None or site.cost.launches > 0 or site.cost.bytes:
            groups.setdefault(site.entry, []).append(site)
    out = []
    for entry, group in groups.items():
        calls = len(group)
        costs = [site.cost or Cost() for site in group]
        mean = Cost(*(sum(values) // calls for values in zip(*costs)))
        size = sum(cost.bytes for cost in costs) // calls
        estimate = Estimate(mean.launches, size, calls, -mean.moved, -mean.kept)
        unique = {site.where: site.instance for site in group}
        found = entry._replace(estimate=estimate, instances=tuple(unique.values()))
        out.append(found._replace(recommendation="defer") if mean.loses else found)
    return tuple(sorted(out, key=lambda m: (-m.weight[0], -m.weight[1], m.fused_op)))


_ROUNDING = "low: sums are accumulated in another order; results differ by rounding"
_RISKS = {
    "linear": "none: one GEMM adds the bias",
    "rotary_embedding": "none: the same products and sums",
    "embedding_norm": "none: the same values",
    "merged_linear": "none: each column is the same sum",
}


def _dropping(ops: tuple[str, ...]) -> str:
    drops = any(op.lower() == "dropout" for op in ops)
    return f"{_ROUNDING}; dropout draws other masks" if drops else _ROUNDING


def _registered(name: str) -> tuple[str, Existing]:
    """The origin of a fusion, and what a look-up says of it."""
    ours = next(info.origin for info in fusions() if info.name == name) == "opfuser"
    page = "docs/reference/fusions.md" if ours else "registered here"
    found = Existing("found", (f"fusion {name} ({page}; importable here)",))
    return "opfuser" if ours else "plugin", found


def _env(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    parameters = list(model.parameters())
    first = parameters[0] if parameters else (inputs[0] if inputs else torch.empty(0))
    dtypes = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in parameters)
    return {
        "opfuser": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": str(first.device),
        "parameters": ", ".join(dtypes) or "none",
        "training": model.training,
        "inputs": [*map(as_text, inputs)],
    }
