"""Objects that a traced forward gets in place of caches of keys and values."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn


class Update(NamedTuple):
    """An update of a cache in a traced forward, from which the number of its keys follows.

    Attributes:
        cache: number of the cache among those of the call.
        holder: path of the module whose ``layer_idx`` is the layer; None if ``layer`` is.
        layer: of the cache.
        queries: how many keys are added, as an expression of the sizes ``s`` of the call.
        more: whether it is given more than keys and values, which it has to ignore.
    """

    cache: int
    holder: str | None
    layer: int
    queries: str
    more: bool


def ignores_more(cache: Any, layer: int) -> bool:
    """Whether a layer of a cache does nothing with what it is given besides keys and values.

    Models of transformers hand on what some caches need: positions in 5.0, all keywords since 5.24.
    """
    layers = getattr(cache, "layers", ())
    missing = getattr(cache, "layer_class_to_replicate", None)
    kind: Any = type(layers[layer]) if layer < len(layers) else missing
    base: Any = sys.modules["transformers.cache_utils"]
    hands_on = type(cache).update is base.Cache.update
    return hands_on and _reads_first_two(getattr(kind, "update", None))


@functools.cache
def _reads_first_two(method: Any) -> bool:
    """Whether a method names no other arguments in its code than the first two."""
    code = getattr(method, "__code__", None)
    if code is None or code.co_argcount < 3:  # of a wrapper, as it may be
        return False
    flags = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS
    count = code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & f) for f in flags)
    others = set(code.co_varnames[3:count])
    named = (instruction.argval for instruction in dis.get_instructions(code))
    # Some instructions name two variables.
    return all(others.isdisjoint(n if isinstance(n, tuple) else (n,)) for n in named)


class _Queries(int):
    """A number of queries; transformers 5.0 asks for that of a tensor of their positions."""

    @property
    def shape(self) -> tuple[int]:
        return (int(self),)


def cached_length(cache: Any, queries: int, layer: int) -> int:
    """How many keys a layer of a cache returns after an update by ``queries`` of them."""
    return int(cache.get_mask_sizes(_Queries(queries), layer)[0])


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
        more = any(leaf is not None for leaf in (*args, *kwargs.values()))
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
