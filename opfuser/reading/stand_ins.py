"""Objects that a traced forward gets in place of caches of keys and values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kept import KeptError

__all__ = ["CacheStandIn", "is_cache"]

Update = Callable[[Tensor, Tensor, int, Callable[[], tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]]


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of keys and values of transformers."""
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    return isinstance(value, kind)


class CacheStandIn:
    """A cache whose ``update`` is recorded as one node, and which nothing is written to.

    Args:
        cache: that it stands for.
        update: records an update of keys and values for a layer.
    """

    def __init__(self, cache: Any, update: Update) -> None:
        self._cache, self._update = cache, update

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that forwards take it for what it stands for
        return type(self._cache)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values so far, of the shapes that the cache would return."""
        if any(leaf is not None for leaf in (*args, *kwargs.values())):
            raise KeptError("updates its cache with more than keys and values")

        layer = layer_idx.used_as_layer() if type(layer_idx) is LayerIndex else int(layer_idx)

        def made() -> tuple[Tensor, Tensor]:
            length = self._cache.get_mask_sizes(keys.shape[-2], layer)[0]
            shapes = ((*t.shape[:-2], length, t.shape[-1]) for t in (keys, values))
            empty = torch.empty
            k, v = (empty(s, dtype=keys.dtype, device="meta") for s in shapes)
            return k, v

        return self._update(keys, values, layer, made)

    def __getattr__(self, name: str) -> Any:
        raise KeptError(f"reads '{name}' of its cache")


class LayerIndex:
    """The number of a layer, of which it is noted whether it is used for anything but a cache.

    Layers of one model differ by it, and compute the same where a cache alone is told of it. No
    subclass of ``int``, as the interpreter does not say when it uses one as an index.

    Args:
        value: the number.
        used: is told when the forward uses it.
    """

    def __init__(self, value: int, used: Callable[[], None]) -> None:
        self._value, self._used = value, used

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return int

    def used_as_layer(self) -> int:
        return self._value


def _using(name: str) -> Any:
    def method(self: LayerIndex, *others: Any) -> Any:
        self._used()
        return getattr(self._value, name)(*others)

    return method


for _name in dir(int):
    _special = _name.startswith("__") and callable(getattr(int, _name))
    if _special and _name not in vars(LayerIndex) and _name not in vars(object):
        setattr(LayerIndex, _name, _using(_name))
for _name in "eq ne lt le gt ge hash str repr format".split():
    setattr(LayerIndex, f"__{_name}__", _using(f"__{_name}__"))
