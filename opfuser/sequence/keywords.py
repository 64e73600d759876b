"""Keywords of operations in a Sequential: which group gets which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..attention.cache import PendingCache, pending_of
from ..core.op_base import BasicOperation, FusedOperation, FusibleOperation
from ..engine.autograd import Kwargs
from ..engine.plan import expand
from ..errors import OpKwargsError
from .groups import Group
from .module_sequence import ModuleSequence


def resolve_op_kwargs(
    sequence: ModuleSequence,
    groups: Sequence[Group],
    op_kwargs: Mapping[nn.Module | int, dict[str, Any]],
) -> tuple[list[Kwargs], list[PendingCache]]:
    """Returns the keywords of each group, and the caches among them, which are yet to store."""
    if type(op_kwargs) is not dict and not isinstance(op_kwargs, Mapping):
        raise OpKwargsError.explained("op_kwargs is a mapping", received=type(op_kwargs).__name__)
    given: dict[BasicOperation, dict[str, Any]] = {}
    caches: list[PendingCache] = []
    for key, kwargs in op_kwargs.items():
        op = key if isinstance(key, BasicOperation) else _op_of_key(sequence, key)
        is_mapping = type(kwargs) is dict or isinstance(kwargs, Mapping)  # type() is faster
        if not is_mapping or op in given:
            received = f"{type(kwargs).__name__} for {key!r}"
            if op in given:
                received = f"{key!r}, an operation that another key names too"
            raise OpKwargsError.explained(
                "op_kwargs holds one mapping per operation", received=received
            )
        op.check_keywords(kwargs)
        given[op] = own = dict(kwargs)
        if op.stores_last and own.get("cache") is not None:
            own["cache"] = pending_of(own["cache"], caches)
    out: list[Kwargs] = []
    reached: set[BasicOperation] = set()
    for group in groups:
        here: list[Any] = [given.get(op, {}) for op in group.ops]
        inside: Sequence[BasicOperation] = group.ops
        if isinstance(group.callee, ModuleSequence):
            inside = _operations(group.callee)
            here = [{op: given[op] for op in inside if op in given}]
        reached.update(inside)
        out.append(here if any(here) else None)
    lost = [type(op).__name__ for op in given if op not in reached]
    if lost:
        raise OpKwargsError.explained(
            "op_kwargs contains keys that are not in this Sequential",
            received=f"an operation of type {', '.join(lost)}",
            remedy="Use an operation, or an index, of this Sequential as the key",
        )
    return out, caches


def _op_of_key(sequence: ModuleSequence, key: nn.Module | int) -> BasicOperation:
    module = sequence[key] if isinstance(key, int) else key
    if isinstance(module, FusedOperation) and len(module.basic_ops) == 1:
        module = module.basic_ops[0]
    if not isinstance(module, BasicOperation):
        what = f"key {key!r}, which is {type(module).__name__}"
        if not isinstance(key, int):
            what = f"a key of type {type(module).__name__}"
        raise OpKwargsError.explained(
            "op_kwargs reach basic operations",
            received=what,
            remedy="Use the basic operation itself as the key",
        )
    return module


def _operations(seq: ModuleSequence) -> list[BasicOperation]:
    return [op for m in seq.modules() if isinstance(m, FusibleOperation) for op in expand(m)]
