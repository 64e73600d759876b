"""What a family of kernels is shipped for: calls in the sizes of real models, without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opfuser.kernels.pointwise_plain import ADD, BIAS, DROPOUT, Link


class Shipped(NamedTuple):
    """A call of a launcher, and the bytes that it may move."""

    call: Callable[[], object]
    traffic: int


class Family(dict[str, Shipped]):
    """The calls of a family by name."""

    def ship(
        self, name: str, passes: float, call: Callable[..., object], x: Tensor, **how: Any
    ) -> None:
        """``call(x, **how)``, which may move x so often."""
        self[name] = Shipped(partial(call, x, **how), round(passes * x.nbytes))


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operands(links: Sequence[Link], x: Tensor) -> list[Tensor | None]:
    """Of a chain; each has memory of its own: what is read twice comes from a GPU's cache."""
    made: dict[int, Callable[[], Tensor]] = {
        BIAS: lambda: torch.empty_like(x[0]),
        ADD: lambda: torch.empty_like(x),
        DROPOUT: lambda: empty(1, dtype=torch.int64),
    }
    return [made[link.kind]() if link.kind in made else None for link in links]
