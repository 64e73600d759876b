"""Whether a tensor may be written to: nobody else can see it.

What an operation is handed may be a caller's, or an intermediate result that the engine made and
that has served its purpose. The references to it tell: where the list that it came in holds the
only one, and it shares its memory with no other tensor, whatever is written there is seen by
nobody.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["only_memory", "only_reference"]


def _counts(holder: Sequence[Tensor | None], index: int) -> tuple[int, int, int]:
    """References to a tensor from Python, from C++ (autograd's), and to its memory."""
    tensor = holder[index]
    assert tensor is not None
    memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), memory  # type: ignore[attr-defined]


# The counts hold those of the counting itself, which differ between versions of Python.
_ALONE = _counts([torch.empty(1)], 0)


def only_reference(holder: Sequence[Tensor | None], index: int = 0) -> bool:
    """Whether ``holder[index]`` is referred to by ``holder`` alone, and owns its memory alone.

    Ask before taking the tensor out of ``holder``, whose own references do not count. While
    torch.compile traces the answer is no: what is traced is functional.
    """
    if torch.compiler.is_compiling() or holder[index] is None:
        return False
    try:
        return _counts(holder, index) == _ALONE
    except NotImplementedError:  # of a batched gradient, which has no memory of its own
        return False


def only_memory(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether ``tensor`` can be written to as it is, and no other one would change with it."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel():
        return False
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return False
    if torch._debug_has_internal_overlap(tensor) != 0:
        return False
    memory = tensor.untyped_storage().data_ptr()
    return all(other.untyped_storage().data_ptr() != memory for other in others)
