"""Whether and when calls are replayed: the one switch, for the process or for one Sequential."""

from __future__ import annotations

import functools
import os
import weakref
from dataclasses import dataclass, replace
from typing import ClassVar

from ...errors import ArgumentError

MODES = ("off", "on", "auto")


@dataclass(frozen=True)
class ReplayOptions:
    """When calls are recorded, and how much memory that may take.

    Attributes:
        mode: "off"; "on", recording the second of equal calls; "auto", recording where measured
            times say that it pays.
        after: equal calls that run as usual before any is measured, in mode "auto".
        instances: recordings per kind of call, each for one forward pass whose backward pass is
            still to come.
        memory: of all recordings on a device, as a fraction of the device's; None is half of it
            in mode "on", a twentieth in mode "auto".
    """

    mode: str = "auto"
    after: int = 3
    instances: int = 2
    memory: float | None = None

    @property
    def calls_before(self) -> int:
        """Equal calls that run as usual."""
        return 1 if self.mode == "on" else self.after

    @property
    def share(self) -> float:
        """The share of a device's memory that recordings may take."""
        if self.memory is not None:
            return self.memory
        return 0.5 if self.mode == "on" else 0.05

    @functools.cache  # noqa: B019 - there are few, and they are small
    def of_sequence(self, mode: str) -> ReplayOptions:
        """The same with the mode that a sequence asks for."""
        return replace(self, mode=mode)


def check_mode(mode: str, where: str) -> str:
    """``mode``, if it is one.

    Raises:
        ArgumentError: it is none.
    """
    if mode not in MODES:
        raise ArgumentError.explained(
            "replay is 'off', 'on' or 'auto'", where=where, received=repr(mode)
        )
    return mode


class replay:  # noqa: N801 - reads as the statement that it is
    """Switches replayed plans on or off; inside ``with``, until the block ends.

    Equal calls of a sequence launch the same kernels on the same memory. They are recorded as CUDA
    graphs, one for each pass, and replayed: the host's work no longer depends on the number of
    operations. Calls that cannot be replayed run as usual; ``seq.last_plan.replays`` says why.

    In mode "auto" some equal calls are measured, without waiting for the device. If it waits for
    the host, one is recorded, replayed on trial and measured again; where calls are no faster than
    as usual, the recording is given up.

    Args:
        mode: "off", "on", or "auto".
        after: equal calls that run as usual before any is measured, in mode "auto".
        instances: recordings per kind of call: how many forward passes may wait for their backward
            pass at a time. Further ones run as usual.
        memory: of all recordings on a device, as a fraction of the device's. By default half of it
            in mode "on", a twentieth in mode "auto".

    Raises:
        ArgumentError: a value is outside its domain.
    """

    def __init__(
        self,
        mode: str = "on",
        *,
        after: int | None = None,
        instances: int | None = None,
        memory: float | None = None,
    ) -> None:
        given = {"after": after, "instances": instances, "memory": memory}
        options = replace(
            _Switched.options,
            mode=check_mode(mode, "opfuser.replay"),
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
        if options.after < 1 or options.instances < 1 or not 0 < options.share <= 1:
            raise ArgumentError.explained(
                "after and instances must be positive, memory between 0 and 1",
                where="opfuser.replay",
                received=f"after={options.after}, instances={options.instances}, "
                f"memory={options.memory}",
            )
        _Switched.stack.append((weakref.ref(self), options))
        _Switched.settle()

    def __enter__(self) -> replay:
        return self

    def __exit__(self, *_: object) -> None:
        _Switched.stack = [entry for entry in _Switched.stack if entry[0]() is not self]
        _Switched.settle()


class _Switched:
    """What was switched, in order; the last counts."""

    initial = ReplayOptions(check_mode(os.environ.get("OPFUSER_REPLAY", "auto"), "OPFUSER_REPLAY"))
    stack: ClassVar[list[tuple[weakref.ref[replay], ReplayOptions]]] = []
    options = initial

    @classmethod
    def settle(cls) -> None:
        """Forgets what cannot be reverted any more and has been switched again since."""
        gone = [n for n, (owner, _) in enumerate(cls.stack) if owner() is None]
        if gone:
            cls.stack = [
                entry for n, entry in enumerate(cls.stack) if n >= gone[-1] or n not in gone
            ]
        cls.options = cls.stack[-1][1] if cls.stack else cls.initial


def current() -> ReplayOptions:
    """The options of the process."""
    return _Switched.options
