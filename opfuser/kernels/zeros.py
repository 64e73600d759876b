"""Numbers that begin at 0 and that a kernel raises, from memory that is filled for many at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..recording import seen_whole
from .launch import runs

__all__ = ["zero_for"]

_COUNT = 128
# In fp32. The address of each is a multiple of 16, which Triton tells apart from others.
_APART = 4

# By device and stream: the fill of one stream may not have happened yet for another.
_left: dict[tuple[torch.device, int], list[Tensor]] = {}


@seen_whole()
def zero_for(x: Tensor) -> Tensor:
    """0 in fp32, (1,), on the device of x: for one result of kernels that read x.

    A fill of its own takes a GPU a microsecond, and the host as long as any launch.
    """
    if not runs(x):
        return _zeros(x, 1)
    stream = 0
    if x.is_cuda:
        if torch._C._cuda_isCurrentStreamCapturing():  # a replay is to fill it again
            return _zeros(x, 1)
        stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    elif x.is_meta:  # who counts launches counts no fill
        return x.new_empty(1, dtype=torch.float32)
    left = _left.get((x.device, stream))
    if left:
        try:
            return left.pop()
        except IndexError:  # another thread took the last one
            pass
    made = _many(x)
    number = made.pop()
    if type(number) is Tensor:  # what a mode makes, such as tensors without values, is its own
        _left[x.device, stream] = made
    return number


def _zeros(x: Tensor, *size: int) -> Tensor:
    return x.new_zeros(size, dtype=torch.float32)


def _many(x: Tensor) -> list[Tensor]:
    with torch.inference_mode(False):  # calls outside of that mode save them, too
        # Views share a count of writes: what is saved of one would seem changed with another.
        return [number.data for number in _zeros(x, _COUNT, _APART)[:, :1].unbind(0)]
