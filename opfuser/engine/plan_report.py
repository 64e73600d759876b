"""What is told of a plan that was made: events, and lines of the log.

The log has the lines of every distinct plan once, at INFO, before the call goes on::

    [plan 1] 2 operations, BasicLinear to Bias (torch.float32, cpu, autocast off, grad on)
    [stage=forward, fusion=forward_linear_bias_activation] [SUMMARY] matches=1 refused=0

How many sequences share a plan is known later. It is logged when the next distinct plan is made, or
the program ends, of plans that more than one had by then: ``[plan 1] 4 instances``. Which kernel
attention takes, which only a call decides, is logged once per distinct text.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Iterator

from torch import nn

from ..core.fusion import Refusal
from ..errors import counted
from ..events.kinds import (
    AttentionKernelTaken,
    Event,
    FallbackTaken,
    FusionMatched,
    FusionRefused,
    PlanCreated,
)
from ..events.telling import Subscription, emit, subscribe
from ..quantization.quantizers import multiplies
from .plan import Plan, shown
from .routing import describe

logger = logging.getLogger("opfuser")


def report(plan: Plan) -> None:
    """Tells subscribers and the log of a plan that was made."""
    if PlanCreated.wanted:
        emit(_created(plan))
    if FusionMatched.wanted or FusionRefused.wanted:
        for event in _outcomes(plan):
            if event.wanted:
                emit(event)
    if FallbackTaken.wanted:
        for fallback in _fallbacks(plan):
            emit(fallback)
    log.add(plan)


def _created(plan: Plan) -> PlanCreated:
    env = plan.env
    return PlanCreated(
        plan.numbers[0],
        tuple(type(op).__name__ for op in plan.basic_ops),
        env.dtype,
        env.device,
        env.autocast_dtype,
        env.grad_enabled,
        "" if env.recipe is None else type(env.recipe).__name__,
        len(plan.forward),
        len(plan.backward),
    )


def _outcomes(plan: Plan) -> Iterator[FusionMatched | FusionRefused]:
    (number,) = plan.numbers
    for record in plan.history:
        for match in record.matches:
            yield FusionMatched(number, record.name, record.stage, match)
        for at, why in record.refusals:
            yield FusionRefused(number, record.name, record.stage, at, *why)


def _fallbacks(plan: Plan) -> Iterator[FallbackTaken]:
    """What a plan computes otherwise than its recipe asks for."""
    recipe, (number,) = plan.env.recipe, plan.numbers
    if recipe is None:
        return
    asked = type(recipe).__name__
    for at, why in plan.high_precision:
        what = describe(at, plan.basic_ops[at])
        yield FallbackTaken(what, asked, "high precision", *why, plan=number)
    for choice in plan.gemms:
        if choice.refusal is not None:
            what = f"{choice.product} of {describe(choice.op, plan.basic_ops[choice.op])}"
            no = Refusal("DEVICE", choice.refusal)
            yield FallbackTaken(what, choice.provider, "torch", *no, plan=number)
    others = plan.gemms and all(choice.refusal is None for choice in plan.gemms)
    device = plan.env.device
    # A plan for tensors without values is that of a GPU.
    if plan.quantized and not others and device.type != "meta" and not multiplies(device, recipe):
        count, codes = counted(len(plan.quantized), "operation"), recipe.operands
        no = Refusal("DEVICE", f"there are no such GEMMs on {device}")
        yield FallbackTaken(f"products of {count}", f"GEMMs of {codes}", "fp32", *no, plan=number)


class _Distinct:
    """One distinct plan, and the sequences that share it.

    Attributes:
        number: of the first such plan.
        owners: an operation of each sequence, as long as it is there.
        instances: how many there were.
        told: how many of them the log knows of.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.owners: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.instances = 0
        self.told = 1


class PlanLog:
    """The lines that were logged, so that equal ones are not again."""

    def __init__(self) -> None:
        self._plans: dict[int, _Distinct] = {}
        self._taken: set[str] = set()
        self._lock = threading.Lock()
        self._subscription: Subscription | None = None

    def add(self, plan: Plan) -> None:
        """Logs a plan, if it is distinct, and counts it in any case."""
        if not logger.isEnabledFor(logging.INFO):
            self.close()
            return
        with self._lock:
            if self._subscription is None:
                self._subscription = subscribe(self._add_taken, only=AttentionKernelTaken)
        first, *lines = shown(plan, "log", list(_fallbacks(plan)))
        # Of the text itself nobody knows for how long it would have to be kept.
        key = hash((*[type(op).__name__ for op in plan.basic_ops], first, *lines))
        with self._lock:
            found = self._plans.get(key)
            known = found is not None
            if found is None:
                found = self._plans[key] = _Distinct(plan.numbers[0])
            for owner in plan.basic_ops[:1]:
                if owner not in found.owners:
                    found.owners.add(owner)
                    found.instances += 1
        if known:
            return
        self.flush()
        logger.info("[plan %d] %s", plan.numbers[0], first)
        for line in lines:
            logger.info("%s", line)

    def close(self) -> None:
        """Asks for no more events, until there is something to log again."""
        with self._lock:
            if self._subscription is not None:
                self._subscription.remove()
                self._subscription = None

    def flush(self) -> None:
        """Logs how many sequences share the plans of which that has changed."""
        with self._lock:
            changed = [p for p in self._plans.values() if p.instances > p.told]
            for plan in changed:
                plan.told = plan.instances
        for plan in changed:
            logger.info("[plan %d] %d instances", plan.number, plan.instances)

    def _add_taken(self, event: Event) -> None:
        text = str(event)
        with self._lock:
            known = text in self._taken
            self._taken.add(text)
        if not known:
            logger.info("%s", text)


log = PlanLog()
atexit.register(log.flush)
