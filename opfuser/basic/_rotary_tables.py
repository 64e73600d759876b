"""Tables of cosine and sine of rotary embeddings, kept from call to call."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.rope import Frequencies
from ..core.change_tracking import Note
from ..kernels.scalar import wide_dtype
from ..runtime.tracing import stands_in

# Kept of each kind, for different devices, dtypes and attributes: a base that changes at every step
# must not pile tables up.
_MAX_TABLES = 8


class Tables(NamedTuple):
    """Cosine and sine, each (positions, pairs), times the attention factor."""

    cos: Tensor
    sin: Tensor


class RotaryTables(Note):
    """Angles by device, dtype and all that they depend on.

    Attributes:
        tables: for as many positions as the longest sequence had.
        frequencies: angles between neighbouring positions.
        rows: which row of positions each pair turns by.
    """

    def __init__(self) -> None:
        self.tables: dict[Any, Tables] = {}
        self.frequencies: dict[Any, Tensor] = {}
        self.rows: dict[Any, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        tables = itertools.chain.from_iterable(self.tables.values())
        return [*tables, *self.frequencies.values(), *self.rows.values()]

    def of_sequence(self, x: Tensor, angles: Frequencies, count: int | None) -> Tables:
        """For the positions 0, 1, 2, … of x (batch, sequence, features), or for more.

        Args:
            count: of the positions, if tables have to be made; None is as many as x has.
        """
        key, lasting = (x.device, wide_dtype(x.dtype), angles), _is_lasting(x)
        table = self.tables.get(key) if lasting else None
        if table is None or table.cos.shape[0] < x.shape[1]:
            positions = torch.arange(count or x.shape[1], device=x.device)[:, None]
            table = _turns(positions, self._frequencies(x, angles), angles.attention_scaling)
            if lasting and _outlives_call(table.cos):
                _keep(self.tables, key, table)
        return table

    def of_positions(
        self, x: Tensor, positions: Tensor, angles: Frequencies, interleave: bool
    ) -> Tables:
        """For the tokens at ``positions``, which have a leading dimension if each has several.

        Args:
            interleave: sections.
        """
        positions = positions.to(x.device)
        if positions.dim() == 3:
            rows = self._rows(x, angles.sections or (), interleave)
            positions = positions.flatten(1).index_select(0, rows).t()
        else:
            positions = positions.reshape(-1, 1)
        return _turns(positions, self._frequencies(x, angles), angles.attention_scaling)

    def _frequencies(self, x: Tensor, angles: Frequencies) -> Tensor:
        dtype, lasting = wide_dtype(x.dtype), _is_lasting(x)
        key = x.device, dtype, angles
        kept = self.frequencies.get(key) if lasting else None
        if kept is None:
            if lasting and x.is_cuda:
                kept = angles.tensor_of_host(torch.empty((), dtype=dtype, device=x.device))
            else:
                kept = angles.tensor(x.device, dtype)
            if lasting and _outlives_call(kept):
                _keep(self.frequencies, key, kept)
        return kept

    def _rows(self, x: Tensor, sections: tuple[int, ...], interleave: bool) -> Tensor:
        key, lasting = (x.device, sections, interleave), _is_lasting(x)
        kept = self.rows.get(key) if lasting else None
        if kept is None:
            kept = torch.zeros(sum(sections), dtype=torch.int64, device=x.device)
            for row, pairs in enumerate(pairs_of_rows(sections, interleave)):
                kept[pairs.start : pairs.stop : pairs.step] = row
            if lasting and _outlives_call(kept):
                _keep(self.rows, key, kept)
        return kept


def pairs_of_rows(sections: tuple[int, ...], interleave: bool) -> list[range]:
    """The pairs that turn by each row of positions; by row 0 do all that no other row has."""
    if not interleave:
        ends = list(itertools.accumulate(sections))
        return [range(end - size, end) for end, size in zip(ends, sections)]
    count = len(sections)
    others = [range(row, count * sections[row], count) for row in range(1, count)]
    return [range(0), *others]


def _turns(positions: Tensor, frequencies: Tensor, factor: float) -> Tables:
    """For positions (tokens, pairs or 1)."""
    # Kernels take rows one behind another; those of sections lie in columns.
    angles = (positions.to(frequencies.dtype) * frequencies).contiguous()
    cos, sin = angles.cos(), angles.sin()
    return Tables(cos, sin) if factor == 1.0 else Tables(cos * factor, sin * factor)


def _is_lasting(x: Tensor) -> bool:
    """Whether what is made for x may be kept: not while tracing, and not for fake tensors."""
    return not stands_in(x)


def _outlives_call(made: Tensor) -> bool:
    """Whether later calls may read it: no fake tensor, and none that a graph's replay computes."""
    if type(made) is not Tensor:
        return False
    return not (made.is_cuda and torch.cuda.is_current_stream_capturing())


def _keep(tables: dict[Any, Any], key: Any, table: Any) -> None:
    """Keeps it, and forgets the one that was first made if there are too many."""
    if key not in tables and len(tables) >= _MAX_TABLES:
        tables.pop(next(iter(tables)), None)
    tables[key] = table
