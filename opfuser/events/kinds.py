"""The kinds of events: frozen data, each with a line for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..errors import counted


class Event:
    """Base of all events; subscribing to it subscribes to every kind.

    Attributes:
        wanted: whether this kind has subscribers.
    """

    wanted: ClassVar[bool] = False


@dataclass(frozen=True)
class PlanCreated(Event):
    """A plan was made for a group of operations; events of its matches and refusals follow.

    Attributes:
        plan: its number, counted in this process; the log and dumps show the same.
        operations: types of the basic operations, in forward order.
        dtype, device: of the input.
        autocast_dtype: dtype of the active autocast region, or None.
        grad_enabled: whether grad mode is on.
        recipe: type of the recipe of quantized compute; empty without one.
        forward_steps, backward_steps: how many steps each pass has.
    """

    plan: int
    operations: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    autocast_dtype: torch.dtype | None
    grad_enabled: bool
    recipe: str
    forward_steps: int
    backward_steps: int

    def __str__(self) -> str:
        steps = f"{self.forward_steps} forward and {self.backward_steps} backward steps"
        count = counted(len(self.operations), "operation")
        return f"[plan {self.plan}] created: {count} in {steps}"


class Change(NamedTuple):
    """One part of the key of a plan that differs between two calls.

    Attributes:
        what: such as ``"dtype of the input"`` or ``"training of op 3 (Dropout)"``.
        before, after: its values, as text.
    """

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class PlanInvalidated(Event):
    """The plan of the last call does not fit this one, and a new plan is made.

    ``Sequential.plan`` counts as a call. Returning to a plan that is still cached is not an event.

    Attributes:
        plan: number of the plan that no longer applies.
        operations: types of its basic operations.
        changes: what differs, in the order input, operations, fusions.
    """

    plan: int
    operations: tuple[str, ...]
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return f"[plan {self.plan}] invalidated: {'; '.join(map(str, self.changes))}"


@dataclass(frozen=True)
class FusionMatched(Event):
    """A fusion replaced operations in a plan.

    Attributes:
        plan: number of the plan.
        fusion, stage: of the fusion.
        indices: the basic operations.
    """

    plan: int
    fusion: str
    stage: str
    indices: tuple[int, ...]

    def __str__(self) -> str:
        where = ", ".join(map(str, self.indices))
        return f"[plan {self.plan}] {self.fusion} ({self.stage}) matched at {where}"


@dataclass(frozen=True)
class FusionRefused(Event):
    """A fusion found its pattern and was not applied.

    Attributes:
        plan: number of the plan.
        fusion, stage: of the fusion.
        index: the first basic operation of the place.
        code, detail: the reason, as in :class:`opfuser.Refusal`.
    """

    plan: int
    fusion: str
    stage: str
    index: int
    code: str
    detail: str

    def __str__(self) -> str:
        what = f"{self.fusion} ({self.stage}) refused at {self.index}"
        return f"[plan {self.plan}] {what}: {self.code}: {self.detail}"


@dataclass(frozen=True)
class FallbackTaken(Event):
    """Something other than the requested or the fastest implementation ran or will run.

    Sent for a plan when it is made; for replay and attention when a call differs from the one
    before, and once more to later subscribers.

    Attributes:
        what: the computation, such as ``"fprop of op 3"`` or ``"replay"``.
        instead_of: what was requested, or would be faster.
        taken: what runs.
        code, detail: the reason, as in :class:`opfuser.Refusal`.
        plan: number of the plan; 0 if unknown.
    """

    what: str
    instead_of: str
    taken: str
    code: str
    detail: str
    plan: int = 0

    def __str__(self) -> str:
        place = f"[plan {self.plan}] " if self.plan else ""
        reason = f"{self.code}: {self.detail}"
        return f"{place}{self.what}: {self.taken} instead of {self.instead_of}; {reason}"


@dataclass(frozen=True)
class AttentionKernelTaken(Event):
    """The kernel of a call of :class:`opfuser.DotProductAttention` in eager mode.

    Sent when a call differs from the operation's last one in something that the choice depends on,
    and once more to later subscribers.

    Attributes:
        operation: the operation with its arguments.
        kernel: its name.
        passed_over: every kernel before it in order of preference, and why it was not chosen.
        note: a problem of this process, if one keeps a faster kernel from running.
    """

    operation: str
    kernel: str
    passed_over: tuple[tuple[str, str], ...]
    note: str = ""

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.passed_over)
        text = f"[attention] {self.operation}: {self.kernel}"
        text += f" (not {reasons})" if reasons else ""
        return f"{text}. {self.note}" if self.note else text


@dataclass(frozen=True)
class KernelCompiled(Event):
    """A Triton kernel was launched for the first time with arguments of this kind.

    Attributes:
        kernel: ``"family:function"``, below ``opfuser.kernels.device``.
        launch: the same with its constants, warps and stages.
        arguments: the kind of each: ``"bfloat16*"`` is a pointer, ``"None"`` is None, ``"1"`` and
            ``"16n"`` are integers that Triton specializes on.
        device: of the tensors.
        seconds: host time for compiling, or for loading from Triton's cache on disk.
    """

    kernel: str
    launch: str
    arguments: tuple[str, ...]
    device: torch.device
    seconds: float

    def __str__(self) -> str:
        return f"[kernel] {self.kernel}({', '.join(self.arguments)}) took {self.seconds:.2f} s"


@dataclass(frozen=True)
class BytesSaved(Event):
    """What one eager call of a group of operations keeps for its backward pass.

    A call that is replayed keeps it in its recording: see ``plan.replays``.

    Attributes:
        plan: number of the plan that the call follows.
        bytes: of all storages, each counted once, without those of parameters and sparse tensors. A
            storage of which only a part is saved counts as a whole, because it stays allocated.
        tensors: number of saved tensors.
        checkpointed: whether activation checkpointing drops them, and recomputes them in backward.
    """

    plan: int
    bytes: int
    tensors: int
    checkpointed: bool

    def __str__(self) -> str:
        dropped = ", dropped by a checkpoint" if self.checkpointed else ""
        what = f"{self.bytes} bytes in {counted(self.tensors, 'tensor')}"
        return f"[plan {self.plan}] saved {what}{dropped}"


@dataclass(frozen=True)
class ScalesUpdated(Event):
    """Scales that operations keep between calls have new values.

    The event does not contain the values: reading them would wait for the device.

    Attributes:
        operations: number of operations with new scales.
        roles: whose scales: of ``"input"``, ``"weight"``, ``"grad_output"``.
        reason: ``"region"``, from the largest values of earlier calls, as a region opens;
            ``"first value"``, from the values themselves; or ``"state dict"``, from its history.
    """

    operations: int
    roles: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        count = counted(self.operations, "operation")
        return f"[scales] {count}: {', '.join(self.roles)} ({self.reason})"


KINDS: tuple[type[Event], ...] = (
    PlanCreated,
    PlanInvalidated,
    FusionMatched,
    FusionRefused,
    FallbackTaken,
    AttentionKernelTaken,
    KernelCompiled,
    BytesSaved,
    ScalesUpdated,
)
