"""State that operations have before their first call: those that will compute as a recipe says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import nn

from ..core.context import autocast_dtype
from ..core.fusion import Env
from ..core.op_base import BasicOperation, FusedOperation, FusibleOperation
from ..core.op_base.kinds import is_built_in, must_be_called
from ..errors import ArgumentError
from ..recipe import DelayedScaling, Recipe
from .operation_state import make_state
from .region import active_recipe, check_recipe
from .te_scales import te_scales
from .weights import recipe_of_new_weights

# Where a module keeps what computes its calls in its stead.
COMPUTED_BY = "_opfuser_applied"


class ComputedBy(Protocol):
    """What stands in the ``__dict__`` of a module whose calls something else computes."""

    def sequences(self) -> Iterable[nn.Module] | None:
        """The modules that compute its calls; None if there was none yet."""


def init_recipe_state(model: nn.Module, recipe: Recipe) -> None:
    """Creates the scales that a model keeps for a recipe, before any call.

    Those of ``DelayedScaling`` and ``Float8PredictedScaling`` are scales, a history of the largest
    values, and those of the last call. ``state_dict()`` has them then, so that
    ``torch.distributed.checkpoint`` finds a place for what a checkpoint has: it reads what the
    model asks for, and nothing else. Otherwise an operation has them from its first call on; or
    from its construction, if that happens within :class:`opfuser.autocast` or
    :func:`opfuser.quantized_model_init`, or once it is in a ``Sequential`` with a recipe.

    Operations that have state keep it. Those that do not compute quantised with the recipe, as
    their plans say, get none; a ``Sequential`` with a recipe of its own follows that. The first
    call takes its scales from its values, as without.

    Of a model to which :func:`opfuser.apply` was applied these are the operations that compute the
    calls that there were, and the modules whose weights they read have their state.

    Args:
        model: a module that holds operations, or one.
        recipe: that calls will have, of :mod:`opfuser.recipe`. Others keep nothing.

    Raises:
        ArgumentError: ``recipe`` is none; the model was not called since :func:`opfuser.apply`.
    """
    check_recipe(recipe, "init_recipe_state")
    seen: set[nn.Module] = set()
    for module in (model, *_computing(model)):
        for op, own in _operations(module, recipe, seen):
            if isinstance(own, DelayedScaling) and _follows(op, own):
                make_state(op, own)


def _computing(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that compute calls of those of a model in their stead."""
    states: list[ComputedBy] = [
        state
        for module in model.modules()
        if (state := module.__dict__.get(COMPUTED_BY)) is not None
    ]
    found = [state.sequences() for state in states]
    if found and all(sequences is None for sequences in found):
        raise ArgumentError.explained(
            "Which linear operations compute a model is known once it was called",
            where="init_recipe_state",
            received=f"a {type(model).__name__} that was not called since opfuser.apply",
            remedy="Pass an example to apply, or call the model once",
        )
    for sequences in found:
        yield from sequences or ()


def init_new_operation(op: BasicOperation) -> None:
    """At the end of a constructor: as the region says in which it was called."""
    recipe = active_recipe() or recipe_of_new_weights()
    if isinstance(recipe, DelayedScaling) and _follows(op, recipe):
        make_state(op, recipe)


def _operations(
    module: nn.Module, recipe: Recipe, seen: set[nn.Module]
) -> Iterator[tuple[BasicOperation, Recipe]]:
    """The basic operations inside, each with the recipe that its calls will have."""
    if module in seen:
        return
    seen.add(module)
    own = getattr(module, "recipe", None)
    recipe = own if isinstance(own, Recipe) else recipe
    if isinstance(module, BasicOperation):
        yield module, recipe
    elif isinstance(module, FusedOperation) and must_be_called(module) != "FORWARD":
        for op in module.basic_ops:
            yield op, recipe
    for child in module.children():
        yield from _operations(child, recipe, seen)


def _follows(op: BasicOperation, recipe: Recipe) -> bool:
    """Whether calls of an operation with a recipe round anything."""
    parameter = next(op.parameters(), None)
    if not (op.takes_part_in_recipes and is_built_in(op)) or parameter is None:
        return False
    device = parameter.device
    env = Env(device, parameter.dtype, autocast_dtype=autocast_dtype(device), recipe=recipe)
    rounds = "fp8" in (recipe.fprop, recipe.dgrad, recipe.wgrad)
    return rounds and op.quantized_refusal(env) is None


def adopt_te_scales(
    op: FusibleOperation, state_dict: dict[str, Any], key: str, prefix: str
) -> None:
    """Replaces what te.ops has pickled of an operation by the scales that it holds.

    Args:
        op: the operation.
        state_dict: which has it.
        key: of what te.ops has pickled.
        prefix: of the keys of the scales.
    """
    linear = [part for part in getattr(op, "basic_ops", (op,)) if part.takes_part_in_recipes]
    state_dict.update(te_scales(key, state_dict.pop(key), [prefix] * len(linear)))
