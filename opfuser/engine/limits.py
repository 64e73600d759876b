"""Where configurations let fusions replace the operations of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..core.fusion import Refusal
from ..core.op_base import BasicOperation
from ..registry import FusionHandle, registry
from ..registry.configuration import FusionConfig, Place, Setting, settings_at
from .plan_key import CallFacts
from .routing import Routing, output_dtypes


class OperationFacts(NamedTuple):
    """What limits are compared with, of one operation.

    Attributes:
        place: where it stands.
        dtype: in which it computes, as declared.
        numel: number of elements of its parameters.
    """

    place: Place
    dtype: torch.dtype
    numel: int


class Limits:
    """What the configurations in force say about the operations of a group.

    Args:
        ops: the basic operations of the group.
    """

    def __init__(self, ops: Sequence[OperationFacts]) -> None:
        self._ops = ops
        self._settings: dict[str, list[dict[str, Setting]] | None] = {}
        around = (config for op in ops for config, _ in op.place.around)
        self._configs: set[FusionConfig] = {*registry.configs, *around}

    def _of(self, handle: FusionHandle) -> list[dict[str, Setting]] | None:
        """The settings of a fusion at each operation; None where nothing is stated about it."""
        name = handle.name
        if name not in self._settings:
            stated = any(name in config.by_fusion for config in self._configs)
            self._settings[name] = (
                [settings_at(name, registry.configs, op.place) for op in self._ops]
                if stated
                else None
            )
        return self._settings[name]

    def off(self, handle: FusionHandle) -> str:
        """What switches a fusion off everywhere in the group; empty if it is on anywhere."""
        if handle.switched() is not None or self._of(handle) is None:
            return handle.disabled_by()
        found = [handle.setting(op.place) for op in self._ops]
        return "" if any(setting.value for setting in found) else found[0].origin

    def refusal(self, handle: FusionHandle, start: int, stop: int) -> Refusal | None:
        """Why a fusion may not replace the basic operations from ``start`` to ``stop``."""
        settings = self._of(handle)
        if settings is None:
            return None
        for op, own in zip(self._ops[start:stop], settings[start:stop]):
            on = handle.setting(op.place)
            if not on.value:
                return Refusal("DISABLED", f"{handle.name} is off here: {on}")
            dtypes = own.get("dtypes")
            if dtypes is not None and dtypes.value and op.dtype not in dtypes.value:
                dtype = str(op.dtype).removeprefix("torch.")
                return Refusal("DTYPE", f"it computes in {dtype}: {dtypes}")
        numel = sum(op.numel for op in self._ops[start:stop])
        for own in settings[start:stop]:
            least = own.get("min_numel")
            if least is not None and numel < least.value:
                return Refusal("SHAPE", f"its parameters have {numel} elements: {least}")
        return None


def facts_of_operations(
    ops: Sequence[BasicOperation],
    routing: Routing,
    counts: Sequence[int],
    places: Sequence[Place],
    facts: CallFacts,
) -> list[OperationFacts]:
    """What limits of configurations are compared with; all of it follows from the key.

    Args:
        ops: the operations of a group.
        routing: of their extra tensors.
        counts: how many parameters each has.
        places: where they stand; empty where they stand nowhere.
        facts: of the call.
    """
    extras = [dtype for dtype, _ in facts.extra_inputs]
    before = facts.dtype
    after, _ = output_dtypes(
        ops, routing, counts, before, facts.parameter_dtypes, extras, facts.autocast_dtype
    )
    shapes = iter(facts.parameter_shapes)
    out = []
    for place, dtype, count in zip(places or (Place(),) * len(ops), after, counts):
        # Of what holds indices, as the input of an embedding, the result is computed in.
        computed = before if before.is_floating_point else dtype
        numel = sum(next(shapes).numel() for _ in range(count))
        out.append(OperationFacts(place, facts.autocast_dtype or computed, numel))
        before = dtype
    return out
