"""What has to be equal in two calls for one trace to hold for both, apart from what was read."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .kept import KeptError
from .reads import is_scalar
from .stand_ins import is_cache

__all__ = ["CallKey", "call_key", "constant_sizes", "is_dtensor", "is_plain"]


class CallKey(NamedTuple):
    """The facts of a call.

    Attributes:
        facts: equal in calls that one trace may hold for.
        sizes: those sizes of its inputs that may differ, in order of their first occurrence.
        constants: sizes of its inputs that may not differ.
    """

    facts: Hashable
    sizes: tuple[int, ...]
    constants: tuple[int, ...]


def constant_sizes(module: nn.Module) -> frozenset[int]:
    """The sizes of a module's parameters and buffers, which do not differ between calls."""
    tensors = [*module.parameters(), *module.buffers()]
    return frozenset((0, 1)).union(*(t.shape for t in tensors))


def call_key(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    constants: frozenset[int],
) -> CallKey:
    """The key of a call in the current modes of training, gradients and autocast.

    Sizes of 0 and 1, those of parameters and buffers, and the last dimension of floating-point
    tensors of up to three dimensions (features) are part of the key. Of all others it has which of
    them are equal.

    Args:
        module: that is called.
        args: positional arguments of the call.
        kwargs: its keywords.
        constants: the :func:`constant_sizes` of ``module``.

    Raises:
        KeptError: if an argument is of a type whose contents are not known.
    """
    reader = _Reader(constants)
    tensors: list[Tensor] = []
    _gather(args, kwargs, tensors)
    features = {t.shape[-1] for t in tensors if 1 <= t.dim() <= 3 and t.dtype.is_floating_point}
    reader.constants = constants | features
    structure = reader.of((args, kwargs))
    modes = module.training, torch.is_grad_enabled(), torch.get_default_dtype(), *_autocast()
    return CallKey((modes, structure), tuple(reader.numbers), tuple(sorted(features)))


def _autocast() -> tuple[Any, ...]:
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda", "xpu", "mps")
        if torch.is_autocast_enabled(kind)
    )


class _Reader:
    """Describes the leaves of arguments."""

    def __init__(self, constants: frozenset[int]) -> None:
        self.constants = constants
        self.numbers: dict[int, int] = {}  # of each size that may differ
        self.tensors: dict[int, int] = {}

    def of(self, leaf: Any) -> Hashable:
        kind = type(leaf)
        if isinstance(leaf, Tensor):
            return self.of_tensor(leaf)
        if is_scalar(leaf):
            return kind, leaf
        if kind in (tuple, list, torch.Size) or hasattr(leaf, "_fields"):
            return kind, *map(self.of, leaf)
        if kind is dict:
            return kind, *((key, self.of(value)) for key, value in leaf.items())
        if kind is slice:
            return kind, *map(self.of, (leaf.start, leaf.stop, leaf.step))
        if is_cache(leaf):
            return kind, self.tensors.setdefault(id(leaf), len(self.tensors))
        raise KeptError(f"is given a {kind.__name__}")

    def of_tensor(self, t: Tensor) -> Hashable:
        number = self.tensors.setdefault(id(t), len(self.tensors))
        if not is_plain(t) and not is_dtensor(t):
            raise KeptError(f"is given a {type(t).__name__}")
        numbers, constants = self.numbers, self.constants
        sizes = tuple(
            n if n in constants else -1 - numbers.setdefault(n, len(numbers)) for n in t.shape
        )
        placed = _placed(t)
        return number, t.dtype, t.device, t.requires_grad, sizes, placed


def _placed(t: Any) -> Hashable:
    return (t.device_mesh, t.placements) if is_dtensor(t) else None


def _gather(args: Any, kwargs: Any, into: list[Tensor]) -> None:
    todo = [args, kwargs]
    while todo:
        leaf = todo.pop()
        if isinstance(leaf, Tensor):
            into.append(leaf)
        elif isinstance(leaf, (tuple, list)):
            todo.extend(leaf)
        elif isinstance(leaf, dict):
            todo.extend(leaf.values())


def is_plain(t: Tensor) -> bool:
    """Whether a tensor is of no subclass that may compute something else."""
    return type(t) in (Tensor, nn.Parameter)


def is_dtensor(value: Any) -> bool:
    """Whether a value is a tensor that is distributed over a mesh."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(value, kind)
