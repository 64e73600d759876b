"""What forwards that are computed again have computed with: their region, and their scales."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from ..core.recomputation import Part, computed_again, parts_under_way
from ..errors import RecomputationError


class Checkpointed:
    """What was quantised in a part of a model that is computed again.

    Attributes:
        region: in which it was entered.
        scales: what tensors were multiplied by, in the order of the calls, by the number of a state
            and that of a role.
    """

    def __init__(self, region: Any) -> None:
        self.region = region
        self.scales: dict[tuple[int, int], list[Tensor]] = {}
        self._time: object = None
        self._taken: dict[tuple[int, int], int] = {}

    def next_scale(self, key: tuple[int, int], time: object) -> Tensor | None:
        """The scale of the same call of the forward; None: no call has had such a tensor.

        Args:
            key: as of :attr:`scales`.
            time: which time it is computed again.

        Raises:
            RecomputationError: there were fewer calls.
        """
        known = self.scales.get(key)
        if known is None:
            return None
        if time != self._time:
            self._time, self._taken = time, {}
        taken = self._taken[key] = self._taken.get(key, 0) + 1
        if taken <= len(known):
            return known[taken - 1]
        raise RecomputationError.explained(
            "What a checkpoint computes again makes the calls of its forward",
            received=f"a quantised tensor after the {len(known)} of the forward",
            remedy="Call the same operations in the same order whenever the function of the"
            " checkpoint runs",
        )


_known: weakref.WeakKeyDictionary[object, Checkpointed] = weakref.WeakKeyDictionary()


def is_any_known() -> bool:
    """Whether any part that may be computed again was quantised, or is within a region."""
    return bool(_known)


def is_within_any() -> bool:
    """Whether the caller computes a part again, or one that may be computed again."""
    return computed_again() is not None or bool(parts_under_way())


def note_region(region: Any) -> None:
    """The caller computes in a region: those around that are computed again will do so, too."""
    for key in parts_under_way():
        if key not in _known:
            _known[key] = Checkpointed(region)


def note_scale(state: int, role: int, scale: Tensor) -> None:
    """A tensor is multiplied by a scale, (1,), which later changes in place."""
    if not _known:  # note_region has been called when the call began
        return
    around = [_known[key] for key in parts_under_way() if key in _known]
    kept = scale.clone() if around else scale
    for forward in around:
        forward.scales.setdefault((state, role), []).append(kept)


def forward_of(part: Part) -> Checkpointed | None:
    """The record of a part that is computed again; None if nothing of it was quantised."""
    return _known.get(part.key)


def scale_of_forward(state: int, role: int) -> Tensor | None:
    """What the tensor was multiplied by that the caller computes again, (1,); None otherwise.

    Raises:
        RecomputationError: the forward had fewer such tensors.
    """
    part = computed_again() if _known else None
    forward = None if part is None else forward_of(part)
    if part is None or forward is None:
        return None
    return forward.next_scale((state, role), part.time)
