"""Objects that a traced forward gets in place of caches of keys and values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

__all__ = [
    "MORE",
    "CacheStandIn",
    "LayerIndex",
    "Update",
    "cached_length",
    "ignores_more",
    "is_cache",
]


MORE = "updates its cache with more than keys and values"


class Update(NamedTuple):
    """An update of a cache in a traced forward, from which the number of its keys follows.

    Attributes:
        cache: number of the cache among those of the call.
        holder: path of the module whose ``layer_idx`` is the layer; None if ``layer`` is.
        layer: of the cache.
        queries: how many keys are added, as an expression of the sizes ``s`` of the call.
        more: whether it is given more than keys and values, which has to change nothing.
    """

    cache: int
    holder: str | None
    layer: int
    queries: str
    more: bool


def ignores_more(cache: Any, layer: int) -> bool:
    """Whether a layer of a cache does nothing with what it is given besides keys and values.

    From transformers 5.24 on models hand on their keywords, for paged caches alone.
    """
    layers = getattr(cache, "layers", ())
    missing = getattr(cache, "layer_class_to_replicate", None)
    kinds = type(cache), type(layers[layer]) if layer < len(layers) else missing
    updates = (getattr(kind, "update", None) for kind in kinds)
    return all(getattr(f, "__module__", "") == "transformers.cache_utils" for f in updates)


def cached_length(cache: Any, queries: int, layer: int) -> int:
    """How many keys a layer of a cache returns after an update by ``queries`` of them."""
    return int(cache.get_mask_sizes(queries, layer)[0])


Record = Callable[[Any, Tensor, Tensor, Any, bool], tuple[Tensor, Tensor]]


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of keys and values of transformers."""
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    return isinstance(value, kind)


class CacheStandIn:
    """A cache whose ``update`` is recorded as one node, and which nothing is written to.

    Args:
        cache: that it stands for.
        record: records an update of the cache by keys and values of a layer.
        keep: is told why the module is kept, if the forward asks for anything else.
        is_first: whether it is the first cache that the call was given.
    """

    def __init__(
        self, cache: Any, record: Record, keep: Callable[[str], NoReturn], is_first: bool
    ) -> None:
        self._cache, self._record, self._keep = cache, record, keep
        self.is_first = is_first

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that forwards take it for what it stands for
        return type(self._cache)

    def forget(self) -> None:
        """Lets the cache go, and stands for an empty one of its type."""
        self._cache = object.__new__(type(self._cache))

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values so far, of the shapes that the cache would return."""
        more = kwargs.pop("kwargs", None) is not None
        if any(leaf is not None for leaf in (*args, *kwargs.values())):
            self._keep(MORE)
        return self._record(self._cache, keys, values, layer_idx, more)

    def __getattr__(self, name: str) -> Any:
        self._keep(f"reads '{name}' of its cache")


class LayerIndex:
    """The number of a layer, of which it is noted whether it is used for anything but a cache.

    Layers of one model differ by it, and compute the same where a cache alone is told of it. No
    subclass of ``int``, as the interpreter does not say when it uses one as an index.

    Args:
        value: the number.
        holder: the module whose attribute it is.
        used: is told when the forward uses it.
    """

    def __init__(self, value: int, holder: nn.Module, used: Callable[[], None]) -> None:
        self._value, self._holder, self._used = value, holder, used

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return int

    def of_cache(self) -> tuple[nn.Module, int]:
        """The module whose attribute it is and the number, for a cache alone."""
        return self._holder, self._value


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
