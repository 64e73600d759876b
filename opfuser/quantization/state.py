"""The scales that an operation keeps from call to call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..events.kinds import ScalesUpdated
from ..events.telling import emit
from ..kernels.quantize import TensorScaling, scale_for
from ..kernels.scales import KeptScales
from ..kernels.scales import update_scales as update_together
from ..op.fusible import RESTORED_CHILDREN, FusibleOperation
from ..recipe import DelayedScaling, Float8PredictedScaling, Recipe

__all__ = ["ROLES", "QuantizationState", "enter_region", "in_backward", "state_of", "update_scales"]

ROLES = ("input", "weight", "grad_output")
_NUMBERS = {role: n for n, role in enumerate(ROLES)}

Stateful = DelayedScaling | Float8PredictedScaling
_KEYS = "scale", "amax_history"


class _Parts(NamedTuple):
    """What is made once of the buffers of a state and its recipe: a slice takes microseconds.

    Attributes:
        recipe: of the last call.
        kept: what an update changes.
        scale, amax: an element of the buffers for each role, (1,).
        addresses: of the buffers.
    """

    recipe: Stateful | None
    kept: KeptScales
    scale: tuple[Tensor, ...]
    amax: tuple[Tensor, ...]
    addresses: tuple[int, int, int]


def _addresses(kept: KeptScales) -> tuple[int, int, int]:
    return kept.scale.data_ptr(), kept.history.data_ptr(), kept.amax.data_ptr()


class QuantizationState(nn.Module):
    """Scales, and the largest values that they come from, of the tensors of :data:`ROLES`.

    A submodule of an operation, made when it first needs one, or when a state dict has it.

    Buffers:
        scale: (3,) fp32: what values are multiplied by before they are rounded.
        amax_history: (length, 3) fp32: the largest values of earlier calls, the last first.
        amax: (3,) fp32: the largest values since the last update.
    """

    scale: Tensor
    amax_history: Tensor
    amax: Tensor

    def __init__(self, length: int, device: torch.device | None = None) -> None:
        super().__init__()
        fp32: Any = {"dtype": torch.float32, "device": device}
        with torch.inference_mode(False):  # later calls outside of that mode write to them, too
            self.register_buffer("scale", torch.ones(len(ROLES), **fp32))
            self.register_buffer("amax_history", torch.zeros(length, len(ROLES), **fp32))
            self.register_buffer("amax", torch.zeros(len(ROLES), **fp32))
        self.recipe: Stateful | None = None
        # Whether each scale comes from values, so that a first call can look at its own.
        self.known = [False] * len(ROLES)
        self._enter()

    def _enter(self) -> None:
        """Is updated from now on."""
        self.number = next(_numbers)  # the same order in every rank
        self.group: dist.ProcessGroup | None = None  # of ranks that it agrees with
        self.row = -1  # of the tensor in which they do
        self._parts: _Parts | None = None
        # Of each role that forward rounds, if the last such tensor gave its own scale.
        self._first: dict[int, Tensor] = {}
        _all[self.number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group": None, "_parts": None, "_first": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()

    def knows(self, role: str) -> bool:
        """Whether there is a scale for the role; the first one is taken from values."""
        return self.known[_NUMBERS[role]]

    def learn(self, role: str, amax: Tensor, recipe: Stateful) -> Tensor:
        """The first scale for the role, from a largest value, (1,).

        It is kept, unless the value is not finite: that says nothing of the calls to come.
        """
        self.known[_NUMBERS[role]] = True
        scale: Tensor = scale_for(amax, recipe.dtype(role))
        if role != "grad_output":
            self._first[_NUMBERS[role]] = scale
        self.scale_of(role).copy_(scale.nan_to_num(1.0))
        if ScalesUpdated.wanted:
            emit(ScalesUpdated(1, (role,), "first value"))
        return scale

    def known_scaling(self, role: str, dtype: torch.dtype) -> TensorScaling | None:
        """How the next tensor of the role is quantised; None if there is no scale for it yet."""
        if not self.knows(role):
            return None
        number, parts = _NUMBERS[role], self._current_parts()
        if self._first:
            self._first.pop(number, None)
        return TensorScaling(parts.scale[number], dtype, parts.amax[number])

    def used_scales(self) -> Tensor:
        """(3,): a copy of what the last tensor of each role was multiplied by.

        Forward saves it for what backward rounds again: updates change :attr:`scale` in place.
        """
        used = self._current_parts().kept.scale.clone()
        for number, scale in self._first.items():  # a NaN is not kept
            used[number] = scale[0]
        return used

    @staticmethod
    def used_scaling(used: Tensor, role: str, dtype: torch.dtype) -> TensorScaling:
        """How a tensor of the role was quantised, from :meth:`used_scales`; its amax was seen."""
        return TensorScaling(used.narrow(0, _NUMBERS[role], 1), dtype)

    def scale_of(self, role: str) -> Tensor:
        """(1,): what values are multiplied by."""
        return self._current_parts().scale[_NUMBERS[role]]

    def amax_seen(self, role: str) -> Tensor:
        """(1,): raised by whoever quantises a tensor."""
        return self._current_parts().amax[_NUMBERS[role]]

    def kept(self) -> KeptScales | None:
        """What the next update changes; None as long as no call has had a recipe."""
        return None if self.recipe is None else self._current_parts().kept

    def _current_parts(self) -> _Parts:
        """Of the buffers as they are; the same ones as long as nobody replaces a buffer."""
        buffers, parts, recipe = self._buffers, self._parts, self.recipe
        if (
            parts is None
            or parts.kept.scale is not buffers["scale"]
            or parts.kept.history is not buffers["amax_history"]
            or parts.kept.amax is not buffers["amax"]
            or parts.recipe is not recipe
            or parts.addresses != _addresses(parts.kept)  # of .data that was replaced
        ):
            self._parts = parts = self._make_parts()
        return parts

    def _make_parts(self) -> _Parts:
        recipe, buffers = self.recipe, self._buffers
        with torch.inference_mode(False):
            for name, buffer in buffers.items():  # a state dict that is assigned may hold any
                if buffer is not None:
                    buffers[name] = buffer.to(self.scale.device, torch.float32).contiguous()
            scale, history, amax = self.scale, self.amax_history, self.amax
            views = tuple(scale.split(1)), tuple(amax.split(1))
        e4m3 = torch.float8_e4m3fn
        kept = KeptScales(scale, history, amax, (e4m3, e4m3, e4m3), 0, True)
        if recipe is not None:
            most_recent = isinstance(recipe, Float8PredictedScaling)
            most_recent = most_recent or recipe.amax_compute_algo == "most_recent"  # type: ignore[union-attr]
            dtypes = recipe.dtype("input"), recipe.dtype("weight"), recipe.dtype("grad_output")
            kept = KeptScales(scale, history, amax, dtypes, recipe.margin, most_recent)
        return _Parts(recipe, kept, *views, _addresses(kept))

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
            with torch.inference_mode(False):
                self.amax_history = self.amax_history.new_zeros(history.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if history is not None:
            self.known = (torch.maximum(self.amax_history[0], self.amax) > 0).tolist()


# Whether one of them has seen values since the last update, only the device knows: a replayed call
# leaves no trace on the host.
_all: weakref.WeakValueDictionary[int, QuantizationState] = weakref.WeakValueDictionary()
_numbers = count()


def state_of(op: nn.Module, recipe: Recipe, group: dist.ProcessGroup | None) -> QuantizationState:
    """The state of an operation that computes with a recipe that keeps scales."""
    assert isinstance(recipe, Stateful)
    # A compound such as Linear has the parameters and the state of its operations.
    owner = getattr(op, "_owner", None) or op
    state = owner._modules.get("quantization")
    length = 1 if isinstance(recipe, Float8PredictedScaling) else recipe.amax_history_len
    fresh = state is None
    if state is None:
        state = QuantizationState(length, next(op.parameters()).device)
        owner.add_module("quantization", state)
    assert isinstance(state, QuantizationState)
    if op._modules.get("quantization") is not state:
        op.add_module("quantization", state)
    old = state._buffers["amax_history"]
    if old is not None and old.shape[0] != length:
        with torch.inference_mode(False):
            state.amax_history = old.new_zeros(length, len(ROLES))
        kept = min(length, len(old))
        state.amax_history[:kept] = old[:kept]
    if state.recipe is not recipe and state.recipe != recipe:  # a region may have its own object
        restored = state.recipe is None and not fresh
        state.recipe = recipe
        if restored:  # what a state dict brought waits since the region opened
            update_together([state._current_parts().kept])
            if ScalesUpdated.wanted:
                emit(ScalesUpdated(1, ROLES, "state dict"))
    if not recipe.reduce_amax:
        group = None
    if state.group is not group and not in_backward():  # there the region is closed
        state.group = group
        if group is not None:
            state.row = _join(group, state.scale.device)
    return state


def _restore(op: FusibleOperation, state_dict: dict[str, Any], prefix: str) -> None:
    history = state_dict.get(prefix + "amax_history")
    if history is not None:
        op.add_module("quantization", QuantizationState(len(history), next(op.parameters()).device))


RESTORED_CHILDREN["quantization"] = _restore


def in_backward() -> bool:
    """Whether autograd is running in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class _Members(NamedTuple):
    """Of a group: the states that have ever agreed in it, and where they do."""

    states: int
    device: torch.device


