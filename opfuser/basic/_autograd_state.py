"""What autograd tells of the backward pass under way: which one it is, where a gradient goes."""

from __future__ import annotations

import enum

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import torch_internals as internals

# In the thread-local state that autograd hands on to a backward pass, and so to those that start
# within it, on whatever threads they run: the number of the outermost one.
_OUTERMOST = "opfuser: outermost backward pass"

# For each parameter the backward pass, and the address of the buffer, in which its gradient was
# written last.
_written: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def note_forward() -> None:
    """Notes a forward, so that a backward pass is known as a part of the one that it ran in.

    A reentrant checkpoint recomputes the forward within a backward pass, and then starts another
    one, of which autograd does not tell where it belongs.
    """
    number = internals.numbered_graph_task()
    if number != -1 and not internals.has_stashed(_OUTERMOST):
        internals.stash(_OUTERMOST, number)  # until autograd's present node is done


def backward_pass() -> int | None:
    """The number of the backward pass under way, which differs from those of all others.

    None outside of one, and while torch.compile traces.
    """
    if torch.compiler.is_compiling():
        return None
    number = internals.numbered_graph_task()
    if number == -1:
        return None
    outermost: int = internals.stashed(_OUTERMOST) if internals.has_stashed(_OUTERMOST) else number
    return outermost


def current_node() -> object | None:
    """The node of autograd that runs.

    None outside of a backward pass, in compiled autograd, and while torch.compile traces.
    """
    return None if torch.compiler.is_compiling() else internals.current_node()


def is_first_write(param: Tensor, buffer: Tensor, number: int | None) -> bool:
    """Whether backward pass ``number`` has written nothing to ``buffer`` yet; notes that it does.

    Args:
        number: None is a pass of its own.
    """
    if number is None:
        return True
    write = number, buffer.data_ptr()
    if _written.get(param) == write:
        return False
    _written[param] = write
    return True


class Destination(enum.Enum):
    """Where the gradient of a weight goes in a backward pass."""

    ACCUMULATED = enum.auto()
    """To the weight, or to what it was computed from."""
    RETURNED = enum.auto()
    """To the caller of ``torch.autograd.grad``."""
    NOWHERE = enum.auto()


def destination(weight: Tensor) -> Destination:
    """Where the gradient of ``weight`` goes in the backward pass under way.

    Where autograd cannot be asked, it is taken to be accumulated: outside of a backward pass, in
    compiled autograd, while torch.compile traces.
    """
    if current_node() is None:
        return Destination.ACCUMULATED
    if not weight.requires_grad:  # frozen since
        return Destination.NOWHERE
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        runs = internals.will_execute(node)
    except RuntimeError:  # torch.autograd.grad captures what would be accumulated
        return Destination.RETURNED
    return Destination.ACCUMULATED if runs else Destination.NOWHERE
