"""A parameter and its master in fp32, and what else than its optimizer has written to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..errors import MasterWeightError
from ..quantization.weights import WeightFormat, check_scale, encode_weight
from ._whole_gradient import WholeGradient

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SAMPLED = 32
"""Elements of each larger tensor that are compared: this many, or up to twice as many."""
_COMPARED_AT_ONCE = ("cpu",)
"""Devices for which no host waits."""


class _StoresWeight(Protocol):
    """A linear operation, or the module around one."""

    weight: nn.Parameter
    _buffers: dict[str, Tensor | None]

    @property
    def weight_format(self) -> WeightFormat | None: ...

    def read_weight(self, dtype: torch.dtype | None = None) -> Tensor: ...

    def write_weight(self, values: Tensor) -> None: ...


@dataclass(eq=False)
class Pair:
    """A parameter and its master; autograd is off where it is used.

    Attributes:
        param: of the model.
        name: of the parameter, for errors.
        master: fp32; the parameter itself where that is not stored in less.
        linear: whose weight it is in FP8; None: it is no such weight.
        gradient: of the parameter.
        has_initial_value: whether the master is what the parameter was rounded from when it was
            made, which no first update has used yet.
        replaced: the ``grad`` of a parameter that is its own master, during a step that reads
            another one there.
    """

    param: nn.Parameter
    name: str
    master: Tensor
    linear: _StoresWeight | None
    gradient: WholeGradient
    has_initial_value: bool = False
    replaced: tuple[Tensor | None] | None = None

    def __post_init__(self) -> None:
        self.apart = self.master is not self.param
        self._is_sharded = hasattr(self.param, "to_local")

    def is_replaced(self) -> bool:
        """Whether the operation has another parameter by now."""
        return self.linear is not None and self.linear.weight is not self.param

    def values(self) -> Tensor:
        """Values of the parameter, in fp32."""
        if self.linear is None:
            return self.param.detach().float()
        return self.linear.read_weight(torch.float32)

    def read(self) -> None:
        """The master takes the value of the parameter."""
        self.has_initial_value = False
        self.master.copy_(self.values())

    def begin(self) -> None:
        """Has the first update begin with the value that the parameter has now.

        What that was rounded from is kept; to see whether it was waits for a GPU.
        """
        if not (self.has_initial_value and self.is_stored()):
            self.read()
        self.has_initial_value = False

    def store(self) -> None:
        """Rounds the master to the parameter."""
        self.has_initial_value = False
        if self.linear is not None:
            self.linear.write_weight(self.master)
        elif self.apart:
            self.param.copy_(self.master)

    def stored(self) -> tuple[Tensor, ...]:
        """The memory of the parameter on this rank: its values, or codes and their scale."""
        if self.linear is not None and self.linear.weight_format is not None:
            return self.param, check_scale(self.linear._buffers.get("weight_scale"), self.name)
        return (self._local(self.param),)

    def is_stored(self) -> bool:
        """Whether the parameter is the rounded master, whoever has written it. Waits for a GPU."""
        master = self.master.to(self.param.device)
        if self.linear is not None and self.linear.weight_format is not None:
            rounded: tuple[Tensor, ...] = encode_weight(master, self.linear.weight_format.recipe)
        else:
            rounded = (self._local(master.to(self.param.dtype)),)
        if all(map(_are_equal, rounded, self.stored())):
            return True
        # Scales that are made from codes once more may differ in their last bit.
        return self.linear is not None and _are_equal(self.values(), master)

    def mark(self) -> tuple[int, ...]:
        """Is another one after each write that counts versions, and after a move of the memory."""
        param = self.param
        if self.linear is None and not self._is_sharded:
            return param._version, 0, param.data_ptr()
        found = [n for t in self.stored() for n in (t._version, t.data_ptr())]
        return (param._version, *found)

    def take_gradient(self) -> None:
        """The master gets the gradient of the parameter, in its dtype."""
        grad = self.param.grad
        taken = self.gradient.take(self.master)
        if not self.apart and taken is not grad:
            self.replaced = (grad,)
        self.master.grad = taken

    def give_back(self) -> None:
        """The parameter gets back the ``grad`` that a step has replaced."""
        if self.replaced is not None:
            (self.param.grad,) = self.replaced
            self.replaced = None

    def _local(self, t: Tensor) -> Tensor:
        return t.to_local() if self._is_sharded else t  # type: ignore[attr-defined]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaNs too."""
    bits = _BITS[one.itemsize]
    return one.dtype == other.dtype and torch.equal(one.view(bits), other.view(bits))