# States die when the garbage is collected, in each rank at another time. What ranks do together
# follows from the calls alone: from the regions that were opened, and the states' first calls.
_members: weakref.WeakKeyDictionary[dist.ProcessGroup, _Members] = weakref.WeakKeyDictionary()
_groups: dict[dist.ProcessGroup, None] = {}  # of regions since the last update, in their order


def _join(group: dist.ProcessGroup, device: torch.device) -> int:
    """The row of a state that is new to a group."""
    count, chosen = _members.get(group, (0, device))
    # NCCL takes no tensors of a CPU.
    _members[group] = _Members(count + 1, chosen if chosen.type == "cuda" else device)
    return count


def enter_region(recipe: Recipe, group: dist.ProcessGroup | None, *, outermost: bool) -> None:
    """Updates the scales of all operations, if the region that opens is in no other one."""
    if not (isinstance(recipe, Stateful) and recipe.reduce_amax):
        group = None
    if group is not None:
        _groups[group] = None
    if outermost:
        update_scales()
    if group is not None:
        _groups[group] = None


def update_scales() -> None:
    """Updates the scales of all operations from what they have seen since the last time.

    Not within a backward pass, where a checkpoint computes a forward again: it is to see the scales
    of the first time. States that agree with other ranks wait for a region with their group.
    """
    if not (_all or _groups) or in_backward():
        return
    groups = list(_groups)
    _groups.clear()
    states = list(_all.values())  # in the order of their numbers
    for group in groups:
        _agree(group, [state for state in states if state.group is group])
    ready = [state for state in states if state.group is None or state.group in groups]
    update = [kept for state in ready if (kept := state.kept()) is not None]
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
