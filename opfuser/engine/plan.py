"""A plan as data: its steps, and a record of every fusion that was tried."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from torch import nn

from ..core.context import GradNeeds, TensorFacts
from ..core.fusion import Env, NearMiss, QuantizedEdge, Refusal, Stage, longest
from ..core.op_base import BasicOperation, FusedOperation, FusibleOperation
from ..gemm_providers import GemmChoice
from ..quantization.quantizers import Quantizer
from .routing import Routing

__all__ = [
    "FusionRecord",
    "Needs",
    "Plan",
    "ReplayRecord",
    "Step",
    "Wiring",
    "expand",
    "needs_of",
    "quantizers_between",
    "span",
    "together",
]

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
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
        path: of a plain module in the Sequential whose plan this is; empty for operations.
    """

    op: nn.Module
    indices: tuple[int, ...]
    fusion: str | None = None
    path: str = ""

    @property
    def name(self) -> str:
        """The fusion, or the class of what no fusion built."""
        return self.fusion or type(self.op).__name__

    @property
    def title(self) -> str:
        """The name, if a fusion built it or it covers several operations; else empty."""
        return self.name if self.fusion or len(self.indices) > 1 else ""

    def _says(self) -> Hashable:
        return type(self.op), self.indices, self.fusion, self.path


