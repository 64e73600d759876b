"""When scales are updated, and how ranks agree on the largest values that they come from."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..core.recomputation import computed_again, in_backward, is_outside
from ..events.kinds import ScalesUpdated
from ..events.telling import emit
from ..kernels.scales import KeptScales
from ..kernels.scales import update_scales as update_together
from ..recipe import DelayedScaling, Recipe
from .state import ROLES, QuantizationState, living_states


def is_past() -> bool:
    """Whether the caller belongs to a call that came earlier."""
    if is_outside():
        return False
    return in_backward() or computed_again() is not None


class _Members(NamedTuple):
    """Members of a group: the states that have ever agreed in it, and where they do."""

    states: int
    device: torch.device


# States die when the garbage is collected, in each rank at another time. What ranks do together
# follows from the calls alone: from the regions that were opened, and the states' first calls.
_members: weakref.WeakKeyDictionary[dist.ProcessGroup, _Members] = weakref.WeakKeyDictionary()
_groups: dict[dist.ProcessGroup, None] = {}  # of regions since the last update, in their order


def join(group: dist.ProcessGroup, device: torch.device) -> int:
    """The row of a state that is new to a group."""
    count, chosen = _members.get(group, (0, device))
    # NCCL takes no tensors of a CPU.
    _members[group] = _Members(count + 1, chosen if chosen.type == "cuda" else device)
    return count


def enter_region(recipe: Recipe, group: dist.ProcessGroup | None, *, outermost: bool) -> None:
    """Updates the scales of all operations, if the region that opens is in no other one."""
    if not (isinstance(recipe, DelayedScaling) and recipe.reduce_amax):
        group = None
    if group is not None:
        _groups[group] = None
    if outermost:
        update_scales()
    if group is not None:
        _groups[group] = None


def update_scales() -> None:
    """Updates the scales of all operations from what they have seen since the last time.

    Not where a forward is computed again, nor elsewhere in a backward pass. States that agree with
    other ranks wait for a region with their group.
    """
    # In the order of their numbers. Going through values() takes seven calls.
    states: list[QuantizationState] = []
    for found in living_states.valuerefs():
        state = found()
        if state is not None:
            states.append(state)
    if not (states or _groups) or is_past():
        return
    groups = list(_groups)
    _groups.clear()
    for group in groups:
        _agree(group, [state for state in states if state.group is group])
    update: list[KeptScales] = []
    for state in states:
        if state.recipe is not None and (state.group is None or state.group in groups):
            update.append(state._current_parts().kept)
    update_together(update)
    if update and ScalesUpdated.wanted:
        emit(ScalesUpdated(len(update), ROLES, "region"))


def _agree(group: dist.ProcessGroup, states: list[QuantizationState]) -> None:
    """Has the ranks of a group take the largest of their values, in one reduction."""
    members = _members.get(group)
    if members is None or not dist.is_initialized():  # any more
        return
    rows = [torch.zeros(len(ROLES), device=members.device)] * members.states
    for state in states:
        rows[state.row] = state.amax.to(members.device, non_blocking=True)
    # What a backend makes of NaN is its own. What overflowed in one rank says nothing of others.
    together = torch.stack(rows).nan_to_num_(0.0, 0.0)
    dist.all_reduce(together, dist.ReduceOp.MAX, group)
    for state in states:
        state.amax.copy_(together[state.row], non_blocking=True)
