"""What rounding to FP8 does to the tensors of a run: for whoever looks for where it diverges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.microscaling_plain import FP4, values_of
from ..kernels.quantize import Codes, amax_of, largest
from ..runtime.recording import is_recording
from .operation_state import state_place


class QuantizationRecord(NamedTuple):
    """What quantization did to one tensor: its range, and how many elements were lost.

    Attributes:
        operation: its path in the model that is watched; else its type and sizes.
        role: ``"input"``, ``"weight"`` or ``"grad_output"``.
        dtype: of the codes.
        amax: its largest absolute value; NaN if it holds one.
        scale: what it was multiplied by; None where blocks have scales of their own.
        limit: the largest value that fits: ``largest / scale``; None as for ``scale``.
        saturated: elements that were cut off because they round to more than ``limit``.
        underflowed: elements that became 0 and were not.
        elements: how many there are.
    """

    operation: str
    role: str
    dtype: torch.dtype
    amax: float
    scale: float | None
    limit: float | None
    saturated: int
    underflowed: int
    elements: int

    def __str__(self) -> str:
        fits = "scales of blocks" if self.limit is None else f"{self.limit:.3g} fits"
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.operation} {self.role} ({name}): amax {self.amax:.3g}, {fits};"
            f" of {self.elements}: {self.saturated} saturated, {self.underflowed} underflowed"
        )


class _Watch(NamedTuple):
    names: dict[int, str]
    callback: Callable[[QuantizationRecord], object]


# Not of a context: autograd runs backward passes in threads of its own.
_watches: list[_Watch] = []


def is_watched() -> bool:
    """Whether somebody wants to be told of quantised tensors."""
    return bool(_watches)


@contextmanager
def watch_quantization(
    model: nn.Module | None = None,
    callback: Callable[[QuantizationRecord], object] | None = None,
) -> Iterator[list[QuantizationRecord]]:
    """Collects a :class:`QuantizationRecord` for every tensor that is quantized within a block.

        with opfuser.watch_quantization(model) as tensors:
            with opfuser.autocast(recipe=recipe):
                loss = model(x)
            loss.backward()
        for tensor in sorted(tensors, key=lambda t: t.saturated / t.elements):
            print(tensor)

    A tensor is told again where it is quantised again: a weight in backward. A weight that is
    stored in FP8 is not quantised, and not told. Operations hand on tensors instead of codes, which
    are rounded twice, as without fusions. Costs several passes over each tensor, waits for the
    device, and replays no call. Applies to the whole process; outside of it nothing is counted.

    Args:
        model: tells the operations' names.
        callback: is called with each record instead of collecting it. What it raises, the call or
            backward pass raises.

    Yields:
        The list of records, in the order of execution; empty with a callback.
    """
    records: list[QuantizationRecord] = []
    names = {} if model is None else {id(m): name for name, m in model.named_modules()}
    watch = _Watch(names, callback or records.append)
    _watches.append(watch)
    try:
        yield records
    finally:
        _watches[:] = [other for other in _watches if other is not watch]


def tell(op: nn.Module, role: str, x: Tensor, codes: Codes, elements: int) -> None:
    """Tells all that watch of a matrix that was quantised.

    Args:
        op: that computes with it.
        role: its role there.
        x: (R, C).
        codes: of x.
        elements: of x, but for zeros that were put there.
    """
    if is_recording():  # of a graph, which cannot wait for values
        return
    dtype, scale, *numbers = _measured(x.detach(), codes)
    limit = None if scale is None else largest(dtype) / scale if scale else math.inf
    amax, saturated, underflowed = numbers
    owner = state_place(op)[0]  # stands in the model for the operation
    for watch in _watches:
        name = watch.names.get(id(op)) or watch.names.get(id(owner))
        name = name or f"{type(op).__name__}({op.extra_repr()})"
        counts = int(saturated), int(underflowed), elements
        watch.callback(QuantizationRecord(name, role, dtype, amax, scale, limit, *counts))


def _measured(x: Tensor, codes: Codes) -> tuple[torch.dtype, float | None, float, float, float]:
    """Dtype, scale, amax, and how many elements were saturated and underflowed."""
    by_rows = codes.rows is not None
    encoded, inverse = (codes.rows, codes.row_scale) if by_rows else (codes.cols, codes.col_scale)
    assert encoded is not None
    assert inverse is not None
    zeros = _are_zero(encoded)
    underflowed = (zeros if by_rows else zeros.t())[: len(x)] & (x != 0)
    # Blocks have more scales, even the smallest ones; each fits its own values.
    has_one = inverse.numel() == 1
    saturated, scale = torch.zeros_like(underflowed), x.new_ones(1, dtype=torch.float32)
    if has_one:
        top = largest(encoded.dtype)
        half_step = 2.0 ** math.floor(math.log2(top)) * torch.finfo(encoded.dtype).eps / 2
        saturated = x.to(torch.float32).abs() / inverse > top + half_step
        scale = inverse.reciprocal()
    sums = torch.stack([saturated.sum(), underflowed.sum()]).to(torch.float64)
    values = torch.cat([scale.to(torch.float64), amax_of(x).to(torch.float64), sums]).tolist()
    used, amax, *counts = values
    return encoded.dtype, used if has_one else None, amax, *counts


def _are_zero(codes: Tensor) -> Tensor:
    """Which codes stand for 0."""
    if codes.dtype == FP4:
        return values_of(codes) == 0
    return (codes.view(torch.uint8) & 0x7F) == 0
