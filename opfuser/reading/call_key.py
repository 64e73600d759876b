"""What has to be equal in two calls for one trace to hold for both, apart from what was read."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.context import any_autocast
from .captured_outputs import captured
from .dataflow import map_leaves
from .kept import KeptError, NotNowError
from .reads import is_scalar
from .stand_ins import is_cache

# Sizes that are no number of heads, so that a forward does not name them by chance.
_UNUSUAL = 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61


class CallKey(NamedTuple):
    """The facts of a call.

    Attributes:
        facts: equal in calls that one trace may hold for.
        sizes: those sizes of its inputs that may differ, in order of their first occurrence.
        constants: sizes that may not differ, those of parameters and buffers among them.
        caches: among its arguments, in order of their first occurrence.
    """

    facts: Hashable
    sizes: tuple[int, ...]
    constants: frozenset[int]
    caches: tuple[Any, ...]


def _constant_sizes(module: nn.Module) -> frozenset[int]:
    """The sizes of a module's parameters and buffers, which do not differ between calls."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(map(is_lazy, tensors)):
        raise NotNowError("has parameters that are not initialised")
    return frozenset((0, 1)).union(*(t.shape for t in tensors))


def call_key(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKey:
    """The key of a call in the current modes of training, gradients and autocast.

    Sizes of 0 and 1, those of parameters and buffers, and the last dimension of floating-point
    tensors of up to three dimensions (features) are part of the key. Of all others it has which of
    them are equal.

    Raises:
        KeptError: if an argument is of a type whose contents are not known.
    """
    found = _Leaves()
    structure = found.structure((args, kwargs))
    shapes = [(*t.shape,) for t in found.tensors]
    features = {
        shape[-1]
        for t, shape in zip(found.tensors, shapes)
        if 0 < len(shape) <= 3 and t.dtype.is_floating_point
    }
    fixed = _constant_sizes(module) | features
    numbers: dict[int, int] = {}  # of each size that may differ
    sizes = tuple(
        tuple([n if n in fixed else -1 - numbers.setdefault(n, len(numbers)) for n in shape])
        for shape in shapes
    )
    tensors = tuple([(type(t), t.dtype, t.device, t.requires_grad) for t in found.tensors])
    modes = module.training, torch.is_grad_enabled(), torch.get_default_dtype(), *autocast_dtypes()
    placed = tuple([(n, *_placed(t)) for n, t in enumerate(found.tensors) if not is_plain(t)])
    facts = modes, captured(), structure, tensors, sizes, placed
    return CallKey(facts, tuple(numbers), fixed, tuple(found.caches))


def small_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call in which the sizes that may differ between calls are small.

    They are distinct, in the order of those of the given call, and equal to no size that may not
    differ. A trace of the small call holds for the given one if it takes that one's key, which has
    to be asked: a forward may decide by sizes. Calls with a cache are returned as they are, since
    the sizes of caches follow from others.

    Raises:
        KeptError: if an argument is of a type whose contents are not known.
    """
    key = call_key(module, args, kwargs)
    if key.caches:
        return args, kwargs
    free = (n for n in _UNUSUAL if n not in key.constants)
    smaller = {n: min(n, small) for n, small in zip(sorted(key.sizes), free)}
    made: dict[int, Tensor] = {}

    def shrunk(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not is_plain(leaf):
            return leaf
        if id(leaf) not in made:
            shape = [smaller.get(n, n) for n in leaf.shape]
            small = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
            made[id(leaf)] = small.requires_grad_(leaf.requires_grad)
        return made[id(leaf)]

    return map_leaves(shrunk, args), map_leaves(shrunk, kwargs)


def autocast_dtypes() -> tuple[Any, ...]:
    """The kinds of devices that autocast is on for, with its dtype for each."""
    if not any_autocast():
        return ()
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda", "xpu", "mps")
        if torch.is_autocast_enabled(kind)
    )


class _Leaves:
    """The tensors and caches among arguments, each once, in order of their first occurrence."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.caches: list[Any] = []
        self._numbers: dict[int, int] = {}

    def structure(self, leaf: Any) -> Hashable:
        """What else there is: containers and scalars, with a number for each tensor and cache."""
        kind = type(leaf)
        if leaf is None:
            return None
        if isinstance(leaf, Tensor):
            return self._number(leaf, self.tensors)
        if kind is tuple or kind is list or hasattr(leaf, "_fields"):
            return kind, *map(self.structure, leaf)
        if kind is dict:
            return kind, *leaf, *map(self.structure, leaf.values())
        if is_scalar(leaf) or kind is torch.Size:  # 0.0 and -0.0 are equal, and nan is not
            return kind, repr(leaf) if kind in (float, complex) else leaf
        if is_cache(leaf):
            return kind, self._number(leaf, self.caches)
        raise KeptError(f"is given a {kind.__name__}")

    def _number(self, leaf: Any, known: list[Any]) -> int:
        number = self._numbers.setdefault(id(leaf), len(known))
        if number == len(known):
            known.append(leaf)
        return number


def _placed(t: Any) -> tuple[Hashable, ...]:
    if is_dtensor(t):
        return t.device_mesh, t.placements
    raise KeptError(f"is given a {type(t).__name__}")


def is_plain(t: Tensor) -> bool:
    """Whether a tensor is of no subclass that may compute something else."""
    return type(t) in (Tensor, nn.Parameter)


def is_dtensor(value: Any) -> bool:
    """Whether a value is a tensor that is distributed over a mesh."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(value, kind)
