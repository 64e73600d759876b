"""Parameters that are DTensors: within a call, operations compute with this rank's part of them.

The part takes the place of the parameter among those of its module for as long as the call lasts.
Autograd gets the gradient as a DTensor, placed as the parameter is. One node does that for all
parameters of a group, so that the gradients that have to be summed over the ranks, small ones of
norms, take one collective. Nothing is done in calls of modules that have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


class LocalPart(NamedTuple):
    """How an operation uses its part of a parameter that is a DTensor over one dimension of a mesh.

    A module states it by name in its attribute ``local_parts``.

    Attributes:
        sums: whether the ranks' gradients are to be summed. The parameter is replicated then, and
            each rank uses it for other rows, or for other heads.
        averages: whether the ranks' losses are those of batches of their own, of which the mean is
            meant. The gradient of a parameter that serves the tokens of all ranks is that of the
            sum of these losses: it is divided by their number.
        first_alone: whether the ranks but the first one compute with zeros in place of a replicated
            parameter, since what is computed is summed over the ranks.
    """

    sums: bool = False
    averages: bool = False
    first_alone: bool = False


def use_locally(module: Any, **parts: LocalPart) -> None:
    """Has operations compute with this rank's parts of parameters of ``module``, by name."""
    module.local_parts = parts


class LocalPlace(NamedTuple):
    """Where a parameter stands, and how it is used."""

    parameters: dict[str, nn.Parameter | None]
    name: str
    how: LocalPart


def local_places(slots: Sequence[tuple[nn.Module, str]]) -> list[LocalPlace]:
    """Places of parameters that modules declare in ``local_parts`` to be DTensors."""
    found = []
    for module, name in slots:
        how = module.__dict__.get("local_parts", {}).get(name)
        if how is not None:
            found.append(LocalPlace(module._parameters, name, how))
    return found


@contextmanager
def local_values(places: Sequence[LocalPlace]) -> Iterator[None]:
    """Within it, this rank's parts are in the places of the parameters, once for each parameter."""
    if not places:
        yield
        return
    given = [cast(nn.Parameter, place.parameters[place.name]) for place in places]
    once = {id(p): (p, place.how) for p, place in zip(given, places)}
    parts = _Parts.apply([how for _, how in once.values()], *[p for p, _ in once.values()])
    part_of = dict(zip(once, parts))
    for p, place in zip(given, places):
        place.parameters[place.name] = part_of[id(p)]
    try:
        yield
    finally:
        for p, place in zip(given, places):
            place.parameters[place.name] = p


class _Spec(NamedTuple):
    """What makes a gradient a DTensor like its parameter."""

    kind: Any
    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, grad: Tensor) -> Tensor:
        return cast(
            Tensor,
            self.kind.from_local(
                grad,
                self.mesh,
                self.placements,
                run_check=False,
                shape=self.shape,
                stride=self.stride,
            ),
        )


class _Parts(torch.autograd.Function):
    """This rank's parts of DTensors, as tensors of their own over the same memory."""

    @staticmethod
    def forward(ctx: Any, hows: list[LocalPart], *parameters: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.hows = hows
        ctx.specs = [
            _Spec(type(p), p.device_mesh, p.placements, p.shape, p.stride()) for p in parameters
        ]
        parts = tuple(_part(p, how) for p, how in zip(parameters, hows))
        ctx.mark_non_differentiable(
            *[part for p, part in zip(parameters, parts) if not p.requires_grad]
        )
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        summed = [n for n, how in enumerate(ctx.hows) if how.sums and grads[n] is not None]
        found = list(grads)
        for n, grad in zip(summed, _sums([(grads[n], ctx.specs[n].mesh) for n in summed])):
            found[n] = grad
        for n, whole in enumerate(found):
            if ctx.hows[n].averages and whole is not None:
                found[n] = whole / ctx.specs[n].mesh.size()
        return None, *(None if g is None else spec.of(g) for g, spec in zip(found, ctx.specs))


def _part(parameter: Any, how: LocalPart) -> Tensor:
    part: Tensor = parameter.to_local()  # without grad mode the very tensor that it holds
    if how.first_alone and dist.get_rank(parameter.device_mesh.get_group()):
        return torch.zeros_like(part)
    return part.view_as(part)


def _sums(grads: list[tuple[Any, Any]]) -> list[Tensor]:
    """The sums of gradients over the ranks of their meshes: a collective for each dtype."""
    alike: dict[Any, list[int]] = {}
    for n, (grad, mesh) in enumerate(grads):
        alike.setdefault((mesh, grad.dtype), []).append(n)
    out: list[Tensor] = [grad for grad, _ in grads]
    for (mesh, _), numbers in alike.items():
        flat = torch.cat([out[n].reshape(-1) for n in numbers])
        dist.all_reduce(flat, group=mesh.get_group())
        pieces = flat.split([out[n].numel() for n in numbers])
        for n, piece in zip(numbers, pieces):
            out[n] = piece.view(out[n].shape)
    return out