@dataclass(frozen=True)
class FusionRecord:
    """The outcome of one fusion in one plan.

    Attributes:
        name: of the fusion.
        stage: of the fusion.
        status: ``"matched"``, ``"refused"``, ``"unmatched"``, ``"skipped"`` or ``"disabled"``.
        matches: the basic operations of each match, by index.
        refusals: the index where the pattern (or most of it) was found, and why it was not fused.
        near_misses: where a beginning of the pattern was found but not the whole, in order; of
            those that end at one operation the longest.
        detail: why the fusion was skipped, or what disabled it.
        elapsed: duration of the attempt in seconds; not compared.
    """

    name: str
    stage: Stage
    status: str
    matches: tuple[tuple[int, ...], ...] = ()
    refusals: tuple[tuple[int, Refusal], ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    detail: str = ""
    elapsed: float = field(default=0.0, compare=False)

    @property
    def near_miss(self) -> NearMiss | None:
        """The longest near miss, the first of equals; None if there is none."""
        return longest(self.near_misses)

    @property
    def reasons(self) -> dict[Refusal, list[int]]:
        """The places of each reason for which the fusion was refused."""
        return together((why, at) for at, why in self.refusals)

    def summary(self) -> str:
        """One line: what the log shows."""
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


class RecordedCalls(NamedTuple):
    """What was recorded of the calls of some operations, as functions without decisions.

    Attributes:
        indices: the operations.
        texts: of the functions of both passes, in the order in which they were recorded.
        refusal: why the calls of one kind or of all are not repeated so; None if nothing was
            refused.
    """

    indices: tuple[int, ...]
    texts: tuple[str, ...]
    refusal: str | None


class Wiring(NamedTuple):
    """What a program has of its operations besides the plan.

    Attributes:
        routing: of extra tensors.
        num_parameters: of each basic operation.
        paths: of the basic operations in their Sequential, kept up to date by its fuser; empty
            where they stand in none.
    """

    routing: Routing
    num_parameters: Sequence[int]
    paths: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Plan(_Compared):
    """The steps of both passes, and how they were decided.

    Plans are equal, and hash alike, if all fields but ``assumed``, ``replays``, ``recordings``,
    ``numbers``, ``wiring`` and ``groups`` are: operations compare by type and name, not by object
    or parameters, and records compare everything but durations.

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
        recordings: likewise; not compared.
        numbers: of the plans of groups that it joins, as events, log and dumps show them: counted
            in this process; not compared.
        wiring: of the program; None where several plans are joined. Not compared.
        groups: the plans that it joins, in order; not compared.
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
    recordings: tuple[RecordedCalls, ...] = field(default=(), repr=False)
    numbers: tuple[int, ...] = field(default=())
    wiring: Wiring | None = field(default=None, repr=False)
    groups: tuple[Plan, ...] = field(default=(), repr=False)

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

    def why(self, name: str, at: int | None = None) -> str:
        """What became of a fusion, as text: matched, refused with the reason, or how far it got.

        The code and the sentence of every refusal; of each near miss how many operations fitted,
        and what stopped it; what skipped or disabled the fusion; its pattern, if it is still
        registered.

        Args:
            name: of the fusion.
            at: a basic operation, by index, to tell of that place alone; None: of all places, equal
                ones together.

        Raises:
            UnknownFusionError: the plan has no record of it; a ``KeyError`` too.
            IndexError: there is no such operation.
        """
        return str(shown(self, "why", name, at))

    @property
    def program(self) -> str:
        """The Python code that a call executes: a function for each pass.

        Of several groups of operations, their programs one after another. A call in a profile or
        under torch.compile executes the same with a few lines more.
        """
        return str(shown(self, "program"))

    @property
    def recorded(self) -> str:
        """The Python code that was recorded of calls: what runs where calls are equal.

        Of ``last_plan``, after a few equal calls; else empty. Where calls were not recorded, a
        comment says why.
        """
        parts = [text for recording in self.recordings for text in recording.texts]
        parts += [
            f"# operations {indices[0]} to {indices[-1]}: {refusal}\n"
            for indices, _, refusal in self.recordings
            if refusal is not None
        ]
        return "\n".join(parts).rstrip("\n")

    def __str__(self) -> str:
        return str(shown(self, "text"))

    # Names that notebooks look for.

    def _repr_html_(self) -> str:
        return str(shown(self, "html"))

    def _repr_svg_(self) -> str:
        return str(shown(self, "svg"))


class Planned(NamedTuple):
    """The plans of a call with tensors of some kind, and what it returns.

    Attributes:
        plans: in order; none for a plain module.
        output, extra_outputs: what it returns.
        assumed: assumptions about modules that declare nothing.
    """

    plans: list[Plan]
    output: TensorFacts
    extra_outputs: list[TensorFacts]
    assumed: tuple[str, ...] = ()


def shown(plan: Plan, way: str, *args: Any) -> Any:
    """A plan as text, data or files, by what stands above plans and is loaded once it is asked."""
    module, name = _WAYS[way]
    return getattr(import_module(f"opfuser.{module}"), name)(plan, *args)


_WAYS = {
    "data": ("report.plan_json", "plan_data"),
    "dump": ("explain.dumps", "dump"),
    "log": ("explain.plan_text", "log_lines"),
    "html": ("report.picture", "card"),
    "program": ("engine.program", "program_text"),
    "svg": ("report.picture", "picture"),
    "text": ("explain.plan_text", "text"),
    "why": ("explain.reasons", "why"),
}


def span(indices: Sequence[int]) -> str:
    """Consecutive operations: ``3-5``."""
    return "-".join(map(str, dict.fromkeys((*indices[:1], *indices[-1:])))) or "-"


def together(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Each key with all its values."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def needs_of(step: Step, needs: Needs) -> Needs:
    """The needs of the operations of a step."""
    return tuple(needs[i] for i in step.indices)


def quantizers_between(
    steps: Sequence[Step], stage: Stage, env: Env, needs: Needs
) -> Iterator[tuple[Step, Step, Quantizer]]:
    """The neighbours in a pass of which one hands a tensor to the other as codes, and how."""
    for before, behind in pairwise(steps):
        quantizer = _quantizer_between(before, behind, stage, env, needs)
        if quantizer is not None:
            yield before, behind, quantizer


def _quantizer_between(
    before: Step, behind: Step, stage: Stage, env: Env, needs: Needs
) -> Quantizer | None:
    first, second = before.op, behind.op
    assert isinstance(first, FusibleOperation)
    assert isinstance(second, FusibleOperation)
    if env.recipe is None:
        return None
    if stage == "forward":
        if first.emits_groups:
            return second.takes_groups(env, needs_of(behind, needs), first)
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
