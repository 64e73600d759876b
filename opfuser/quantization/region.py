"""Where calls compute quantised: the region that ``opfuser.autocast`` opens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar, Token
from typing import NamedTuple

import torch.distributed as dist

from ..errors import ArgumentError, NotSupportedError, explain
from ..recipe import DelayedScaling, Recipe
from .state import enter_region, in_backward

__all__ = [
    "Region",
    "active_recipe",
    "amax_group",
    "autocast",
    "check_recipe",
    "fp8_autocast",
    "in_backward",
    "open_regions",
    "region",
    "region_of_call",
]


class Region(NamedTuple):
    """What calls follow.

    Attributes:
        recipe: None where nothing is quantised.
        group: of the ranks that agree on the largest values, or None.
    """

    recipe: Recipe | None
    group: dist.ProcessGroup | None


# On an H200, with 8192 tokens and delayed scaling, a SwiGLU block of 1024 features takes 3.5 ms, as
# the host needs that, and 1.6 ms in bf16; one of 2048 features takes 3.6 and 3.5 ms, and replayed
# 2.2 and 3.2 ms (benchmarks/results/h200/quantized.json).
DEFAULT_RECIPE = DelayedScaling(min_features=2048)

_NOWHERE = Region(None, None)
_region: ContextVar[Region] = ContextVar("opfuser_region", default=_NOWHERE)


class _OpenRegions:
    """How many regions are open in the process. Traced code reads it, and is guarded by it."""

    count = 0


open_regions = _OpenRegions()


def active_recipe() -> Recipe | None:
    """The recipe of the region that the caller is in."""
    return _region.get().recipe


def amax_group() -> dist.ProcessGroup | None:
    """The ranks that agree on the largest values in the region that the caller is in."""
    return _region.get().group


def check_recipe(recipe: object, where: str) -> Recipe:
    """``recipe``, if it is one.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(recipe, Recipe) and type(recipe) is not Recipe:
        return recipe
    raise ArgumentError(
        explain(
            "A recipe is one of opfuser.recipe",
            where=where,
            received=repr(recipe),
            remedy="Pass opfuser.recipe.DelayedScaling(), for example",
        )
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
            raise NotSupportedError(
                explain(
                    "Scales are taken from calls that compute quantised",
                    where=type(self).__name__,
                    received="calibrating=True",
                    remedy="Run some calls with enabled=True",
                )
            )
        if recipe is not None:
            check_recipe(recipe, type(self).__name__)
        self.region = Region(recipe or DEFAULT_RECIPE, amax_reduction_group)
        if not enabled:
            self.region = _NOWHERE
        self._tokens: list[Token[Region]] = []

    def __enter__(self) -> autocast:
        recipe, group = self.region
        if recipe is not None:
            enter_region(recipe, group, outermost=_region.get() is _NOWHERE)
        self._tokens.append(_region.set(self.region))
        open_regions.count += 1
        return self

    def __exit__(self, *_: object) -> None:
        open_regions.count -= 1
        _region.reset(self._tokens.pop())


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
    token = _region.set(Region(recipe, group or amax_group()))
    try:
        yield
    finally:
        _region.reset(token)
