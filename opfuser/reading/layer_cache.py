"""What attention is given of a cache of transformers."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.cache import (
    Extended,
    StoresLast,
    extended_copy,
    is_of_transformers,
    is_replacing,
    state_of_layer,
)


@dataclass(frozen=True, eq=False)
class LayerCache(StoresLast):
    """The keys and values of one layer.

    Attributes:
        cache: of all layers; or what has it as ``cache``, and makes what it keeps by ``kept``.
        layer: its number.
        causal: whether query i sees the keys up to i: then no others than the first are seen, and
            what the cache has besides is room for later ones.
    """

    cache: Any
    layer: int
    causal: bool

    def extended(self, k: Tensor, v: Tensor) -> Extended:
        """Returns all keys and values, and what appends those of the call.

        A static layer writes to its tensors, and an offloaded one moves them: these append at once,
        as they do in transformers.
        """
        layer, length = self._replacing, k.shape[2]
        if layer is None:
            keys, values = self.cache.update(k, v, self.layer)
            more = Extended(keys, values, None)
        else:
            kept = getattr(self.cache, "kept", lambda *given: given)
            with torch.enable_grad():  # of what is kept, so that it says that it has no gradients
                more = extended_copy(layer, *kept(k, v))
            more = more._replace(keys=more.keys.detach(), values=more.values.detach())
        if self.causal and more.keys.shape[2] > length:
            keys, values = more.keys[:, :, :length], more.values[:, :, :length]
            more = more._replace(keys=keys, values=values)
        return more

    def state(self) -> Hashable:
        layer = self._replacing
        state = None if layer is None else state_of_layer(layer)
        return None if state is None else (state, self.causal)

    @functools.cached_property
    def _replacing(self) -> Any | None:
        """Returns the layer if its ``update`` replaces its tensors and is all that happens."""
        cache, number = getattr(self.cache, "cache", self.cache), self.layer
        layers = getattr(cache, "layers", None)
        if layers is None or not is_of_transformers(cache) or getattr(cache, "offloading", False):
            return None
        missing = getattr(cache, "layer_class_to_replicate", None)
        while missing is not None and len(layers) <= number:  # as its update does, with empty ones
            layers.append(missing())
        if len(layers) <= number or not is_replacing(layers[number]):
            return None
        return layers[number]
