"""The scales that an operation keeps from call to call."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ArgumentError, explain
from ..events.kinds import ScalesUpdated
from ..events.telling import emit
from ..kernels.quantize import TensorScaling, scale_for
from ..kernels.quantize_plain import largest
from ..kernels.scales import KeptScales
from ..kernels.scales import update_scales as update_together
from ..op_base.fusible import FusibleOperation
from ..recipe import DelayedScaling, Recipe
from ..recomputation import computed_again, in_backward, is_outside
from ..recording import refuse_watching, seen_whole
from .checkpointed import note_scale, scale_of_forward

ROLES = ("input", "weight", "grad_output")
_NUMBERS = {role: n for n, role in enumerate(ROLES)}

# The name of the child of an operation that has them.
CHILD = "quantization"


class _Parts(NamedTuple):
    """What is made once of the buffers of a state and its recipe: a slice takes microseconds.

    Attributes:
        recipe: of the last call.
        kept: what an update changes.
        scale, amax: an element of the buffers for each role, (1,).
        addresses: of the buffers.
    """

    recipe: DelayedScaling | None
    kept: KeptScales
    scale: tuple[Tensor, ...]
    amax: tuple[Tensor, ...]
    addresses: tuple[int, int, int]


def _clones(*scales: Tensor) -> tuple[Tensor, ...]:
    """Copies of scales, (3,), by one launch; each begins at a multiple of 16 bytes, as alone."""
    shape, strides = (len(scales), len(ROLES)), (len(ROLES) + 1, 1)
    copies = scales[0].new_empty_strided(shape, strides).unbind()
    torch._foreach_copy_(copies, scales)
    return copies


# Within a pass nothing changes scales, whatever else it is given of a state.
_clone: Callable[[Tensor], Tensor] = seen_whole(several=_clones, each=True)(torch.clone)


def _addresses(kept: KeptScales) -> tuple[int, int, int]:
    return kept.scale.data_ptr(), kept.history.data_ptr(), kept.amax.data_ptr()


class QuantizationState(nn.Module):
    """Scales, and the largest values that they come from, of the tensors of :data:`ROLES`.

    A submodule of an operation, made once it is known to need one: where its recipe is told, at its
    first call, or when a state dict has it.

    ``buffers()`` and ``modules()`` of what is around it leave it out: they are what wrappers send
    from rank to rank and average, as DistributedDataParallel does before every forward, whereas
    scales belong to the values of their own rank. Ranks agree through ``amax_reduction_group``.

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
        self.recipe: DelayedScaling | None = None
        # Whether each scale comes from values, so that a first call can look at its own.
        self.known = [False] * len(ROLES)
        self._enter()

    def _enter(self) -> None:
        """Is updated from now on."""
        self.number = next(_numbers)  # the same order in every rank
        self.group: dist.ProcessGroup | None = None  # of ranks that it agrees with
        self.row = -1  # of the tensor in which they do
        self._parts: _Parts | None = None
        self._written = self._versions()  # by this class
        # Of each role that forward rounds, if the last such tensor had another scale: its own, as
        # the first one, or that of the forward that was computed again.
        self._other: dict[int, Tensor] = {}
        _all[self.number] = self

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Itself, but nothing to a module that holds it, which passes what it has found."""
        if memo is None:
            yield prefix, self

    def __getstate__(self) -> dict[str, Any]:
        self._read_what_was_written()
        return {**self.__dict__, "group": None, "_parts": None, "_other": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()

    @property
    def length(self) -> int:
        """Length of the history."""
        return self.amax_history.shape[0]

    def knows(self, role: str) -> bool:
        """Whether there is a scale for the role; the first one is taken from values."""
        if not self.known[_NUMBERS[role]]:
            self._read_what_was_written()
        return self.known[_NUMBERS[role]]

    def learn(self, role: str, amax: Tensor, recipe: DelayedScaling) -> Tensor:
        """The first scale for the role, from a largest value, (1,).

        It is kept, unless the value is not finite: that says nothing of the calls to come.
        """
        refuse_watching("a scale is taken from the first values")
        number = _NUMBERS[role]
        self.known[number] = True
        scale: Tensor = scale_for(amax, recipe.dtype(role))
        if role != "grad_output":
            self._other[number] = scale
            note_scale(self.number, number, scale)
        self.scale_of(role).copy_(scale.nan_to_num(1.0))
        self._written = self._versions()
        if ScalesUpdated.wanted:
            emit(ScalesUpdated(1, (role,), "first value"))
        return scale

    def known_scaling(self, role: str, recipe: DelayedScaling) -> TensorScaling | None:
        """How the next tensor of the role is quantised; None if there is no scale for it yet.

        What is computed again has the scale of its forward, and has been seen by it.

        Raises:
            RecomputationError: the forward had fewer tensors.
        """
        number, parts = _NUMBERS[role], self._current_parts()
        if role != "grad_output":
            scale = scale_of_forward(self.number, number)
            if scale is not None:
                refuse_watching("a forward is computed again, with its scales")
                self._other[number] = scale
                note_scale(self.number, number, scale)
                return TensorScaling(scale, recipe.dtype(role))
        if not self.knows(role):
            return None
        if self._other:
            refuse_watching("the tensor before had a scale of its own")
            self._other.pop(number, None)
        scale = parts.scale[number]
        if recipe is not self.recipe and (ratio := self._ratio(number, recipe)) != 1:
            refuse_watching("scales are those of another recipe")
            scale = scale * ratio  # of a backward whose forward had another recipe than the last
        if role != "grad_output":
            note_scale(self.number, number, scale)
        return TensorScaling(scale, recipe.dtype(role), parts.amax[number])

    def _ratio(self, number: int, recipe: DelayedScaling) -> float:
        """Ratio of the scale of a role by a recipe to that by the last one."""
        last, role = self.recipe, ROLES[number]
        if last is None:
            return 1.0
        ratio = largest(recipe.dtype(role)) / largest(last.dtype(role))
        return ratio * 2.0 ** (last.margin - recipe.margin)

    def follow(self, recipe: DelayedScaling) -> None:
        """Has calls with a recipe from now on, for which the scales are adapted."""
        ratios = [self._ratio(number, recipe) for number in range(len(ROLES))]
        self.recipe = recipe
        for number, ratio in enumerate(ratios):
            if ratio != 1:
                self._current_parts().scale[number].mul_(ratio)

    def used_scales(self) -> Tensor:
        """(3,): a copy of what the last tensor of each role was multiplied by.

        Forward saves it for what backward rounds again: updates change :attr:`scale` in place.
        """
        used = _clone(self._current_parts().kept.scale)
        for number, scale in self._other.items():  # a NaN is not kept
            used[number] = scale[0]
        return used

    @staticmethod
    def used_scaling(used: Tensor, role: str, dtype: torch.dtype) -> TensorScaling:
        """How a tensor of the role was quantised, from :meth:`used_scales`; its amax was seen."""
        number = _NUMBERS[role]
        return TensorScaling(used[number : number + 1], dtype)  # narrow() takes twice as long

    def scale_of(self, role: str) -> Tensor:
        """(1,): what values are multiplied by."""
        return self._current_parts().scale[_NUMBERS[role]]

    def amax_seen(self, role: str) -> Tensor:
        """(1,): raised by whoever quantises a tensor."""
        return self._current_parts().amax[_NUMBERS[role]]

    def _current_parts(self) -> _Parts:
        """The buffers by their parts; the same object as long as nobody replaces a buffer."""
        parts, buffers, recipe = self._parts, self._buffers, self.recipe
        if (
            parts is None
            or parts.kept.scale is not buffers["scale"]
            or parts.kept.history is not buffers["amax_history"]
            or parts.kept.amax is not buffers["amax"]
            or parts.recipe is not recipe
            # of .data that was replaced
            or parts.kept.scale.data_ptr() != parts.addresses[0]
            or parts.kept.history.data_ptr() != parts.addresses[1]
            or parts.kept.amax.data_ptr() != parts.addresses[2]
        ):
            self._parts = parts = self._make_parts()
        return parts

    def _make_parts(self) -> _Parts:
        refuse_watching("buffers were replaced")
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
            most_recent = recipe.amax_compute_algo == "most_recent"
            dtypes = recipe.dtype("input"), recipe.dtype("weight"), recipe.dtype("grad_output")
            kept = KeptScales(scale, history, amax, dtypes, recipe.margin, most_recent)
        return _Parts(recipe, kept, *views, _addresses(kept))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves with the operation, but stays in fp32, and has values also after ``to_empty``."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            now = self._buffers[name]
            if old is None or now is None or now is old:
                continue
            if not old.is_meta:
                self._buffers[name] = old.to(now.device)
            elif not now.is_meta:
                fill = torch.ones if name == "scale" else torch.zeros
                self._buffers[name] = fill(old.shape, dtype=torch.float32, device=now.device)
                self.known = [False] * len(ROLES)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes all of it or nothing. A state without values yet needs none."""
        own = [prefix + name for name in self._buffers]
        missing, problems = _misfits(state_dict, prefix, own)
        fits = not missing and not problems
        if fits:
            self._set_length(len(state_dict[prefix + "amax_history"]))
        else:  # what is unknown is reported as always, and nothing is found to be loaded
            state_dict = {k: v for k, v in state_dict.items() if k not in own}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, [], unexpected_keys, error_msgs
        )
        if fits:
            self.known = self._have_values()
            self._written = self._versions()
            return
        error_msgs += problems
        if strict and (len(missing) < len(own) or any(map(self.knows, ROLES))):
            missing_keys += missing

    def _set_length(self, length: int) -> None:
        """Empties the history if it has another length."""
        if length != len(self.amax_history):
            with torch.inference_mode(False):
                self.amax_history = self.amax_history.new_zeros(length, len(ROLES))

    def _read_what_was_written(self) -> None:
        """Knows the scales that others have written to the buffers.

        As torch.distributed.checkpoint does, in place, to what ``state_dict()`` has returned.
        """
        if all(self.known) or self._written == self._versions():
            return
        refuse_watching("scales were written to")
        self._written = self._versions()
        # A first value of 0 leaves no trace there.
        self.known = [known or has for known, has in zip(self.known, self._have_values())]

    def _have_values(self) -> list[bool]:
        """For each role whether the buffers are others than those of a new state."""
        if self.scale.is_meta:
            return [False] * len(ROLES)
        seen = torch.cat([self.amax_history, self.amax[None]]).amax(0) > 0
        found: list[bool] = ((self.scale != 1) | seen).tolist()
        return found

    def _versions(self) -> tuple[tuple[int, int], ...]:
        """What differs once somebody has written to the buffers, or replaced one."""
        own = self.scale, self.amax_history, self.amax
        return tuple([(id(t), 0 if t.is_inference() else t._version) for t in own])


