"""Parameters in several places of a model, which stay one parameter when it is replaced."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..torch_internals import memory_of


class Place(NamedTuple):
    """Where a parameter is.

    Attributes:
        module: that has it.
        name: in the module.
        path: from the whole model.
    """

    module: nn.Module
    name: str
    path: str


def tied_places(model: nn.Module) -> list[list[Place]]:
    """For each parameter that several places of ``model`` have, these places."""
    found: dict[int, list[Place]] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                path = f"{prefix}.{name}" if prefix else name
                found.setdefault(id(param), []).append(Place(module, name, path))
    return [places for places in found.values() if len(places) > 1]


def tie(places: list[Place]) -> None:
    """Puts the parameter of the first place into the others."""
    first, *others = places
    param = first.module._parameters[first.name]
    for place in others:
        if place.module._parameters[place.name] is not param:
            setattr(place.module, place.name, param)


def load_as_one(places: list[Place], state_dict: MutableMapping[str, Any], prefix: str) -> None:
    """Makes what a state dict assigns to places of one parameter one parameter, if it is equal."""
    names = [prefix + place.path for place in places if prefix + place.path in state_dict]
    values = [state_dict[name] for name in names]
    if len(values) < 2 or not all(_are_equal(values[0], other) for other in values[1:]):
        return
    (value, *_), (module, own, _), *_ = values, *places
    param = module._parameters[own]
    assert param is not None
    if not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=param.requires_grad)
    state_dict.update(dict.fromkeys(names, value))


def _are_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not isinstance(a, Tensor) or type(a) is not type(b):
        return False
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    if memory_of(a) == memory_of(b) and a.stride() == b.stride():
        return bool(a.storage_offset() == b.storage_offset())
    return not a.is_meta and torch.equal(a, b)
