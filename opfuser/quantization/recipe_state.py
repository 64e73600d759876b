"""State that operations have before their first call: those that will compute as a recipe says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ..context import autocast_dtype
from ..fusion import Env
from ..op import BasicOperation, FusedOperation, FusibleOperation
from ..op.fusible import RESTORED_CHILDREN, RestoredChild
from ..op.kinds import is_built_in, must_be_called
from ..recipe import DelayedScaling, Recipe
from .region import active_recipe, check_recipe
from .state import ROLES, QuantizationState, make_state, restore_state
from .te_scales import te_scales
from .weights import recipe_of_new_weights


class Elsewhere:
    """Modules that compute those of a model in their stead; ``applying`` sets it."""

    operations: Callable[[nn.Module], Iterable[nn.Module]] = lambda model: ()


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
    for module in (model, *Elsewhere.operations(model)):
        for op, own in _operations(module, recipe, seen):
            if isinstance(own, DelayedScaling) and _follows(op, own):
                make_state(op, own)


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


def _init(op: FusibleOperation, recipe: Any) -> None:
    init_recipe_state(op, recipe)


def _leave_out(op: FusibleOperation) -> None:
    """A state without values goes; scales stay, as the operation may be taken back in."""
    state = op._modules.get("quantization")
    empty = isinstance(state, QuantizationState) and not any(map(state.knows, ROLES))
    if empty and isinstance(op, BasicOperation):
        op.reset_recipe_state()


def _adopt(op: FusibleOperation, state_dict: dict[str, Any], key: str, prefix: str) -> None:
    linear = [part for part in getattr(op, "basic_ops", (op,)) if part.takes_part_in_recipes]
    state_dict.update(te_scales(key, state_dict.pop(key), [prefix] * len(linear)))


RESTORED_CHILDREN["quantization"] = RestoredChild(restore_state, _adopt, _init, _leave_out)
