"""Where calls compute quantised: the region that ``opfuser.autocast`` opens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch.distributed as dist

from ..core.recomputation import computed_again, in_backward, is_outside
from ..errors import ArgumentError, NotSupportedError, RecomputationError
from ..recipe import DelayedScaling, Recipe
from ..torch_internals import constant_result
from .checkpointed import forward_of, is_any_known, is_within_any, note_region
from .scale_updates import enter_region


class Region(NamedTuple):
    """What calls follow.

    Attributes:
        recipe: None where nothing is quantised.
        group: of the ranks that agree on the largest values, or None.
        kept: the weights that are quantised once, of ``keep_quantized_weights``, or None.
        quantizes: whether it has a recipe, or one around it has.
        opened_by: the part of a model that was being computed again when it was opened.
    """

    recipe: Recipe | None = None
    group: dist.ProcessGroup | None = None
    kept: dict[Any, Any] | None = None
    quantizes: bool = False
    opened_by: object = None


# On an H200, with 8192 tokens and delayed scaling, a SwiGLU block of 1024 features takes 3.5 ms, as
# the host needs that, and 1.6 ms in bf16; one of 2048 features takes 3.6 and 3.5 ms, and replayed
# 2.2 and 3.2 ms (benchmarks/results/h200/quantized.json).
DEFAULT_RECIPE = DelayedScaling(min_features=2048)

_NOWHERE = Region()
_region: ContextVar[Region] = ContextVar("opfuser_region", default=_NOWHERE)


class _OpenRegions:
    """What traced code reads, and is guarded by.

    Attributes:
        count: how many regions are open in the process that quantise, or are within one that does.
        changes: how often one was opened or left.
    """

    def __init__(self) -> None:
        self.count = self.changes = 0

    def note(self, more: int) -> None:
        self.count += more
        self.changes += 1


open_regions = _OpenRegions()


def _current() -> Region:
    """The region that the caller is in.

    What is computed again is in the region of its forward, whichever is open now around it, and in
    those that it opens itself.
    """
    found = _region.get()
    if is_outside() or (found is _NOWHERE and not is_any_known()):
        return found
    part = computed_again()
    if part is None or found.opened_by is part.key:
        return found
    forward = forward_of(part)
    return _NOWHERE if forward is None else forward.region


def _enter(region: Region, around: Region) -> Token[Region]:
    """Opens a region; what is computed again later finds that which was open before."""
    if is_outside():
        return _region.set(region)
    note_region(around)
    part = computed_again()
    return _region.set(region if part is None else region._replace(opened_by=part.key))


@constant_result
def refuse_to_trace(changes: int) -> bool:
    """Raises NotSupportedError in a region with a recipe; for code that torch.compile traces.

    Args:
        changes: of :data:`open_regions`. In a region without recipe that is within another one,
            code is traced that must not run again in the other.
    """
    recipe = active_recipe()
    if recipe is None:
        return True
    raise NotSupportedError.explained(
        "Quantised compute is not traced by torch.compile",
        received=type(recipe).__name__,
        remedy="Call the sequence as it is, with opfuser.replay, or leave the region",
    )


def region_with_recipe() -> tuple[Region, bool]:
    """The region of a call for which :func:`recipe_of_call` has found a recipe.

    And whether the call is part of what a checkpoint may compute again, or computes again.
    """
    if is_outside() or not is_any_known():
        return _region.get(), False
    return _current(), is_within_any()


def active_recipe() -> Recipe | None:
    """The recipe of the region that the caller is in."""
    return _current().recipe


def amax_group() -> dist.ProcessGroup | None:
    """The ranks that agree on the largest values in the region that the caller is in."""
    return _current().group


def recipe_of_call() -> Recipe | None:
    """The recipe of a call that begins; if it is computed again, that will follow it, too.

    Raises:
        RecomputationError: the call may be one that is computed again, of which nothing tells the
            first time, whose scales it is to have.
    """
    if is_outside():
        return _region.get().recipe
    region = _current()
    if region.recipe is None:
        return None
    if isinstance(region.recipe, DelayedScaling) and in_backward() and computed_again() is None:
        raise RecomputationError.explained(
            "What is computed again within backward has the scales of its forward",
            received=f"a call in backward with {type(region.recipe).__name__}, by no checkpoint"
            " that is known",
            remedy="Use torch.utils.checkpoint or an autograd.Function, or a recipe that keeps"
            " no scales",
        )
    note_region(region)
    return region.recipe


def kept_in_region() -> dict[Any, Any] | None:
    """The weights that are quantised once in the region that the caller is in."""
    return _current().kept


@contextmanager
def keeping(weights: dict[Any, Any]) -> Iterator[None]:
    """A region like that which the caller is in, where weights are quantised once.

    Args:
        weights: where they are kept.
    """
    around = _current()
    token = _enter(around._replace(kept=weights), around)
    try:
        yield
    finally:
        _region.reset(token)


def check_recipe(recipe: object, where: str) -> Recipe:
    """``recipe``, if it is one.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(recipe, Recipe) and type(recipe) is not Recipe:
        return recipe
    raise ArgumentError.explained(
        "A recipe is one of opfuser.recipe",
        where=where,
        received=repr(recipe),
        remedy="Pass opfuser.recipe.DelayedScaling(), for example",
    )


