"""Products of quantized operations, and the libraries that compute them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import ScalingType

from ..gemm.scaled import Accumulation
from ..gemm_providers import Gemm, GemmChoice, find
from ..recipe import Float8BlockScaling, Recipe
from .quantizers import has_hardware

_ROLES = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}


def _scaling(recipe: Recipe, product: str, role: str) -> ScalingType:
    if isinstance(recipe, Float8BlockScaling):
        of_wgrad = product == "wgrad" and recipe.wgrad_x_block_scaling_dim == 2
        squares = role == "weight" or (role == "input" and of_wgrad)
        return ScalingType.BlockWise128x128 if squares else ScalingType.BlockWise1x128
    if recipe.float8_per_tensor_scaling():
        return ScalingType.TensorWise
    if recipe.of_groups:
        return ScalingType.RowWise
    return ScalingType.BlockWise1x32 if recipe.mxfp8() else ScalingType.BlockWise1x16


def _gemm(
    recipe: Recipe,
    product: str,
    features: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Gemm:
    left, right = _ROLES[product]
    return Gemm(
        product,
        *features,
        (recipe.dtype(left), recipe.dtype(right)),
        (_scaling(recipe, product, left), _scaling(recipe, product, right)),
        dtype,
        recipe.splits(product),
        device,
        # A plan for tensors without values is that of a GPU.
        device.type == "meta" or has_hardware(device, recipe),
    )


def accumulation(
    recipe: Recipe,
    product: str,
    features: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Accumulation:
    """How a product is computed in a call.

    Args:
        recipe: of the call.
        product: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        features: of the weight, (N, K).
        dtype: of the result.
        device: of the operands.
    """
    provider = find(recipe.gemm)
    if provider is None:
        # The meta device counts as a GPU that has it, as it does in planning.
        hardware = device.type == "meta" or has_hardware(device, recipe)
        return Accumulation(dtype, recipe.splits(product), hardware)
    gemm = _gemm(recipe, product, features, dtype, device)
    taken = provider if provider.refuses(gemm) is None else None
    return Accumulation(dtype, gemm.split, gemm.hardware, taken)


def gemm_choices(
    recipe: Recipe,
    features: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> Iterator[GemmChoice]:
    """The libraries for an operation's products, where the recipe names others than torch.

    Args:
        recipe: of the call.
        features: of the weight, (N, K).
        dtypes: that the operation computes in, and of the gradient of its weight.
        device: of the operands.
    """
    provider = find(recipe.gemm)
    if provider is None:
        return
    for product in _ROLES:
        if getattr(recipe, product) == "fp8":
            gemm = _gemm(recipe, product, features, dtypes[product == "wgrad"], device)
            yield GemmChoice(product, provider.name, provider.refuses(gemm))
