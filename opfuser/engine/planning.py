"""Planning: what to fuse, decided without computing a tensor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, groupby, pairwise
from typing import Any

from ..core.context import GradNeeds
from ..core.fusion import Env, Fusion, Match, NearMiss, QuantizedEdge, Refusal, Stage
from ..core.op_base import BasicOperation, FusedOperation, FusibleOperation
from ..core.op_base.kinds import is_built_in
from ..errors import PlanError
from ..registry import FusionHandle
from .limits import Limits
from .plan import FusionRecord, Needs, Plan, Step, expand, needs_of, quantizers_between, shown
from .plan_report import report
from .routing import Routing

_numbers = count(1)


def grad_needs(
    parameters: Sequence[tuple[bool, ...]],
    routing: Routing,
    input_requires_grad: bool,
    extras_require_grad: Sequence[bool],
) -> tuple[GradNeeds | None, ...]:
    """The gradients that each basic operation owes; None before the first operation that owes any.

    Args:
        parameters: for each operation, whether each of its parameters requires grad.
        extras_require_grad: for each extra input of the group.
    """
    out: list[GradNeeds | None] = []
    needed = input_requires_grad
    for own, sources in zip(parameters, routing.sources):
        extras = tuple(
            extras_require_grad[source] if isinstance(source, int) else out[source.op] is not None
            for source in sources
        )
        before = needed
        needed = needed or any(own) or any(extras)
        out.append(GradNeeds(before, own, extras) if needed else None)
    return tuple(out)


def make_plan(
    ops: Sequence[FusibleOperation],
    env: Env,
    needs: tuple[GradNeeds | None, ...],
    handles: Iterable[FusionHandle],
    limits: Limits | None = None,
) -> Plan:
    """The plan that registered fusions lead to: joint ones first, then each pass on their result.

    Args:
        ops: basic operations, and fused ones that the user placed for their own kernels.
        limits: what configurations say about them, if any is in force.

    Raises:
        PlanError: a fusion returned operations that do not tile the basic operations.
    """
    basic_ops = tuple(basic for op in ops for basic in expand(op))
    number = next(_numbers)
    maker = _Maker(basic_ops, env, needs, limits)
    forward, backward = _fused(maker, list(ops), list(handles))
    steps = maker.steps(forward), maker.steps(backward)
    quantized, high_precision = _precision(basic_ops, steps[0], env)
    plan = Plan(
        basic_ops,
        *steps,
        needs,
        tuple(maker.history),
        env,
        quantized,
        high_precision,
        _quantized_edges(*steps, env, needs),
        tuple(_notes(basic_ops, env)),
        tuple(c._replace(op=n) for n in quantized for c in basic_ops[n].gemm_choices(env)),
        numbers=(number,),
    )
    report(plan)
    if os.environ.get("OPFUSER_DUMP_DIR"):
        shown(plan, "dump")
    return plan


def _fused(
    maker: _Maker, ops: list[FusibleOperation], handles: Sequence[FusionHandle]
) -> tuple[list[FusibleOperation], list[FusibleOperation]]:
    """The operations of the forward pass, and of the backward pass: none where it does not run."""

    def stage(name: Stage, start: list[FusibleOperation]) -> list[FusibleOperation]:
        for handle in handles:
            if handle.stage == name:
                start = maker.attempt(handle, start)
        return start

    joint = stage("joint", ops)
    forward = stage("forward", _for_pass(joint, "fuser_forward"))
    backward = _for_pass(joint, "fuser_backward")
    if any(need is not None for need in maker.needs):
        backward = stage("backward", backward)
        return maker.show_outputs(forward, backward), backward
    of_backward = [handle for handle in handles if handle.stage == "backward"]
    maker.skip(of_backward, "no gradient is needed")
    return forward, []


def _precision(
    ops: Sequence[BasicOperation], forward: Sequence[Step], env: Env
) -> tuple[tuple[int, ...], tuple[tuple[int, Refusal], ...]]:
    """The operations that a plan computes quantised, and those that it could but does not."""
    if env.recipe is None:
        return (), ()
    quantized: list[int] = []
    others: list[tuple[int, Refusal]] = []
    for step in forward:
        assert isinstance(step.op, FusibleOperation)
        own = set(map(id, step.op.quantized_ops))
        for n in step.indices:
            if id(ops[n]) in own:
                quantized.append(n)
            elif ops[n].takes_part_in_recipes:
                why = f"{type(step.op).__name__} computes it without"
                others.append((n, ops[n].quantized_refusal(env) or Refusal("CONFLICT", why)))
    return tuple(quantized), tuple(others)


def _notes(ops: Sequence[BasicOperation], env: Env) -> Iterator[tuple[int, str]]:
    """What operations say about themselves, by index.

    Where the input holds integers, such as tokens, those behind the first parameters are told the
    dtype of these.
    """
    for n, op in enumerate(ops):
        note = op.plan_note(env)
        if note:
            yield n, note
        if not env.dtype.is_floating_point:
            dtypes = [p.dtype for p in op.parameters() if p.is_floating_point()]
            env = replace(env, dtype=dtypes[0]) if dtypes else env


def _quantized_edges(
    forward: Sequence[Step], backward: Sequence[Step], env: Env, needs: Needs
) -> tuple[QuantizedEdge, ...]:
    """The tensors that a plan hands on as codes: within steps, and from step to step."""
    if env.recipe is None:
        return ()
    edges: list[QuantizedEdge] = []
    for step in forward:
        assert isinstance(step.op, FusibleOperation)
        first = step.indices[0]
        within = step.op.quantized_edges(env, needs_of(step, needs))
        edges += [edge.behind(first) for edge in within]
    passes: tuple[tuple[Sequence[Step], Stage], ...] = (forward, "forward"), (backward, "backward")
    for steps, stage in passes:
        for before, behind, quantizer in quantizers_between(steps, stage, env, needs):
            ends = before.indices[-1], behind.indices[0]
            source, target = ends if stage == "forward" else ends[::-1]
            edges.append(QuantizedEdge(stage, source, target, *quantizer.kind))
    return tuple(edges)


def _for_pass(ops: Iterable[FusibleOperation], method: str) -> list[FusibleOperation]:
    """The operations of one pass; one without a kernel for it is replaced by its basic ones."""
    out: list[FusibleOperation] = []
    for op in ops:
        own = getattr(type(op), method) is not getattr(FusibleOperation, method)
        out.extend([op] if own else expand(op))
    return out


class _Maker:
    """Applies fusions one after another, checks each result and keeps a record of each."""

    def __init__(
        self,
        basic_ops: tuple[BasicOperation, ...],
        env: Env,
        needs: tuple[GradNeeds | None, ...],
        limits: Limits | None,
    ) -> None:
        self.basic_ops = basic_ops
        self.env = env
        self.needs = needs
        self.limits = limits
        self.history: list[FusionRecord] = []
        self.made_by: dict[int, str] = {}

    def skip(self, handles: Iterable[FusionHandle], why: str) -> None:
        for handle in handles:
            off = self._off(handle)
            status = "disabled" if off else "skipped"
            self.history.append(FusionRecord(handle.name, handle.stage, status, detail=off or why))

    def _off(self, handle: FusionHandle) -> str:
        return handle.disabled_by() if self.limits is None else self.limits.off(handle)

    def attempt(self, handle: FusionHandle, ops: list[FusibleOperation]) -> list[FusibleOperation]:
        missing = handle.requires.missing(self.env)
        if self._off(handle) or missing is not None:
            self.skip([handle], missing.detail if missing is not None else "")
            return ops
        began = time.perf_counter()
        starts = self.tile(ops, handle)
        refusals: tuple[tuple[int, Refusal], ...] = ()
        near: tuple[NearMiss, ...] = ()
        if isinstance(handle.function, Fusion):
            scan = handle.function.scan(ops, self.env, self._veto(handle, starts))
            new: list[FusibleOperation] = scan.ops
            refusals = tuple((starts[at], no) for at, no in scan.refusals)
            ends = [*starts, len(self.basic_ops)]
            near = tuple(_of_basic_ops(miss, ends) for miss in scan.near_misses)
        else:
            new, refusals = self._called(handle, ops, starts)
        new_starts = self.tile(new, handle)
        before = {id(op) for op in ops}
        made = [
            (at, op)
            for at, op in zip(new_starts, new)
            if isinstance(op, FusedOperation) and id(op) not in before
        ]
        matches = tuple(tuple(range(at, at + len(op.basic_ops))) for at, op in made)
        self.made_by.update({id(op): handle.name for _, op in made})
        status = "matched" if matches else "refused" if refusals else "unmatched"
        self.history.append(
            FusionRecord(
                handle.name, handle.stage, status, matches, refusals, near,
                elapsed=time.perf_counter() - began,
            )
        )  # fmt: skip
        return new

    def _called(
        self, handle: FusionHandle, ops: list[FusibleOperation], starts: list[int]
    ) -> tuple[list[FusibleOperation], tuple[tuple[int, Refusal], ...]]:
        """What a function returns for ``ops``, without those where a configuration has it off."""
        ends = [*starts, len(self.basic_ops)]
        limits = self.limits
        noes = [None if limits is None else limits.refusal(handle, a, b) for a, b in pairwise(ends)]
        new: list[FusibleOperation] = []
        refusals: list[tuple[int, Refusal]] = []
        for no, part in groupby(range(len(ops)), key=noes.__getitem__):
            at = list(part)
            inside = [ops[n] for n in at]
            if no is not None:
                refusals.append((starts[at[0]], no))
                new += inside
                continue
            answer = handle.call(inside, self.env)
            if not isinstance(answer, Iterable):
                self._broken([], handle, f"returned {type(answer).__name__}, which is no list")
            new += answer
        return new, tuple(refusals)

    def _veto(self, handle: FusionHandle, starts: list[int]) -> Callable[[Match], Refusal | None]:
        ends, stage = [*starts, len(self.basic_ops)], handle.stage

        def veto(found: Match) -> Refusal | None:
            span = self.needs[ends[found.start] : ends[found.stop]]
            owed = [need is not None for need in span]
            if stage == "backward" and not all(owed):
                return Refusal("NO_GRAD", "no gradient is needed at or before its first operation")
            if stage == "joint" and any(owed) and not all(owed):
                return Refusal(
                    "NO_GRAD", "the first operation that needs a gradient lies inside it"
                )
            if self.limits is not None:
                return self.limits.refusal(handle, ends[found.start], ends[found.stop])
            return None

        return veto

    def show_outputs(
        self, forward: list[FusibleOperation], backward: list[FusibleOperation]
    ) -> list[FusibleOperation]:
        """Undoes forward fusions that hide a result whose shape backward may need.

        An operation with extra outputs gets zeros as the gradient of its output where those behind
        it return none, as operations of users may. In the library's own, output and extra outputs
        have one shape.
        """
        begins = set(self.tile(backward))
        strangers = [n for n, op in enumerate(self.basic_ops) if not is_built_in(op)]
        out: list[FusibleOperation] = []
        for start, op in zip(self.tile(forward), forward):
            parts = expand(op)
            hidden = [
                n
                for n, publishes in enumerate(parts[:-1], start)
                if publishes.num_extra_outputs and not is_built_in(publishes)
                if n + 1 in begins and self.needs[n] is not None and strangers[-1] > n
            ]
            if not hidden or op in backward:
                out.append(op)
                continue
            names = [type(self.basic_ops[n]).__name__ for n in (hidden[0], strangers[-1])]
            self._take_back(
                start,
                op,
                f"{names[0]} has an extra output, and {names[1]} behind it may return no gradient: "
                "zeros have the shape of an output hidden here",
            )
            out += parts
        return out

    def _take_back(self, start: int, op: FusibleOperation, why: str) -> None:
        no = (start, Refusal("EXTRA_OUTPUT_USED", why))
        for n, record in enumerate(self.history):
            if record.name != self.made_by.get(id(op)) or record.stage != "forward":
                continue
            matches = tuple(match for match in record.matches if match[0] != start)
            self.history[n] = replace(
                record,
                status="matched" if matches else "refused",
                matches=matches,
                refusals=(*record.refusals, no),
            )

    def tile(
        self, ops: Sequence[FusibleOperation], handle: FusionHandle | None = None
    ) -> list[int]:
        """Index of the first basic operation of each of ``ops``; together these must tile all."""
        starts: list[int] = []
        at = 0
        for op in ops:
            if not isinstance(op, FusibleOperation):
                self._broken(ops, handle, f"returned {type(op).__name__}, which is no operation")
            starts.append(at)
            for basic in expand(op):
                if at >= len(self.basic_ops) or basic is not self.basic_ops[at]:
                    self._broken(ops, handle, f"{type(op).__name__} does not fit at operation {at}")
                at += 1
        if at != len(self.basic_ops):
            self._broken(ops, handle, f"nothing covers operation {at}")
        return starts

    def _broken(self, ops: Sequence[Any], handle: FusionHandle | None, what: str) -> None:
        raise PlanError.explained(
            "A fusion must return operations that tile the basic operations exactly, in order",
            where=f"fusion {handle.name!r}, stage {handle.stage}: {what}" if handle else what,
            received=f"{_names(ops)} for basic operations {_names(self.basic_ops)}",
            remedy="Replace each run by one FusedOperation whose basic_ops are that run, and "
            "return every other operation as it is",
        )

    def steps(self, ops: Sequence[FusibleOperation]) -> tuple[Step, ...]:
        starts = self.tile(ops) if ops else []
        return tuple(
            Step(op, tuple(range(at, at + len(expand(op)))), self.made_by.get(id(op)))
            for at, op in zip(starts, ops)
        )


def _of_basic_ops(near: NearMiss, starts: Sequence[int]) -> NearMiss:
    """A near miss in numbers of basic operations, given those where the scanned ones start."""
    start, stop = starts[near.start], starts[near.start + near.matched]
    return near._replace(start=start, matched=stop - start)


def _names(ops: Iterable[Any]) -> str:
    return "[" + ", ".join(type(op).__name__ for op in ops) + "]"
