"""Calls that convert a model, so that opfuser computes it: advice is tried before it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..errors import OpfuserError, TargetError, counted
from ..hf import apply
from ..integrations.conversion import from_torch
from ..sequential import Sequential
from .target import Target, moved, plans

_T = TypeVar("_T")


class Conversion(NamedTuple):
    """A call that converts a model.

    Attributes:
        call: as users write it.
        convert: returns a model that is converted so, or None if the call is for other models,
            given the inputs of a call. It shares parameters with the model, which does not change.
        only_for: names of the fused operations that need it; empty for any.
    """

    call: str
    convert: Callable[[nn.Module, tuple[Tensor, ...]], nn.Module | None]
    only_for: frozenset[str] = frozenset()

    def tried(self, target: Target, use: Callable[[Target], _T]) -> _T | None:
        """What ``use`` returns for the converted model; None if nothing is replaced, or it fails.

        The model is run on the meta device; where it reads values, on its own, as a copy.
        """
        found = self._tried(target, _on_meta, use)
        if isinstance(found, Exception):
            found = self._tried(target, _copied, use)
        return None if isinstance(found, Exception) else found

    def _tried(
        self, target: Target, twin: Callable[[Target], Target], use: Callable[[Target], _T]
    ) -> _T | Exception | None:
        try:
            with torch.random.fork_rng(devices=[]):
                there = twin(target)
                model = self.convert(there.model, there.inputs)
                return None if model is None else use(there._replace(model=model))
        except Exception as error:  # noqa: BLE001 - advice that fails is not given
            return error


def no_sequences(target: Target, otherwise: str = "") -> TargetError:
    """The error about a model that calls no Sequential, with the conversion that changes that."""
    return TargetError.explained(
        "The model holds no opfuser.Sequential that it calls",
        where=target.name,
        remedy=_remedy(target) + otherwise,
    )


def _remedy(target: Target) -> str:
    for conversion in CONVERSIONS:
        made = conversion.tried(target, lambda other: list(plans(other).values())) or []
        count = len(made)
        # One operation alone has nothing to fuse with.
        if any(len(plan.basic_ops) > 1 for plan in made):
            return (
                f"Convert it where it is built: with {conversion.call} it calls "
                f"{counted(count, 'Sequential')}"
            )
    return (
        "Neither opfuser.from_torch nor opfuser.hf.apply makes it call one. Write operations of "
        "its forward as an opfuser.Sequential: opfuser audit names those that would fuse"
    )


def _on_meta(target: Target) -> Target:
    meta = torch.device("meta")
    inputs = tuple(t.detach().to(meta).requires_grad_(t.requires_grad) for t in target.inputs)
    return target._replace(model=moved(target.model, meta, None), inputs=inputs)


def _copied(target: Target) -> Target:
    """With the same parameters, and buffers of its own."""
    kept = {id(p): p for p in target.model.parameters()}
    return target._replace(model=copy.deepcopy(target.model, kept))


def _from_torch(model: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module | None:
    if isinstance(model, Sequential):
        return None
    with suppress(OpfuserError):
        made = from_torch(model)
        # One operation alone has nothing to fuse with.
        if len(made) > 1 or any(isinstance(inner, Sequential) for inner in made):
            return made
    return None


def _applied(
    model: nn.Module, inputs: tuple[Tensor, ...], *, hugging_face: bool, fused_loss: bool = False
) -> nn.Module | None:
    of_transformers = (type(m).__module__.startswith("transformers.") for m in model.modules())
    if any(of_transformers) is not hugging_face:
        return None
    other: nn.Module = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    computed = apply(other, example=inputs, fused_loss=fused_loss).computed
    losses = ("CrossEntropy" in done.operations for done in computed)
    return other if any(losses) or not fused_loss else None


_LOSS = frozenset({"linear_cross_entropy"})
CONVERSIONS = (
    Conversion("opfuser.from_torch(model)", _from_torch),
    *(
        conversion
        for call, applied in (
            ("opfuser.hf.apply(model", partial(_applied, hugging_face=True)),
            ("opfuser.apply(model", partial(_applied, hugging_face=False)),
        )
        for conversion in (
            Conversion(f"{call})", applied),
            Conversion(f"{call}, fused_loss=True)", partial(applied, fused_loss=True), _LOSS),
        )
    ),
)