class WriteDetector:
    """Notices that parameters were written to between two steps of their optimizer.

    Writes that count versions are noticed, and memory that was replaced, and without these what
    changes one of some elements of each parameter. It is no error if the parameter is the rounded
    master all the same. Those elements are compared on the device: on a GPU the host learns of it
    when it asks again, since it waits for nothing.
    """

    def __init__(self) -> None:
        self._marks: dict[Pair, tuple[int, ...] | None] = {}
        self._samples: list[_Sample] = []

    def note(self, pairs: Sequence[Pair], *, besides_others: bool = False) -> None:
        """Remembers parameters as they are now.

        Args:
            pairs: all that are compared from now on.
            besides_others: whether those that were noted before are compared too, as they were.
        """
        if besides_others:
            self._marks.update((pair, pair.mark()) for pair in pairs)
            self._samples += _samples(pairs)
            return
        marks: dict[Pair, tuple[int, ...] | None] = {pair: pair.mark() for pair in pairs}
        if _memory_of(marks) == _memory_of(self._marks):
            for sample in self._samples:
                sample.note()
        else:
            self.raise_what_was_found()
            self._samples = _samples(pairs)
        self._marks = marks

    def forget(self) -> None:
        """Whatever was written so far is no error."""
        self._marks, self._samples = {}, []

    def distrust(self, pairs: Iterable[Pair]) -> None:
        """Compares whole parameters with their masters at the next check."""
        self._marks, self._samples = dict.fromkeys(pairs), []

    def check(self, pairs: Iterable[Pair]) -> None:
        """Compares parameters with what was noted.

        Args:
            pairs: others are left out, and so are those that were not noted.

        Raises:
            MasterWeightError: one was written to.
        """
        self._marks = {pair: self._marks[pair] for pair in pairs if pair in self._marks}
        for pair, mark in self._marks.items():
            # torch's set_state_dict loads a model behind its optimizer: the same values once more.
            if pair.mark() != mark and not pair.is_stored():
                raise _written(pair)
        for sample in self._samples:
            for pair in sample.written():
                if pair in self._marks:
                    raise _written(pair, late=not sample.is_on_host)

    def raise_what_was_found(self) -> None:
        """Raises MasterWeightError if a check has found something since; waits for a GPU."""
        for sample in self._samples:
            for pair in sample.found_so_far():
                if pair in self._marks:
                    raise _written(pair, late=True)


def _memory_of(marks: dict[Pair, tuple[int, ...] | None]) -> list[tuple[Pair, tuple[int, ...]]]:
    return [(pair, (mark or ())[2::2]) for pair, mark in marks.items()]


def _written(pair: Pair, late: bool = False) -> MasterWeightError:
    received = f"{pair.name} of shape {tuple(pair.param.shape)}, which was written to since"
    remedy = "Call read_parameters(), or load the optimizer's state after that of the model"
    if late:
        received += ", and which a step has overwritten before the device told of it"
        remedy = "Write it again, and call read_parameters() before the next step"
    return MasterWeightError.explained(
        "Parameters with master weights are written to by their optimizer alone",
        where="MasterWeights",
        received=received,
        remedy=remedy,
    )


class _Sample:
    """Some elements of parameters, of one device and one number of bits."""

    def __init__(self, parts: list[tuple[Pair, Tensor]]) -> None:
        self._views = [_some_of(t) for _, t in parts]
        self._owners = [pair for (pair, _), view in zip(parts, self._views) for _ in view]
        self._noted = torch.cat(self._views)
        self.is_on_host = self._noted.device.type in _COMPARED_AT_ONCE
        self._found = torch.zeros_like(self._noted, dtype=torch.bool)
        self._told = torch.zeros(
            self._found.shape, dtype=torch.bool, device="cpu", pin_memory=self._noted.is_cuda
        )

    def note(self) -> None:
        # In the same memory, so that a recorded graph notes what it has written.
        torch.cat(self._views, out=self._noted)

    def written(self) -> list[Pair]:
        """Whose elements have changed; on a GPU, of which the host has learned by now."""
        if self.is_on_host:
            return self._of(torch.cat(self._views) != self._noted)
        if self._noted.is_cuda and torch.cuda.is_current_stream_capturing():
            return []
        found = self._of(self._told)
        self._found |= torch.cat(self._views) != self._noted
        self._told.copy_(self._found, non_blocking=True)
        return found

    def found_so_far(self) -> list[Pair]:
        """Whose elements have changed, of those that no error has told of; waits for a GPU."""
        return [] if self.is_on_host else self._of(self._found)

    def _of(self, found: Tensor) -> list[Pair]:
        if not found.any():
            return []
        return [pair for pair, is_found in zip(self._owners, found.tolist()) if is_found]


def _samples(pairs: Iterable[Pair]) -> list[_Sample]:
    kinds: dict[tuple[torch.device, int], list[tuple[Pair, Tensor]]] = {}
    for pair in pairs:
        for t in pair.stored():
            if t.numel():
                kinds.setdefault((t.device, t.itemsize), []).append((pair, t.detach()))
    return [_Sample(parts) for parts in kinds.values()]


def _some_of(t: Tensor) -> Tensor:
    """Bits of elements of ``t``, at most twice ``_SAMPLED``, as a view."""
    if t.is_contiguous():
        t = t.view(-1)
    while t.dim() > 1:
        t = t.diagonal()
    # An odd distance, so that they do not lie in one column.
    return t.view(_BITS[t.itemsize])[:: max(1, t.numel() // _SAMPLED) | 1]
