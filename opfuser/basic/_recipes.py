"""What operations with GEMMs share about recipes of quantised compute."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..core.context import autocast_dtype
from ..core.fusion import Env, Refusal
from ..errors import ArgumentError
from ..gemm_providers import GemmChoice
from ..op import BasicOperation
from ..quantization.products import gemm_choices
from ..quantization.region import active_recipe, amax_group
from ..quantization.tensor_quantizer import TensorQuantizer
from ..quantization.weights import encoding_of
from ..recipe import Recipe


def check_own_recipe(recipe: object, where: str) -> None:
    """Raises ArgumentError for a ``recipe`` of an operation that is none it may have."""
    if recipe not in ("inherit", None):
        raise ArgumentError.explained(
            "The recipe of an operation is 'inherit' or None",
            where=where,
            received=repr(recipe),
            remedy="Give a recipe of its own to a Sequential, or open opfuser.autocast",
        )


def features_refusal(features: tuple[int, int], env: Env) -> Refusal | None:
    """Why a matrix (N, K) is not multiplied as the recipe of a call says, or None."""
    multiple = 1 if env.recipe is None else env.recipe.multiple
    if any(size % multiple or not size for size in features):
        return Refusal("SHAPE", f"its features, {features}, are no multiples of {multiple}")
    return None


def recipe_refusal(
    own: str | None,
    features: tuple[int, int],
    dtype: torch.dtype | None,
    env: Env,
    *,
    stored: bool = False,
    groups: bool = False,
) -> Refusal | None:
    """Why the GEMMs of an operation do not follow the recipe of a call, or None.

    Args:
        features: of the matrices (N, K) that this rank multiplies by.
        dtype: in which it computes without autocast; None where its weight was cleared, of which
            forward tells.
        stored: whether its weight is stored quantised, so that ``min_features`` does not count.
        groups: whether it multiplies groups of rows.
    """
    if own is None:
        return Refusal("NO_RECIPE", "its recipe is None")
    if env.recipe is not None and env.recipe.of_groups and not groups:
        return Refusal("NO_RECIPE", f"{type(env.recipe).__name__} is for groups of rows")
    refusal = features_refusal(features, env)
    if refusal is not None:
        return refusal
    fewest = 0 if env.recipe is None or stored else env.recipe.min_features
    if min(features) < fewest:
        return Refusal("SHAPE", f"its features, {features}, are below min_features = {fewest}")
    if (env.autocast_dtype or dtype) == torch.float64:
        return Refusal("DTYPE", "fp64 is not quantised")
    return None


def choices_of(
    env: Env, features: tuple[int, int], own: torch.dtype, *, into_main_grad: bool
) -> Iterable[GemmChoice]:
    """The libraries that compute the products of an operation in a call with a recipe.

    Args:
        features: of the matrices (N, K) that this rank multiplies by.
        into_main_grad: whether its gradient goes there, in fp32.
    """
    assert env.recipe is not None
    of_weight = torch.promote_types(own, torch.float32) if into_main_grad else own
    return gemm_choices(env.recipe, features, (env.autocast_dtype or own, of_weight), env.device)


def quantizer_of(
    op: BasicOperation, w: Tensor | None, mode: str, index: int, stored: Recipe | None = None
) -> TensorQuantizer | None:
    """How a linear operation quantises a tensor of a pass in the region of the caller, or None.

    Args:
        w: its weight, or the first one; None where it was cleared.
        stored: the recipe by which its weight is stored.
    """
    recipe = active_recipe()
    if recipe is None or w is None:
        return None
    env = Env(w.device, w.dtype, autocast_dtype=autocast_dtype(w.device), recipe=recipe)
    if op.quantized_refusal(env) is not None:
        return None
    role = "grad_output" if mode == "backward" else ("input", "weight")[index]
    if role == "weight" and stored is not None:
        recipe = encoding_of(stored)
    return TensorQuantizer(op, recipe, amax_group(), role)
