"""A plan as data: its steps, and a record of every fusion that was tried."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from ..fusion import Env, NearMiss, QuantizedEdge, Refusal, Stage
from ..gemm_providers import GemmChoice
from ..op import BasicOperation, FusedOperation, FusibleOperation, GradNeeds
from ..quantization.quantizers import Quantizer

__all__ = [
    "FusionRecord",
    "Needs",
    "Plan",
    "ReplayRecord",
    "Step",
    "expand",
    "needs_of",
    "quantizer_between",
]

Needs = tuple[GradNeeds | None, ...]


class _Compared:
    """Compared by what :meth:`_says` returns, not by the identity of operations."""

    def _says(self) -> Hashable:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._says() == other._says()

    def __hash__(self) -> int:
        return hash(self._says())


@dataclass(frozen=True, eq=False)
class Step(_Compared):
    """One operation of a pass and the basic operations that it covers, by index.

    A plain module inside a Sequential is a step that covers none. Steps compare the type of ``op``.

    Attributes:
        op: a basic operation, a fused one or a plain module.
        indices: of the basic operations.
        fusion: name of the fusion that built ``op``, if one did.
    """

    op: nn.Module
    indices: tuple[int, ...]
    fusion: str | None = None

    def _says(self) -> Hashable:
        return type(self.op), self.indices, self.fusion


@dataclass(frozen=True)
class FusionRecord:
    """The outcome of one fusion in one plan.

    Attributes:
        name: of the fusion.
        stage: of the fusion.
        status: ``"matched"``, ``"refused"``, ``"unmatched"``, ``"skipped"`` or ``"disabled"``.
        matches: the basic operations of each match, by index.
        refusals: the index where the pattern (or most of it) was found, and why it was not fused.
        near_miss: the longest beginning of the pattern that was found, if the whole never was.
        detail: why the fusion was skipped, or what disabled it.
        elapsed: duration of the attempt in seconds; not compared.
    """

    name: str
    stage: Stage
    status: str
    matches: tuple[tuple[int, ...], ...] = ()
    refusals: tuple[tuple[int, Refusal], ...] = ()
    near_miss: NearMiss | None = None
    detail: str = ""
    elapsed: float = field(default=0.0, compare=False)

    def summary(self) -> str:
        """One line: what the log and the printed plan show."""
        head = f"[stage={self.stage}, fusion={self.name}]"
        if self.status in ("skipped", "disabled"):
            return f"{head} {self.status} ({self.detail})"
        return f"{head} [SUMMARY] matches={len(self.matches)} refused={len(self.refusals)}"


class ReplayRecord(NamedTuple):
    """What became of the calls of some operations while replay was on.

    Attributes:
        indices: the operations.
        instances: recordings that there are.
        bytes: memory that they keep from others.
        replayed: calls that replayed one.
        refusal: why the last call replayed none; None if it did, or if equal calls are counted.
    """

    indices: tuple[int, ...]
    instances: int
    bytes: int
    replayed: int
    refusal: Refusal | None

    def __str__(self) -> str:
        what = f"{self.replayed} calls replayed"
        if self.instances:
            recordings = "recording" if self.instances == 1 else "recordings"
            what += f", {self.instances} {recordings} of {self.bytes / 2**20:.1f} MiB"
        return what if self.refusal is None else f"{what}; the last one not: {self.refusal}"


@dataclass(frozen=True, eq=False)
class Plan(_Compared):
    """The steps of both passes, and how they were decided.

    Plans are equal, and hash alike, if all fields but ``assumed``, ``replays`` and ``numbers`` are:
    operations compare by type and name, not by object or parameters, and records compare everything
    but durations.

    Attributes:
        basic_ops: the basic operations, in forward order.
        forward, backward: the steps of each pass, both in FORWARD order; backward is empty where
            no gradient is needed.
        needs: for each basic operation the gradients that will be read, or None if its backward
            does not run.
        history: one record per registered fusion, in the order in which they were tried.
        env: what the fusions could read of the call.
        quantized: operations that compute as the recipe says, by index.
        high_precision: operations that could, and why they do not.
        edges: tensors that go from operation to operation as codes.
        notes: what operations say about themselves, by index.
        gemms: who computes the quantised products, where the recipe names other than torch.
        names: of the basic operations in the Sequential whose plan this is.
        assumed: assumptions about modules that declare nothing; not compared.
        replays: of ``last_plan``, for each group of operations; not compared.
        numbers: of the plans of groups that it joins, as events, log and dumps show them: counted
            in this process; not compared.
    """

    basic_ops: tuple[BasicOperation, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    needs: Needs
    history: tuple[FusionRecord, ...]
    env: Env
    quantized: tuple[int, ...] = field(default=())
    high_precision: tuple[tuple[int, Refusal], ...] = field(default=())
    edges: tuple[QuantizedEdge, ...] = field(default=())
    notes: tuple[tuple[int, str], ...] = field(default=())
    gemms: tuple[GemmChoice, ...] = field(default=())
    names: tuple[str, ...] = field(default=())
    assumed: tuple[str, ...] = field(default=())
    replays: tuple[ReplayRecord, ...] = field(default=())
    numbers: tuple[int, ...] = field(default=())

    def _says(self) -> Hashable:
        kinds = tuple(type(op) for op in self.basic_ops)
        steps = self.forward, self.backward
        precision = self.quantized, self.high_precision, self.edges, self.gemms
        said = self.names, self.notes
        return kinds, said, steps, self.needs, self.history, self.env, precision

    def record(self, name: str) -> FusionRecord:
        """The record of the fusion called ``name``.

        Raises:
            KeyError: the plan has none.
        """
        for record in self.history:
            if record.name == name:
                return record
        raise KeyError(name)

    def fused(self, stage: str) -> dict[str, int]:
        """Number of steps per fusion in ``"forward"`` or ``"backward"`` (joint ones in both)."""
        counts: dict[str, int] = {}
        for step in self.forward if stage == "forward" else self.backward:
            if step.fusion is not None:
                counts[step.fusion] = counts.get(step.fusion, 0) + 1
        return counts

    def _label(self, step: Step) -> str:
        if not step.indices:
            return f"{type(step.op).__name__} (plain module)"
        names = self.names or ("",) * len(self.basic_ops)
        kinds = [type(op).__name__ for op in self.basic_ops]
        return " + ".join(f"{names[i]} {kinds[i]}".strip() for i in step.indices)

    def _runs_backward(self, step: Step) -> bool:
        return not step.indices or any(self.needs[i] is not None for i in step.indices)

    def __str__(self) -> str:
        env = self.env
        grad = "on" if env.grad_enabled else "off"
        about = f"{env.dtype}, {env.device}, autocast {env.autocast_dtype or 'off'}, grad {grad}"
        lines = [f"Plan for {len(self.basic_ops)} basic operations ({about})"]
        for title, steps in (("forward", self.forward), ("backward", self.backward[::-1])):
            lines.append(f"{title}:" if steps else f"{title}: none")
            labels = [(_span(s.indices), self._label(s), _becomes(s)) for s in steps]
            if title == "backward":
                labels = [
                    (*label[:2], label[2] if self._runs_backward(step) else "(no gradient)")
                    for label, step in zip(labels, steps)
                ]
            widths = [max((len(label[c]) for label in labels), default=0) for c in (0, 1)]
            lines += [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in labels]
        if env.recipe is not None:
            lines.append(f"quantised, {type(env.recipe).__name__}: {_listed(self.quantized)}")
            lines += [f"  not op {at}: {why}" for at, why in self.high_precision]
            lines += [f"  {edge}" for edge in self.edges]
            lines += [f"  {choice}" for choice in self.gemms]
        lines += [f"op {at}: {what}" for at, what in self.notes]
        lines += [f"assumed: {what}" for what in self.assumed]
        lines += [f"replay of {_span(replay.indices)}: {replay}" for replay in self.replays]
        lines.append("fusions:")
        for record in self.history:
            lines.append(f"  {record.summary()}")
            lines += [f"    op {at}: {why}" for at, why in record.refusals]
            if record.status == "unmatched" and record.near_miss is not None:
                lines.append(f"    {record.near_miss}")
        return "\n".join(lines)


def _span(indices: tuple[int, ...]) -> str:
    if not indices:
        return "-"
    return str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"


def _listed(indices: tuple[int, ...]) -> str:
    return ", ".join(map(str, indices)) or "none"


def _becomes(step: Step) -> str:
    if len(step.indices) < 2 and step.fusion is None:
        return ""
    return f"-> {type(step.op).__name__}" + (f" [{step.fusion}]" if step.fusion else "")


def needs_of(step: Step, needs: Needs) -> Needs:
    """Those of the operations of a step."""
    return tuple(needs[i] for i in step.indices)


def quantizer_between(
    before: Step, behind: Step, stage: Stage, env: Env, needs: Needs
) -> Quantizer | None:
    """How a pass hands a tensor from one step to its neighbour as codes; None: as it is."""
    first, second = before.op, behind.op
    assert isinstance(first, FusibleOperation)
    assert isinstance(second, FusibleOperation)
    if env.recipe is None:
        return None
    if stage == "forward":
        wanted = first.emits_quantized
        return second.takes_quantized(env, needs_of(behind, needs)) if wanted else None
    if not second.emits_quantized_grad or not any(
        need is not None for need in needs_of(before, needs)
    ):
        return None
    return first.takes_quantized_grad(env, needs_of(before, needs))


def expand(op: FusibleOperation) -> list[BasicOperation]:
    """The basic operations that ``op`` covers."""
    if isinstance(op, FusedOperation):
        return list(op.basic_ops)
    assert isinstance(op, BasicOperation)
    return [op]
