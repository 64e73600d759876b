"""The scales that an operation keeps from call to call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels.quantize import scale_for
from ..op import RESTORED_CHILDREN, FusibleOperation
from ..recipe import DelayedScaling, Float8PredictedScaling, Recipe

__all__ = ["ROLES", "QuantizationState", "in_backward", "state_of", "update_scales"]

ROLES = ("input", "weight", "grad_output")

Stateful = DelayedScaling | Float8PredictedScaling
_KEYS = "scale", "amax_history"


class QuantizationState(nn.Module):
    """Scales, and the largest values that they come from, of the tensors of :data:`ROLES`.

    A submodule of an operation, made when it first needs one, or when a state dict has it.

    Buffers:
        scale: (3,) fp32: what values are multiplied by before they are rounded.
        amax_history: (length, 3) fp32: the largest values of earlier calls, the last first.
        amax: (3,) fp32, not in state dicts: the largest values since the last update.
    """

    scale: Tensor
    amax_history: Tensor
    amax: Tensor

    def __init__(self, length: int, device: torch.device | None = None) -> None:
        super().__init__()
        fp32: Any = {"dtype": torch.float32, "device": device}
        self.register_buffer("scale", torch.ones(len(ROLES), **fp32))
        self.register_buffer("amax_history", torch.zeros(length, len(ROLES), **fp32))
        self.register_buffer("amax", torch.zeros(len(ROLES), **fp32), persistent=False)
        self.number = next(_numbers)  # the same order in every rank
        _all.add(self)
        self.recipe: Stateful | None = None
        self.group: dist.ProcessGroup | None = None
        # Whether each scale comes from values, so that a first call can look at its own.
        self.known = [False] * len(ROLES)

    def knows(self, role: str, recipe: Stateful) -> bool:
        """Whether there is a scale for the role; predicted scaling takes its first from values."""
        return self.known[ROLES.index(role)] or not isinstance(recipe, Float8PredictedScaling)

    def learn(self, role: str, amax: Tensor, recipe: Stateful) -> None:
        """Takes the first scale for the role from a largest value, (1,)."""
        self.known[ROLES.index(role)] = True
        self.scale_of(role).copy_(scale_for(amax, recipe.dtype(role)))

    def scale_of(self, role: str) -> Tensor:
        """(1,): what values are multiplied by."""
        n = ROLES.index(role)
        return self.scale[n : n + 1]

    def amax_seen(self, role: str) -> Tensor:
        """(1,): raised by whoever quantises a tensor."""
        n = ROLES.index(role)
        return self.amax[n : n + 1]

    def update(self) -> None:
        """Enters the largest values since the last update into the history, if there are any."""
        recipe = self.recipe
        if recipe is None:
            return
        seen, history = self.amax, self.amax_history
        # What overflowed says nothing of the calls to come.
        usable = torch.where(seen.isfinite(), seen, 0.0)
        if len(history) > 1:
            entered = torch.cat([usable[None], history[:-1]])
            history.copy_(torch.where(usable.any(), entered, history))
        else:  # what was not seen keeps its entry: one of the passes may not have run
            history[0] = torch.where(usable > 0, usable, history[0])
        most_recent = isinstance(recipe, Float8PredictedScaling)
        most_recent = most_recent or recipe.amax_compute_algo == "most_recent"  # type: ignore[union-attr]
        amax = history[0] if most_recent else history.amax(0)
        for n, role in enumerate(ROLES):
            new = scale_for(amax[n : n + 1], recipe.dtype(role), margin=recipe.margin)
            self.scale[n : n + 1] = torch.where(amax[n] > 0, new, self.scale[n : n + 1])
        seen.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves with the operation, but stays in fp32."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            now = self._buffers[name]
            if buffer is not None and now is not None and now.dtype != torch.float32:
                self._buffers[name] = buffer.to(now.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        history = state_dict.get(prefix + "amax_history")
        if history is not None and history.shape != self.amax_history.shape:
            self.amax_history = self.amax_history.new_zeros(history.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if history is not None:
            self.known = (self.amax_history[0] > 0).tolist()
        self.amax.zero_()


# Whether one of them has seen values since the last update, only the device knows: a replayed call
# leaves no trace on the host.
_all: weakref.WeakSet[QuantizationState] = weakref.WeakSet()
_numbers = count()


def state_of(op: nn.Module, recipe: Recipe, group: dist.ProcessGroup | None) -> QuantizationState:
    """The state of an operation that computes with a recipe that keeps scales."""
    assert isinstance(recipe, Stateful)
    # A compound such as Linear has the parameters and the state of its operations.
    owner = getattr(op, "_owner", None) or op
    state = owner._modules.get("quantization")
    length = 1 if isinstance(recipe, Float8PredictedScaling) else recipe.amax_history_len
    if state is None:
        state = QuantizationState(length, next(op.parameters()).device)
        owner.add_module("quantization", state)
    assert isinstance(state, QuantizationState)
    if op._modules.get("quantization") is not state:
        op.add_module("quantization", state)
    if len(state.amax_history) != length:
        old = state.amax_history
        state.amax_history = old.new_zeros(length, len(ROLES))
        kept = min(length, len(old))
        state.amax_history[:kept] = old[:kept]
    state.recipe = recipe
    if not in_backward():  # there the region is closed
        state.group = group
    return state


def _restore(op: FusibleOperation, state_dict: dict[str, Any], prefix: str) -> None:
    history = state_dict.get(prefix + "amax_history")
    if history is not None:
        op.add_module("quantization", QuantizationState(len(history), next(op.parameters()).device))


RESTORED_CHILDREN["quantization"] = _restore


def in_backward() -> bool:
    """Whether autograd is running in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def update_scales() -> None:
    """Updates the scales of all operations from what they have seen since the last time.

    Not within a backward pass, where a checkpoint computes a forward again: it is to see the scales
    of the first time.
    """
    if not _all or in_backward():
        return
    states = sorted(_all, key=lambda state: state.number)
    _agree(states)
    for state in states:
        state.update()


def _agree(states: list[QuantizationState]) -> None:
    """Has the ranks of each group take the largest of their values."""
    groups: dict[int, list[QuantizationState]] = {}
    for state in states:
        if state.group is not None and state.recipe is not None and state.recipe.reduce_amax:
            groups.setdefault(id(state.group), []).append(state)
    for members in groups.values():
        together = torch.stack([state.amax for state in members])
        dist.all_reduce(together, dist.ReduceOp.MAX, members[0].group)
        for state, amax in zip(members, together):
            state.amax.copy_(amax)
