"""Whether it pays to replay a kind of call: decisions by measured numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from ...core.fusion import Refusal

# Seconds of the host for a forward pass, and for a forward and a backward pass, below which
# nothing is tried: a replay launches copies of inputs and outputs besides the graph.
_SHORTEST = (1e-4, 2e-4)

# Where the device waits for the host, the last kernels of a pass still run when all is launched:
# a pass takes the device little longer than the host. Beyond this factor it has work enough.
_MOST_DEVICE_PER_HOST = 1.25

# Bytes per second of a copy that reads and writes, estimated low; and the largest share of a call
# that copies may take.
_COPY_RATE = 5e11
_MOST_COPIES = 0.25

# Times of replayed calls, in those of calls as usual, from which on nothing is won: of the call
# itself, and of all that happens from one such call to the next, of which it may be a small part.
_MOST_REPLAYED = 0.95
_MOST_PERIOD = 0.99

# What a recording takes besides the tensors that are known: intermediate results, rounding.
_MARGIN = 1.25


class Sample(NamedTuple):
    """Times of a call and of its backward pass, if it has one, in seconds.

    Attributes:
        host: in which the host launched both.
        device: from the first to the last launch of each, on the device; gaps count.
        behind: whether the device had not begun any of them when the host had launched all of it.
        period: from the beginning of the call to that of the next one, on the device.
    """

    host: float
    device: float
    behind: bool
    period: float


class Costs(NamedTuple):
    """What replays of a kind of call would take, in bytes.

    Attributes:
        copied: of inputs, outputs and gradients, each once.
        memory: of a recording, without intermediate results.
        taken: by recordings already.
        limit: of all recordings.
        free: memory of the device that nobody has reserved.
    """

    copied: int
    memory: int
    taken: int
    limit: float
    free: int


def _of_call(samples: Sequence[Sample]) -> float:
    """Seconds that a call takes the slower of host and device."""
    return median(max(s.host, s.device) for s in samples)


def refusal_before_trial(
    samples: Sequence[Sample], costs: Costs, *, has_backward: bool
) -> Refusal | None:
    """Why calls that run as usual are better left alone; None: a recording is worth a trial."""
    host, device = median(s.host for s in samples), median(s.device for s in samples)
    figures = f"host {host * 1e3:.2f} ms, device {device * 1e3:.2f} ms a call"
    if host < _SHORTEST[has_backward]:
        return Refusal("SHORT", f"a replay takes the host as long: {figures}")
    if 2 * sum(s.behind for s in samples) > len(samples):
        return Refusal("BUSY", f"the device never waits, it lags behind the host: {figures}")
    if device > _MOST_DEVICE_PER_HOST * host:
        return Refusal("BUSY", f"the device has work enough: {figures}")
    if costs.copied / _COPY_RATE > _MOST_COPIES * device:
        size = f"{costs.copied / 2**20:.1f} MiB"
        return Refusal("COPIES", f"{size} of inputs, outputs and gradients are copied: {figures}")
    memory = _MARGIN * costs.memory
    if costs.taken + memory > costs.limit:
        size = f"{memory / 2**20:.0f} MiB"
        return Refusal("MEMORY", f"recordings would take {size} more, which is over the limit")
    if 2 * memory > costs.free:
        size = f"{costs.free / 2**20:.0f} MiB"
        return Refusal("MEMORY", f"the device has {size} left, and a recording takes over half")
    return None


def refusal_after_trial(usual: Sequence[Sample], replayed: Sequence[Sample]) -> Refusal | None:
    """Why recordings are given up that were replayed on trial; None: they are kept."""
    before, after = _of_call(usual), _of_call(replayed)
    if after > _MOST_REPLAYED * before:
        figures = f"{after * 1e3:.2f} ms a call instead of {before * 1e3:.2f}"
        return Refusal("SLOWER", f"replayed calls were not faster: {figures}")
    before, after = (median(s.period for s in own) for own in (usual, replayed))
    if after > _MOST_PERIOD * before:
        figures = f"{after * 1e3:.2f} ms from call to call instead of {before * 1e3:.2f}"
        return Refusal("SLOWER", f"with replayed calls nothing was faster: {figures}")
    return None
