"""Sequence-parallel products that overlap with their collective, for process groups that ask.

A linear operation with ``sequence_parallel`` multiplies what was gathered from all processes, or
scatters the sum of what it has multiplied. In pieces, the product of one can run while another is
on its way. ``choose("symm_mem", group)`` asks for that; providers are:

- ``"torch"``: one collective, one product; what every group has unless another is chosen;
- ``"symm_mem"``: ``fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter`` of torch, through
  symmetric memory of GPUs that reach each other's directly, as over NVLink;
- those that :func:`register` adds.

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models", ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from .providers import Providers
from .recording import assume, refuse_watching
from .torch_internals import symmetric_memory
from .tracing import stands_in

__all__ = ["Overlap", "choose", "chosen", "names", "register"]


class Overlap(NamedTuple):
    """Products with their collectives, by a library.

    Attributes:
        name: by which it is chosen.
        refuses: why it does not compute products of a tensor such as this one, or None; torch does
            then. It reads no value.
        gather_multiply: ``(x, w, group)`` to the x of all processes, one behind another, and the
            product of that with w. x is (M, K), contiguous, w (K, N) with any strides, and the
            results (M ranks, K) and (M ranks, N).
        multiply_scatter: ``(x, w, group)`` to this process' rows of the sum over processes of
            ``x w``, (M / ranks, N), for x (M, K), contiguous, with M a multiple of the ranks, and
            w (K, N) with any strides.
    """

    name: str
    refuses: Callable[[Tensor], str | None]
    gather_multiply: Callable[[Tensor, Tensor, dist.ProcessGroup], tuple[Tensor, Tensor]]
    multiply_scatter: Callable[[Tensor, Tensor, dist.ProcessGroup], Tensor]


_providers: Providers[Overlap] = Providers("provider")
_chosen: dict[str, Overlap] = {}  # by the name of a group


def names() -> list[str]:
    """Those that a group may choose."""
    return _providers.names()


def register(provider: Overlap) -> None:
    """Makes a provider known.

    Args:
        provider: with a name of its own.

    Raises:
        ArgumentError: there is one of that name.
    """
    _providers.add(provider, "async_tensor_parallel.register")


def choose(name: str, group: dist.ProcessGroup | None = None) -> None:
    """Has sequence-parallel linear operations over a group computed by a provider from now on.

    All processes of the group have to choose the same one. It is asked in both passes; where it
    refuses, and while torch.compile traces, the collective comes before or behind the product.

    Args:
        name: of the provider; ``"torch"`` takes the choice back.
        group: None is that of all processes.

    Raises:
        ArgumentError: there is no provider of that name.
    """
    provider = _providers.find(name, "async_tensor_parallel.choose")
    key = _whole(group).group_name
    _chosen.pop(key, None)
    if provider is not None:
        _chosen[key] = provider


def chosen(x: Tensor, group: dist.ProcessGroup | None) -> Overlap | None:
    """The provider for a product of ``x`` over a group; None is torch.

    Args:
        x: what is multiplied, before it is gathered.
        group: None is that of all processes.
    """
    assume(_is_any_chosen)
    if not _chosen or stands_in(x) or x.dim() < 2 or not x.numel():
        return None
    refuse_watching("products may overlap with their collectives")
    provider = _chosen.get(_whole(group).group_name)
    return None if provider is None or provider.refuses(x) is not None else provider


def _is_any_chosen() -> bool:
    return bool(_chosen)


def _whole(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        group = dist.group.WORLD
    assert group is not None
    return group


def gather_multiply(
    provider: Overlap, x: Tensor, w: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """X (S, ..., K) of all processes along its first dimension, and the product with w (K, N)."""
    rows, y = provider.gather_multiply(x.flatten(0, -2).contiguous(), w, _whole(group))
    return rows.view(-1, *x.shape[1:]), y.view(-1, *x.shape[1:-1], w.shape[1])


def multiply_scatter(
    provider: Overlap, x: Tensor, w: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """This process' part, along the first dimension, of the sum of x (S, ..., K) times w (K, N)."""
    y = provider.multiply_scatter(x.flatten(0, -2).contiguous(), w, _whole(group))
    return y.view(-1, *x.shape[1:-1], w.shape[1])


def _symm_mem_refuses(x: Tensor) -> str | None:
    if not x.is_cuda:
        return f"symmetric memory is that of GPUs, not of {x.device.type}"
    return None


def _symm_mem_gather_multiply(
    x: Tensor, w: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    # With return_A=False torch may take multicast, which is not there on all machines.
    fused = symmetric_memory().fused_all_gather_matmul
    rows, (y,) = fused(x, [w], 0, group.group_name, return_A=True)
    return rows, y


def _symm_mem_multiply_scatter(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
    fused = symmetric_memory().fused_matmul_reduce_scatter
    y: Tensor = fused(x, w, "sum", 0, group.group_name)
    return y


register(
    Overlap("symm_mem", _symm_mem_refuses, _symm_mem_gather_multiply, _symm_mem_multiply_scatter)
)
