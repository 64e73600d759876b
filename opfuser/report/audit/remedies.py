"""What fuses an audit's findings: calls that were tried, and Sequentials as code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import fx, nn

from ...applying import Report, report
from ...applying.forwards import is_applied
from ...applying.reports import is_below
from ...merged_linear import MergedLinear
from ...op import FusibleOperation
from ..conversion import CONVERSIONS
from ..kernel_counts import counting
from ..target import Target
from .chains import Chain, parts_of, residuals
from .finding import Found
from .segments import expression
from .sequences import blocked
from .tracing import Place, Trace, name_of, trace


class _Step(NamedTuple):
    """A step that a fusion built.

    Attributes:
        path: of the module that calls the Sequential, or of that itself.
        name: of the fusion.
        kinds: of the basic operations.
    """

    path: str
    name: str
    kinds: frozenset[type]


class Tried(NamedTuple):
    """A model after a call that converts it.

    Attributes:
        call: as users write it.
        running: functions and operations that it still calls outside of Sequentials, by the
            statements.
        missed: names of fused operations that Sequentials miss, with the paths of the modules.
        fused: the steps that fusions built.
        report: what its modules are read as, and why others are kept; None if none was read.
    """

    call: str
    running: dict[Any, list[fx.Node]]
    missed: tuple[tuple[str, tuple[str, ...]], ...]
    fused: tuple[_Step, ...]
    report: Report | None

    def computes(self, name: str, nodes: Sequence[fx.Node]) -> bool:
        """Whether a formula that calls of the model before computed is gone."""
        paths = paths_of(nodes)
        return not any(map(self._runs, nodes)) and not _holds(self.missed, name, paths)

    def fuses(self, name: str, part: Chain) -> bool:
        """Whether a fusion of a chain of the model before matches now, or a larger one."""
        operations = [f.nodes for f in part.found if f is not None]
        gone = [nodes for nodes in operations if not any(map(self._runs, nodes))]
        paths = paths_of(part.nodes)
        # One alone has nothing to fuse with.
        if len(gone) < len(operations) - 1 or _holds(self.missed, name, paths):
            return False
        computed = () if self.report is None else self.report.computed
        if any(is_below(p, done.path) and not done.covers(p) for done in computed for p in paths):
            return False
        kinds = {type(op) for module in part.modules for op in parts_of(module)}
        inside = paths_of(node for nodes in gone for node in nodes)
        return any(
            (step.name == name and _meet(paths, (step.path,)))
            or (step.kinds >= kinds and all(is_below(path, step.path) for path in inside))
            for step in self.fused
        )  # fmt: skip

    def why_not(self, nodes: Sequence[fx.Node]) -> str:
        """Why the innermost module that calls all these functions is kept; empty if it is not."""
        paths = paths_of(nodes)
        kept = () if self.report is None else self.report.kept
        around = [k for k in kept if all(is_below(path, k.path) for path in paths)]
        if not around:
            return ""
        inner = max(around, key=lambda k: len(k.path))
        return f"{self.call} keeps {expression(inner.path)}, which {inner.reason}"

    def _runs(self, node: fx.Node) -> bool:
        place = node.meta.get("place")
        others = () if place is None else self.running.get(place.stack, ())
        return any(_is_same(node, other) for other in others)


def tried(target: Target, names: set[str]) -> list[Tried]:
    """What is left of a model's findings after each of the calls that convert models.

    Args:
        names: of the fused operations that are missed; nothing is tried if there are none.
    """
    found = []
    for conversion in CONVERSIONS if names else ():
        if conversion.only_for and not conversion.only_for & names:
            continue
        done = conversion.tried(target, lambda other: (_traced(other), _report(other.model)))
        if done is not None:
            traced, read = done
            running: dict[Any, list[fx.Node]] = {}
            for node in filter(_runs_alone, traced.graph.nodes):
                running.setdefault(node.meta["place"].stack, []).append(node)
            missed, matched = tuple(_missed(traced)), tuple(_fused(traced))
            found.append(Tried(conversion.call, running, missed, matched, read))
    return found


def _report(model: nn.Module) -> Report | None:
    applied = any(is_applied(module.__dict__.get("forward")) for module in model.modules())
    return report(model) if applied else None


def _traced(target: Target) -> Trace:
    on_meta = any(t.is_meta for t in target.inputs)
    # Kernels are noted: what stands for them in plain torch takes longer.
    with counting() if on_meta else nullcontext():
        return trace(target.model, target.inputs)


def _missed(traced: Trace) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What Sequentials of a model miss."""
    for call in traced.calls:
        for b in blocked(call):
            yield b.name, tuple(f"{call.path}.{path}".strip(".") for path in b.paths)


def _fused(traced: Trace) -> Iterator[_Step]:
    for call in traced.calls:
        ops = call.plan.basic_ops
        for step in (*call.plan.forward, *call.plan.backward):
            if step.fusion is not None:
                kinds = frozenset(type(ops[i]) for i in step.indices)
                yield _Step(call.path.partition("#")[0], step.fusion, kinds)


def _runs_alone(node: fx.Node) -> bool:
    module = node.meta.get("module")
    called = node.op == "call_function" or isinstance(module, FusibleOperation)
    return called and "place" in node.meta


def _is_same(node: fx.Node, other: fx.Node) -> bool:
    """Whether ``other``, of the converted model, is the call that ``node`` was in one statement."""
    name = name_of(other)
    return _meet(paths_of([node]), paths_of([other])) and (not name or name == name_of(node))


def places_of(nodes: Iterable[fx.Node]) -> list[Place]:
    """Where a model calls functions, as far as it is known."""
    return [place for node in nodes if (place := node.meta.get("place")) is not None]


def paths_of(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The modules that call functions."""
    return tuple(dict.fromkeys(place.path for place in places_of(nodes)))


def _meet(some: Iterable[str], others: Iterable[str]) -> bool:
    return any(is_below(a, b) or is_below(b, a) for a in some for b in others)


def _holds(
    entries: Iterable[tuple[str, tuple[str, ...]]], name: str, paths: tuple[str, ...]
) -> bool:
    return any(name == other and _meet(paths, at) for other, at in entries)


def written(chain: Chain) -> str:
    """A Sequential of the operations of a chain, as Python code.

    What an ``AddExtraInput`` adds is an extra input of its call, what a ``MakeExtraOutput`` hands
    out an extra output. A sum with what was read before is an ``opfuser.Residual``.
    """
    starts = residuals(chain)
    ends = {residual.stop for residual in starts.values()}
    levels: list[list[str]] = [[]]
    for n, (f, module) in enumerate(zip(chain.found, chain.modules)):
        if n in starts:
            if starts[n].is_shared:
                levels[-1].append(_code(f, module))
            levels.append([])
        elif n in ends:
            inner = ", ".join(levels.pop())
            levels[-1].append(f"opfuser.Residual({inner})")
        else:
            levels[-1].append(_code(f, module))
    return f"opfuser.Sequential({', '.join(levels[0])})"


def _code(f: Found | None, module: nn.Module) -> str:
    """An operation as Python code."""
    # One that the model does not register has the name of its class.
    if f is not None and "module" in f.values and f.output.target != type(module).__name__:
        return expression(str(f.output.target))
    if isinstance(module, MergedLinear):
        parts: dict[str, Any] = dict(module.named_children())
        sizes = {name: part.out_features for name, part in parts.items()}
        biased = [name for name, part in parts.items() if part.bias is not None]
        return f"opfuser.MergedLinear({module.in_features}, {sizes}, bias={biased})"
    return f"opfuser.{module!r}"
