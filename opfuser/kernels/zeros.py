"""Numbers that begin at 0 and that a kernel raises, from memory that is filled for many at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import torch_internals as internals
from ..runtime.recording import seen_whole
from .launch import runs

_COUNT = 128
# In fp32. The address of each is a multiple of 16, which Triton tells apart from others.
_APART = 4

# By device and stream: the fill of one stream may not have happened yet for another.
_left: dict[tuple[torch.device, int], list[Tensor]] = {}


def zeros_for(x: Tensor, count: int) -> list[Tensor]:
    """As many as ``count`` results of :func:`zero_for`, at little more than the price of one."""
    if not runs(x):
        return [_zeros(x, 1) for _ in range(count)]
    stream = 0
    if x.is_cuda:
        if internals.cuda_captures():  # a replay is to fill it again
            return [_zeros(x, 1) for _ in range(count)]
        stream = internals.cuda_stream(x.get_device())
    elif x.is_meta:  # who counts launches counts no fill
        return [x.new_empty(1, dtype=torch.float32) for _ in range(count)]
    found: list[Tensor] = []
    left = _left.get((x.device, stream))
    if left is not None:
        try:
            while len(found) < count:
                found.append(left.pop())
            return found
        except IndexError:  # none is left, as another thread may have taken the last one
            pass
    while len(found) < count:
        made = _many(x)
        wanted = count - len(found)
        found += made[:wanted]
        if type(made[0]) is Tensor:  # what a mode makes, such as tensors without values, is its own
            _left[x.device, stream] = made[wanted:]
    return found


@seen_whole(several=zeros_for)
def zero_for(x: Tensor) -> Tensor:
    """0 in fp32, (1,), on the device of x: for one result of kernels that read x.

    A fill of its own takes a GPU a microsecond, and the host as long as any launch.
    """
    return zeros_for(x, 1)[0]


def _zeros(x: Tensor, *size: int) -> Tensor:
    return x.new_zeros(size, dtype=torch.float32)


def _many(x: Tensor) -> list[Tensor]:
    with torch.inference_mode(False):  # calls outside of that mode save them, too
        # Views share a count of writes: what is saved of one would seem changed with another.
        return [number.data for number in _zeros(x, _COUNT, _APART)[:, :1].unbind(0)]
