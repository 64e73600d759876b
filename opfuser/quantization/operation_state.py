"""Which state an operation has, where it is kept, and whether a call finds it as it was."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.op_base.fusible import FusibleOperation
from ..errors import ArgumentError, explain
from ..events.kinds import ScalesUpdated
from ..events.telling import emit
from ..kernels.scales import update_scales as update_together
from ..recipe import DelayedScaling, Recipe
from ..runtime.recording import refuse_watching
from .scale_updates import is_past, join
from .state import CHILD, ROLES, QuantizationState, StateParts, misfits


def has_no_scales(state: nn.Module | None) -> bool:
    """Whether a child is a state that knows no scale yet."""
    return isinstance(state, QuantizationState) and not any(map(state.knows, ROLES))


def keep_state_in(op: nn.Module, module: nn.Module, parameter: str) -> None:
    """Has an operation that reads a parameter of a module leave its state to that module."""
    op.__dict__["_state_place"] = module, child_of(parameter)


def child_of(parameter: str) -> str:
    """The name of the child with the state of an operation, in the module of its parameter."""
    return CHILD if parameter == "weight" else f"{parameter}_{CHILD}"


def state_place(op: nn.Module) -> tuple[nn.Module, str]:
    """The module that has the state of an operation, and the name of its child there."""
    # A compound such as Linear has the parameters and the state of its operations.
    owner = getattr(op, "_owner", None) or op
    return owner.__dict__.get("_state_place") or (owner, CHILD)


def make_state(op: nn.Module, recipe: DelayedScaling) -> QuantizationState:
    """The state that an operation has, or a new one, which it has from now on.

    Raises:
        ArgumentError: the module whose parameter it reads has something else in its place.
    """
    owner, name = state_place(op)
    state = owner._modules.get(name)
    if state is None:
        refuse_watching("scales are made")
        _refuse_occupied(owner, name)
        state = QuantizationState(recipe.amax_history_len, next(op.parameters()).device)
        owner.add_module(name, state)
    elif not isinstance(state, QuantizationState):
        _refuse_occupied(owner, name)
    assert isinstance(state, QuantizationState)
    if op._modules.get(CHILD) is not state:
        op.add_module(CHILD, state)
    return state


def _refuse_occupied(module: nn.Module, name: str) -> None:
    if hasattr(module, name):
        raise ArgumentError.explained(
            f"Scales are kept in the child {name!r} of the module that has the weight",
            where=type(module).__name__,
            received=f"an attribute {name!r}, a {type(getattr(module, name)).__name__}",
            remedy="Rename it, or use a recipe that keeps no scales",
        )


def state_of(op: nn.Module, recipe: Recipe, group: dist.ProcessGroup | None) -> QuantizationState:
    """The state of an operation that computes with a recipe that keeps scales."""
    assert isinstance(recipe, DelayedScaling)
    owner, name = state_place(op)
    state = owner._modules.get(name)
    if state is None or op._modules.get(CHILD) is not state:
        state = make_state(op, recipe)
    assert isinstance(state, QuantizationState)
    length = recipe.amax_history_len
    if not recipe.reduce_amax:
        group = None
    if state.recipe is recipe and state.group is group and state.length == length:
        return state
    # A backward leaves the state to the calls that came after its forward.
    if state.recipe is None or not is_past():
        _adapt(op, state, recipe, group, length)
    return state


def _adapt(
    op: nn.Module,
    state: QuantizationState,
    recipe: DelayedScaling,
    group: dist.ProcessGroup | None,
    length: int,
) -> None:
    """Has a state follow the recipe and the group of a call.

    Args:
        length: of the history.
    """
    if state.length != length or state.recipe != recipe or state.group is not group:
        refuse_watching("scales are adapted to another recipe")
    if state.length != length:
        old = state.amax_history
        with torch.inference_mode(False):
            state.amax_history = old.new_zeros(length, len(ROLES))
        kept = min(length, len(old))
        state.amax_history[:kept] = old[:kept]
    if state.recipe is not recipe and state.recipe != recipe:  # a region may have its own object
        if state.recipe is None:  # the weight alone may have been assigned
            state.to_empty(device=next(op.parameters()).device)
        restored = state.recipe is None and any(map(state.knows, ROLES))
        state.follow(recipe)
        if restored:  # what a state dict brought waits since the region opened
            update_together([state._current_parts().kept])
            if ScalesUpdated.wanted:
                emit(ScalesUpdated(1, ROLES, "state dict"))
    if state.group is not group:
        state.group = group
        if group is not None:
            state.row = join(group, state.scale.device)


class _Settled(NamedTuple):
    """The state of an operation.

    Attributes:
        state: its state.
        parts: made of its buffers.
        known: which scales it knew.
        own, of_owner: the children of the operation, and those among which it is kept.
        name: of the child there.
    """

    state: QuantizationState
    parts: StateParts
    known: list[bool]
    own: dict[str, nn.Module | None]
    of_owner: dict[str, nn.Module | None]
    name: str


class SettledScales(NamedTuple):
    """The scales of operations that all have them for a recipe, as a call has found them.

    Attributes:
        states: of the operations.
        tensors: that a pass reads, or raises: of each state all scales, then those of each role and
            the largest values of each, (1,).
        facts: what else decides what a pass does with them.
        group: of ranks that agree on the largest values.
    """

    states: Sequence[_Settled]
    tensors: tuple[Tensor, ...]
    facts: Hashable
    group: dist.ProcessGroup | None

    def are_current(self) -> bool:
        """Whether they would be found again as they are."""
        for state, parts, known, own, of_owner, name in self.states:
            if (
                own.get(CHILD) is not state
                or of_owner.get(name) is not state
                or state._current_parts() is not parts
                or state.known != known
                or state._other
                or state.group is not self.group
            ):
                return False
        return True


def settled_scales(ops: Sequence[nn.Module], recipe: DelayedScaling) -> SettledScales | None:
    """The scales that operations have for a recipe; None if the next call makes or adapts some."""
    length = recipe.amax_history_len
    states: list[_Settled] = []
    tensors: list[Tensor] = []
    facts: list[Hashable] = []
    groups: set[dist.ProcessGroup | None] = set()
    for op in ops:
        owner, name = state_place(op)
        state = op._modules.get(CHILD)
        if not isinstance(state, QuantizationState):
            return None
        if owner._modules.get(name) is not state or state._other:
            return None
        if state.recipe != recipe or state.length != length or not any(state.known):
            return None
        groups.add(state.group)
        parts, known = state._current_parts(), [*state.known]
        scale, _, amax = parts.addresses
        states.append(_Settled(state, parts, known, op._modules, owner._modules, name))
        tensors += parts.kept.scale, *parts.scale, *parts.amax
        facts.append((parts.kept.scale.device, *known, scale & 15, amax & 15))
    if len(groups) > 1:
        return None
    return SettledScales(states, tuple(tensors), tuple(facts), next(iter(groups), None))


def restore_state_of_parameters(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Makes what a module keeps for operations that read its parameters, if a state dict has it."""
    for parameter in module._parameters:
        name = child_of(parameter)
        if not hasattr(module, name):
            restore_state(module, state_dict, f"{prefix}{name}.", name)


