"""What recorded passes that quantise take for granted, besides what plans are made for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor, nn

from ..recipe import Recipe
from .checkpointed import is_within_any
from .region import current_region
from .state import SettledScales, Stateful, settled_scales
from .watch import is_watched

__all__ = ["QuantizedCalls"]


class QuantizedCalls:
    """Whether calls with a recipe find around them what recorded ones have found.

    Recorded passes use scales that are there, and raise largest values. What makes, adapts or
    learns scales, what a checkpoint computes again or may, what quantises weights once for several
    calls, and what is watched is left to the program.

    Args:
        ops: whose GEMMs take quantised operands.
        recipe: of the calls.
    """

    def __init__(self, ops: Sequence[nn.Module], recipe: Recipe) -> None:
        self._ops = tuple(dict.fromkeys(ops))
        self._recipe = recipe if isinstance(recipe, Stateful) else None
        self._reduces = isinstance(recipe, Stateful) and recipe.reduce_amax
        self._settled: SettledScales | None = None

    @property
    def count(self) -> int:
        """How many :meth:`scales` were found last."""
        return 0 if self._settled is None else len(self._settled.tensors)

    def are_as_usual(self) -> bool:
        """Whether a forward pass may be recorded now."""
        self.scales()
        return self.facts() is not None and self.permit()

    def scales(self) -> tuple[Tensor, ...]:
        """The tensors that operations keep and change, as they are now."""
        if self._recipe is None:
            return ()
        settled = self._settled
        if settled is None or not settled.are_current():
            self._settled = settled = settled_scales(self._ops, self._recipe)
        return () if settled is None else settled.tensors

    def facts(self) -> Hashable:
        """What else of :meth:`scales`, as they were found last, decides; None: no pass is recorded.

        A backward pass is in no region, but in a process that may be watched.
        """
        if is_watched():
            return None
        if self._recipe is None:
            return ()
        return None if self._settled is None else self._settled.facts

    def permit(self) -> bool:
        """Whether the region of a forward pass leaves it alone, given :meth:`scales` of now."""
        region = current_region()
        if region.kept is not None:
            return False
        settled = self._settled
        if self._recipe is None:
            return True
        if settled is None or is_within_any():
            return False
        return not settled.states or settled.group is (region.group if self._reduces else None)
