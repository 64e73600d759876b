"""Events of plans and calls, for functions that subscribe to them.

    with opfuser.record_events(only=(PlanInvalidated, FallbackTaken)) as log:
        train_one_step()
    for event in log:
        print(event)

Off by default: as long as nobody subscribes to a kind of event, a place where one could be told
reads one flag. Events are data about a moment. They hold no tensors and no operations, so that
keeping them keeps nothing else alive, and making one waits for no device. What torch.compile runs
tells of its planning alone.
"""

from __future__ import annotations

from .kinds import (
    AttentionKernelTaken,
    BytesSaved,
    Change,
    Event,
    FallbackTaken,
    FusionMatched,
    FusionRefused,
    KernelCompiled,
    PlanCreated,
    PlanInvalidated,
    ScalesUpdated,
)
from .telling import EventLog, Subscription, record_events, subscribe

__all__ = [
    "AttentionKernelTaken",
    "BytesSaved",
    "Change",
    "Event",
    "EventLog",
    "FallbackTaken",
    "FusionMatched",
    "FusionRefused",
    "KernelCompiled",
    "PlanCreated",
    "PlanInvalidated",
    "ScalesUpdated",
    "Subscription",
    "record_events",
    "subscribe",
]