def forget_state_of_parameters(module: nn.Module) -> None:
    """Removes what a module keeps for operations that read its parameters."""
    for parameter in () if isinstance(module, FusibleOperation) else module._parameters:
        if isinstance(module._modules.get(child_of(parameter)), QuantizationState):
            del module._modules[child_of(parameter)]


def restore_state(
    op: nn.Module, state_dict: dict[str, Any], prefix: str, name: str = CHILD
) -> None:
    """Makes the state of an operation if a state dict has one, which then loads it.

    Args:
        op: the operation, or a module that keeps its state.
        state_dict: that is loaded.
        prefix: of the state's keys.
        name: of the child that the state is.
    """
    keys = [prefix + name for name in ("scale", "amax_history", "amax")]
    if misfits(state_dict, prefix, keys) == ([], []):
        history = state_dict[prefix + "amax_history"]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            _tell_first_rank(op)
        op.add_module(name, QuantizationState(len(history), next(op.parameters()).device))


def _tell_first_rank(op: nn.Module) -> None:
    """Others get what they ask for, if that rank's state dict is broadcast, and do not know."""
    if dist.get_rank() == 0:
        warnings.warn(
            explain(
                "Scales of a state dict are given to an operation that had none, on this rank",
                where=f"{type(op).__name__}({op.extra_repr()})",
                received="a state dict that rank 0 may have alone, as with broadcast_from_rank0",
                remedy="Call opfuser.init_recipe_state(model, recipe) on every rank before loading",
            ),
            stacklevel=2,
        )
