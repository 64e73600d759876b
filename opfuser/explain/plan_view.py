"""What there is to say about a plan: text, log, JSON, pages and pictures render this."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import nn

from ..core.op_base import FusedOperation, FusibleOperation
from ..core.op_base.kinds import is_built_in
from ..engine.plan import Plan, Step, together
from ..engine.routing import PrivateChannel
from ..quantization.quantizers import multiplies
from .folding import Fold, Row, layer_of, like, repeated

Stage = Literal["forward", "backward"]
_TRITON = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Channel(NamedTuple):
    """An extra output that an operation hands to a later one.

    Attributes:
        name: of the channel; empty if only one Sequential sees it.
        source, target: the basic operations, by index.
    """

    name: str
    source: int
    target: int


class PlanView:
    """A plan, and what follows from it; nothing is computed before it is asked for.

    Attributes:
        plan: any.
        names: of its basic operations; empty ones outside of a Sequential.
        kinds: the names of their classes.
        call: what the plan is for.
        notes: what operations say about themselves, by index.
    """

    def __init__(self, plan: Plan) -> None:
        env = plan.env
        grad = "on" if env.grad_enabled else "off"
        self.plan = plan
        self.names = plan.names or ("",) * len(plan.basic_ops)
        self.kinds = [type(op).__name__ for op in plan.basic_ops]
        self.call = (
            f"{env.dtype}, {env.device}, autocast {env.autocast_dtype or 'off'}, grad {grad}"
        )
        self.notes = dict(plan.notes)
        self._on_gpu = env.device.type in ("cuda", "meta")

    def named(self, at: int) -> str:
        """An operation by name and kind: ``layers.3.norm RMSNorm``."""
        return f"{self.names[at]} {self.kinds[at]}".strip()

    # Steps.

    def steps(self, stage: str) -> tuple[Step, ...]:
        """The steps of the pass of a stage; of a joint one those of forward."""
        return self.plan.backward if stage == "backward" else self.plan.forward

    def runs_backward(self, step: Step) -> bool:
        """Whether a step of backward computes anything."""
        return not step.indices or any(self.plan.needs[i] is not None for i in step.indices)

    @property
    def idle(self) -> list[int]:
        """The operations of steps of backward that compute nothing."""
        return [i for s in self.plan.backward if not self.runs_backward(s) for i in s.indices]

    @cached_property
    def numbers(self) -> list[int]:
        """A number for each operation, the same for those that equal layers have in one place."""
        plan, numbers = self.plan, dict[tuple[object, ...], int]()

        def number(*what: object) -> int:
            return numbers.setdefault(what, len(numbers))

        gemms = together((choice.op, choice._replace(op=0)) for choice in plan.gemms)
        quantized = set(plan.quantized)
        return [
            number(
                type(op), like(name), self.notes.get(i), *gemms.get(i, ()), i in quantized,
                plan.needs[i] is None,
                # Kernels are not there for all.
                *(p.dtype for p in op._parameters.values() if p is not None),
            )
            for i, (op, name) in enumerate(zip(plan.basic_ops, self.names))
        ]  # fmt: skip

    def row(self, kind: Hashable, ops: Sequence[int], last: str) -> Row:
        """What a stretch of operations is compared by; ``last`` is the name it ends with."""
        return Row(kind, tuple(self.numbers[i] for i in ops), layer_of(last))

    def folds(self, stage: Stage) -> tuple[Fold, ...]:
        """The steps of a pass, in forward order, with equal layers as one entry.

        Every step belongs to exactly one entry. Of the repetitions that begin at a step the longest
        stretch is taken, and of equally long ones that of the shortest period. Repetitions begin
        where a layer does: what names have in common down to their first number.
        """
        return repeated(
            [
                self.row(
                    (type(step.op), step.fusion, like(step.path)),
                    step.indices,
                    self.names[step.indices[-1]] if step.indices else step.path,
                )
                for step in self.steps(stage)
            ]
        )

    # What computes a step.

    def kernels(self, step: Step) -> tuple[str, ...]:
        """What computes a step, as its operations declare it: ``("Triton norm", "cuBLAS")``.

        Empty where that is torch, or where an operation of the user does not declare it.
        """
        declared = _declared(step.op)
        if not declared or not is_built_in(step.op):
            return declared
        out: list[str] = []
        for name in declared:
            if name.endswith("GEMM"):
                out += self._gemms(step, "cuBLAS" if name == "GEMM" else name)
            elif not name.startswith("Triton ") or self._has_kernels(step):
                out.append(name)
        return tuple(dict.fromkeys(out))

    def about_kernels(self) -> str:
        """One sentence: whose kernels run, and where they are not those that steps declare."""
        device = self.plan.env.device.type
        steps = [*self.plan.forward, *self.plan.backward]
        lost = {
            name.removeprefix("Triton ")
            for step in steps
            if is_built_in(step.op) and not self._has_kernels(step)
            for name in _declared(step.op)
            if name.startswith("Triton ")
        }
        some = any(map(self.kernels, steps))
        if not some and not lost:
            return ""
        text = "kernels: torch's where none is named" if some else "kernels: torch's"
        if device == "meta":
            text += "; meta is planned as a GPU"
        if lost:
            what = "this dtype" if self._on_gpu else device
            missing = f"has none for {what}" if _TRITON else "is not installed"
            text += f"; Triton {missing}: {', '.join(sorted(lost))}"
        return text

    def _has_kernels(self, step: Step) -> bool:
        dtype = self.plan.env.autocast_dtype or next(
            (
                p.dtype
                for i in step.indices
                for p in self.plan.basic_ops[i]._parameters.values()
                if p is not None and p.is_floating_point() and p.dtype.itemsize > 1
            ),
            self.plan.env.dtype,
        )
        takes = dtype in _DTYPES or not dtype.is_floating_point
        return self._on_gpu and _TRITON and takes

    def _gemms(self, step: Step, unquantized: str) -> list[str]:
        env, indices = self.plan.env, set(step.indices)
        if env.recipe is None or indices.isdisjoint(self.plan.quantized):
            return [unquantized] if self._on_gpu else []
        own = [choice for choice in self.plan.gemms if choice.op in indices]
        chosen = [choice.provider for choice in own if not choice.refusal]
        if chosen and len(chosen) == len(own):
            return chosen
        real = env.device.type == "meta" or multiplies(env.device, env.recipe)
        name = "scaled_mm" if unquantized == "cuBLAS" else f"scaled {unquantized}"
        return [*chosen, name if real else f"emulated {name}"]

    # Between operations.

    @property
    def saving(self) -> list[int]:
        """The operations that declare that they save something for backward.

        Of a fusion with a backward of its own it is the last one: what it saves is its business.
        """
        plan, both = self.plan, {(id(step.op), step.indices) for step in self.plan.backward}
        out = []
        for step in plan.forward:
            own = [i for i in step.indices if plan.needs[i] is not None]
            if len(step.indices) > 1 and (id(step.op), step.indices) in both:
                out += own[-1:]
            else:
                ops = ((i, plan.basic_ops[i]) for i in own)
                out += [i for i, op in ops if op.Saved is not None or not is_built_in(op)]
        return out

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels between the operations, in the order in which they are read."""
        sources: dict[tuple[str, str | None], int] = {}
        found = []

        def key(channel: str, i: int) -> tuple[str, str | None]:
            # A private channel is that of the Sequential which holds the operation.
            private = isinstance(channel, PrivateChannel)
            return channel, self.names[i].rpartition(".")[0] if private else None

        for i, op in enumerate(self.plan.basic_ops):
            for channel in op._extra_input_channels:
                if channel is not None and key(channel, i) in sources:
                    name = "" if isinstance(channel, PrivateChannel) else channel
                    found.append(Channel(name, sources[key(channel, i)], i))
            for channel in op._extra_output_channels:
                if channel is not None:
                    sources[key(channel, i)] = i
        return tuple(found)


def _declared(op: nn.Module) -> tuple[str, ...]:
    """What operations of a step declare; a class of the user must do so itself."""
    if not isinstance(op, FusibleOperation):
        return ()
    own = op.kernels if is_built_in(op) or "kernels" in vars(type(op)) else ()
    if own or not isinstance(op, FusedOperation) or not is_built_in(op):
        return own
    return tuple(dict.fromkeys(name for basic in op.basic_ops for name in _declared(basic)))
