"""Whether a tensor may be overwritten, because nothing else reads it.

An operation receives tensors of the caller, or intermediate results of the engine that nothing
reads afterwards. Reference counts tell them apart: if the list in which a tensor was passed holds
the only reference to it, no other tensor shares its memory, and torch has allocated that memory,
overwriting it goes unseen.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import torch_internals as internals
from ..runtime.recording import watching
from ..runtime.tracing import functional
from ..torch_internals import storage_address, storage_use_count, use_count


def references(memories: Sequence[int]) -> list[int]:
    """The numbers of references to memory, given their addresses."""
    return list(map(storage_use_count, memories))


def _counts(holder: Sequence[Tensor | None], index: int) -> tuple[int, int, int, bool]:
    """Number of references to a tensor from Python, from C++ (autograd), and to its memory.

    And whether torch has allocated that memory: an array of numpy that a tensor was made of, or a
    mapped file, belongs to somebody whose references are not counted.
    """
    tensor = holder[index]
    assert tensor is not None
    storage = tensor.untyped_storage()
    references = sys.getrefcount(tensor), use_count(tensor)
    return *references, storage_use_count(storage_address(storage)), storage.resizable()


# Counting itself holds references, whose number differs between versions of Python.
_ALONE = _counts([torch.empty(1, device="cpu")], 0)
_VIEW = torch.empty(1, device="cpu").view(1)
_WITH_ONE_VIEW = _counts([_VIEW._base], 0)


def only_reference(holder: Sequence[Tensor | None], index: int = 0) -> bool:
    """Whether ``holder`` has the only reference to ``holder[index]``, which shares no memory.

    Call it before taking the tensor out of ``holder``; references to ``holder`` do not count. False
    while torch.compile traces: traced code is functional.
    """
    if holder[index] is None or functional():
        return False
    try:
        alone = _counts(holder, index) == _ALONE
    except NotImplementedError:  # a batched gradient has no memory of its own
        return False
    if alone and watching.watcher is not None:
        watching.watcher.note_reuse(holder[index])  # type: ignore[arg-type]
    return alone


def shares_nothing(view: Tensor) -> bool:
    """Whether nobody else has the memory of ``view``, nor the tensor that it is a view of.

    False also where that cannot be told.
    """
    base = [view._base]
    if base[0] is None:
        return False
    try:
        return _counts(base, 0) == _WITH_ONE_VIEW
    except NotImplementedError:  # as above
        return False


def is_batched(grad: Tensor | None) -> bool:
    """Whether ``grad`` is a batch of gradients: of torch.vmap, or of ``is_grads_batched``."""
    return grad is not None and (internals.is_batched(grad) or internals.is_legacy_batched(grad))


def any_overlap(tensors: Sequence[Tensor], memory: Sequence[int]) -> bool:
    """Whether any two may share bytes; ``memory`` tells their storages apart."""
    covered: dict[int, list[tuple[int, int]]] = {}
    for t, address in zip(tensors, memory):
        covered.setdefault(address, []).append(_extent(t))
    for extents in covered.values():
        last = 0
        for start, stop in sorted(extents):
            if start < last:
                return True
            last = max(last, stop)
    return False


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share bytes."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (a_start, a_stop), (b_start, b_stop) = _extent(a), _extent(b)
    return a_start < b_stop and b_start < a_stop


def _extent(t: Tensor) -> tuple[int, int]:
    """First and one past the last byte of its storage that ``t`` covers."""
    start = int(t.storage_offset()) * t.itemsize
    if not t.numel():
        return start, start
    if t.is_contiguous():
        return start, start + t.nbytes
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(t.shape, t.stride()))
    return start, start + (last + 1) * t.itemsize
