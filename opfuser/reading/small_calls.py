"""Small calls in place of large ones: a reading computes with tensors of the sizes of its trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .call_key import call_key, constant_sizes, is_plain
from .dataflow import map_leaves

__all__ = ["small_call"]

# Sizes that are no number of heads, so that a forward does not name them by chance.
_UNUSUAL = 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61


def small_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call in which the sizes that may differ between calls are small.

    They are distinct, in the order of those of the given call, and equal to no size that may not
    differ. A trace of the small call holds for the given one if it takes that one's key, which has
    to be asked: a forward may decide by sizes. Calls with a cache are returned as they are, since
    the sizes of caches follow from others.

    Args:
        module: that is called.
        args: positional arguments; entries of their tensors do not matter.
        kwargs: keywords, likewise.

    Raises:
        KeptError: if an argument is of a type whose contents are not known.
    """
    constants = constant_sizes(module)
    key = call_key(module, args, kwargs, constants)
    if key.caches:
        return args, kwargs
    taken = constants.union(key.constants)
    free = (n for n in _UNUSUAL if n not in taken)
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
