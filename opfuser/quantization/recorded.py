"""What recorded passes that quantize take for granted, besides what plans are made for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor, nn

from ..recipe import DelayedScaling, Recipe
from .operation_state import SettledScales, settled_scales
from .region import region_with_recipe
from .watch import is_watched


class QuantizedCalls:
    """Whether calls with a recipe find around them what recorded ones have found.

    Recorded passes use scales that are there, and raise largest values. What makes, adapts or
    learns scales, what a checkpoint computes again or may, what quantizes weights once for several
    calls, and what is watched is left to the program.

    Args:
        ops: whose GEMMs take quantized operands.
        recipe: of the calls.
    """

    def __init__(self, ops: Sequence[nn.Module], recipe: Recipe) -> None:
        self._ops = tuple(dict.fromkeys(ops))
        self._recipe = recipe if isinstance(recipe, DelayedScaling) else None
        self._settled: SettledScales | None = None

    def scales(self) -> tuple[Tensor, ...]:
        """The tensors that operations keep and change, as they are now."""
        if self._recipe is None:
            return ()
        settled = self._settled
        if settled is None or not settled.are_current():
            self._settled = settled = settled_scales(self._ops, self._recipe)
        return () if settled is None else settled.tensors

    def facts(self) -> Hashable:
        """What else of them decides, as :meth:`scales` has found them; None: no pass is recorded.

        A backward pass is in no region, but in a process that may be watched.
        """
        if is_watched():
            return None
        if self._recipe is None:
            return ()
        return None if self._settled is None else self._settled.facts

    def permit(self, facts: Hashable) -> bool:
        """Whether a forward pass finds these facts, and a region that leaves it alone."""
        region, repeats = region_with_recipe()
        if region.kept is not None or facts is None or is_watched():
            return False
        if self._recipe is None:
            return True
        settled, group = self._settled, region.group if self._recipe.reduce_amax else None
        if repeats or settled is None:
            return False
        return settled.facts == facts and settled.group is group

    def are_as_usual(self) -> bool:
        """Whether a forward pass may be recorded now."""
        self.scales()
        return self.permit(self.facts())

    @property
    def count(self) -> int:
        """How many :meth:`scales` were found last."""
        return 0 if self._settled is None else len(self._settled.tensors)