class autocast(ContextDecorator):  # noqa: N801 - as torch.autocast
    """A region in which linear operations compute in FP8.

    The gradients of what is computed inside are quantised as well, wherever backward is called. On
    opening the outermost region, the scales of delayed and predicted scaling follow what was seen
    since the last time. May be used as a decorator.

    Args:
        enabled: False is a region without quantised compute.
        calibrating: not supported.
        recipe: of :mod:`opfuser.recipe`; None is ``DelayedScaling(min_features=2048)``: smaller
            linear operations stay in high precision.
        amax_reduction_group: ranks that agree on the largest values of delayed and predicted
            scaling; None: each for itself.

    Raises:
        ArgumentError: ``recipe`` is none.
        NotSupportedError: ``calibrating`` is set.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None,
    ) -> None:
        if calibrating:
            raise NotSupportedError.explained(
                "Scales are taken from calls that compute quantised",
                where=type(self).__name__,
                received="calibrating=True",
                remedy="Run some calls with enabled=True",
            )
        if recipe is not None:
            check_recipe(recipe, type(self).__name__)
        self.recipe = (recipe or DEFAULT_RECIPE) if enabled else None
        self.group = amax_reduction_group if enabled else None
        self._open: list[tuple[Token[Region], bool]] = []

    def __enter__(self) -> autocast:
        recipe, group, around = self.recipe, self.group, _current()
        if recipe is not None:
            enter_region(recipe, group, outermost=not around.quantizes)
        quantizes = recipe is not None or around.quantizes
        token = _enter(Region(recipe, group, around.kept, quantizes), around)
        self._open.append((token, quantizes))
        if quantizes:
            open_regions.note(1)
        return self

    def __exit__(self, *_: object) -> None:
        token, quantizes = self._open.pop()
        if quantizes:
            open_regions.note(-1)
        _region.reset(token)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: dist.ProcessGroup | None = None,
) -> autocast:
    """:class:`autocast` with the names that Transformer Engine gave its arguments before.

    Args:
        enabled: as of :class:`autocast`.
        calibrating: as of :class:`autocast`.
        fp8_recipe: its ``recipe``.
        fp8_group: its ``amax_reduction_group``.

    Raises:
        ArgumentError: ``fp8_recipe`` is none.
        NotSupportedError: ``calibrating`` is set.
    """
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def region_of_call(recipe: Recipe) -> autocast:
    """The region of one call of a Sequential that has a recipe of its own."""
    return autocast(recipe=recipe, amax_reduction_group=amax_group())


@contextmanager
def region(recipe: Recipe, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A region that changes no scales on opening.

    Args:
        recipe: the recipe.
        group: of the ranks that agree; None: that of the region that the caller is in.
    """
    around = _current()
    own = around._replace(recipe=recipe, group=group or around.group, quantizes=True)
    token = _enter(own, around)
    try:
        yield
    finally:
        _region.reset(token)