def _misfits(
    state_dict: dict[str, Any], prefix: str, keys: list[str]
) -> tuple[list[str], list[str]]:
    """The keys of a state that a state dict lacks, and what is wrong with what it has."""
    problems = []
    for key in keys:
        value, rows = state_dict.get(key), "length, " * key.endswith("amax_history")
        shape = tuple(getattr(value, "shape", ()))
        if key in state_dict and (
            not isinstance(value, Tensor)
            or shape[-1:] != (len(ROLES),)
            or len(shape) != (2 if rows else 1)
            or not shape[0]
        ):
            problems.append(
                f"size mismatch for {key}: copying a param with shape {shape} from checkpoint, "
                f"the shape in current model is ({rows}{len(ROLES)})."
            )
    return [key for key in keys if key not in state_dict], problems


# Whether one of them has seen values since the last update, only the device knows: a replayed call
# leaves no trace on the host.
_all: weakref.WeakValueDictionary[int, QuantizationState] = weakref.WeakValueDictionary()
_numbers = count()


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
    if state.recipe is None or not _is_past():
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
            state.row = _join(group, state.scale.device)


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
    parts: _Parts
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


def _is_past() -> bool:
    """Whether the caller belongs to a call that came earlier."""
    if is_outside():
        return False
    return in_backward() or computed_again() is not None


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
    if _misfits(state_dict, prefix, keys) == ([], []):
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


class _Members(NamedTuple):
    """Members of a group: the states that have ever agreed in it, and where they do."""

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
    for found in _all.valuerefs():
        state = found()
        if state is not None:
            states.append(state)
    if not (states or _groups) or _is_past():
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
