"""The scales that an operation keeps from call to call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..events.kinds import ScalesUpdated
from ..events.telling import emit
from ..kernels.quantize import TensorScaling, scale_for
from ..kernels.quantize_plain import largest
from ..kernels.scales import KeptScales
from ..recipe import DelayedScaling
from ..runtime.recording import refuse_watching, seen_whole
from .checkpointed import note_scale, scale_of_forward

ROLES = ("input", "weight", "grad_output")
_NUMBERS = {role: n for n, role in enumerate(ROLES)}

# The name of the child of an operation that has them.
CHILD = "quantization"


class StateParts(NamedTuple):
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
        self._parts: StateParts | None = None
        self._written = self._versions()  # by this class
        # Of each role that forward rounds, if the last such tensor had another scale: its own, as
        # the first one, or that of the forward that was computed again.
        self._other: dict[int, Tensor] = {}
        living_states[self.number] = self

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
        """How the next tensor of the role is quantized; None if there is no scale for it yet.

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
        """How a tensor of the role was quantized, from :meth:`used_scales`; its amax was seen."""
        number = _NUMBERS[role]
        return TensorScaling(used[number : number + 1], dtype)  # narrow() takes twice as long

    def scale_of(self, role: str) -> Tensor:
        """(1,): what values are multiplied by."""
        return self._current_parts().scale[_NUMBERS[role]]

    def amax_seen(self, role: str) -> Tensor:
        """(1,): raised by whoever quantizes a tensor."""
        return self._current_parts().amax[_NUMBERS[role]]

    def _current_parts(self) -> StateParts:
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

    def _make_parts(self) -> StateParts:
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
        return StateParts(recipe, kept, *views, _addresses(kept))

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
        missing, problems = misfits(state_dict, prefix, own)
        fits = not missing and not problems
        if fits:
            length = len(state_dict[prefix + "amax_history"])
            if length != self.length:  # it is empty then
                with torch.inference_mode(False):
                    self.amax_history = self.amax_history.new_zeros(length, len(ROLES))
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
        seen = torch.cat([self.amax_history, self.amax[None]]).amax(0) != 0  # NaN, too
        found: list[bool] = ((self.scale != 1) | seen).tolist()
        return found

    def _versions(self) -> tuple[tuple[int, int], ...]:
        """What differs once somebody has written to the buffers, or replaced one."""
        own = self.scale, self.amax_history, self.amax
        return tuple([(id(t), 0 if t.is_inference() else t._version) for t in own])


def misfits(
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
living_states: weakref.WeakValueDictionary[int, QuantizationState] = weakref.WeakValueDictionary()
_numbers = count()
