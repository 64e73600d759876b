"""Weights that are stored in FP8 alone: codes of one byte and their scales.

A weight (N, K) is a parameter of dtype ``torch.float8_e4m3fn``, its codes by rows; its operation
has a buffer ``weight_scale`` beside it, fp32, that the codes are multiplied by: (1,), or for
``Float8BlockScaling`` one for each 128 x 128 square, (N / 128, up4(K / 128)), up4 being the next
multiple of 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, NotSupportedError
from ..kernels.launch import FP8
from ..kernels.quantize import (
    BLOCK,
    Codes,
    MeasuredScaling,
    amax_of,
    in_fours,
    quantize,
    quantize_by_squares,
    transpose_codes,
)
from ..recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from .region import check_recipe


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype hold codes."""
    return dtype in FP8


class WeightFormat(NamedTuple):
    """How an operation stores its weight in FP8.

    Attributes:
        recipe: what scales it has.
        dtype: in which the operation computes elsewhere, and of the weight's gradient.
        keeps_initial_value: whether initial values are kept in high precision.
    """

    recipe: Recipe
    dtype: torch.dtype
    keeps_initial_value: bool = False


def stored_in(stored: WeightFormat | None) -> str:
    """What representations of operations say of it."""
    return "" if stored is None else f", weight in {stored.recipe.dtype('weight')}"


class _Init(NamedTuple):
    recipe: Recipe
    keeps_initial_value: bool


_init: ContextVar[_Init | None] = ContextVar("opfuser_weight_init", default=None)


@contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """A region in which linear operations are constructed with weights stored only in FP8.

    A weight takes one byte per element, and one scale, or one per 128 x 128 block. There is no copy
    in high precision: :class:`opfuser.optim.MasterWeights` trains such weights. Operations whose
    features are not multiples of what the recipe requires, or that compute in fp64, keep their
    weights in high precision, and so does ``GroupedLinear``. Within a recipe's region, forward
    reads the codes; elsewhere it dequantizes them.

    Args:
        enabled: False has no effect.
        recipe: of :mod:`opfuser.recipe`; None means ``DelayedScaling()``. With
            ``Float8BlockScaling`` blocks have scales, with other recipes whole weights; they always
            come from the weight itself.
        preserve_high_precision_init_val: keep initial values in host memory:
            ``weight.get_high_precision_init_val()`` returns them,
            ``weight.clear_high_precision_init_val()`` frees them.

    Raises:
        ArgumentError: ``recipe`` is not a recipe.
        NotSupportedError: ``recipe`` is that of MXFP8 or NVFP4, and ``enabled`` is set: there,
            codes by rows and by columns are rounded separately, or to 4 bits.
    """
    recipe = DelayedScaling() if recipe is None else check_recipe(recipe, "quantized_model_init")
    if enabled and not _has_large_blocks(recipe):
        raise NotSupportedError.explained(
            "Weights are stored with one scale, or with one for each 128 x 128",
            where="quantized_model_init",
            received=type(recipe).__name__,
            remedy="Store them in high precision, or with Float8CurrentScaling",
        )
    init = _Init(recipe, preserve_high_precision_init_val)
    token = _init.set(init if enabled else None)
    try:
        yield
    finally:
        _init.reset(token)


fp8_model_init = quantized_model_init


def _has_large_blocks(recipe: Recipe) -> bool:
    return recipe.float8_per_tensor_scaling() or recipe.float8_block_scaling()


def layout_refusal(stored: WeightFormat, recipe: Recipe) -> str | None:
    """Why GEMMs of a recipe do not take a weight as it is stored; None: they do."""
    if not _has_large_blocks(recipe):
        return f"no weight is stored in blocks of {recipe.operands}"
    if recipe.float8_block_scaling():  # one scale stands for all squares
        return None
    if stored.recipe.float8_block_scaling():
        return "its weight has a scale for each square, not a single one"
    return None


def format_of_new_weight(rows: int, cols: int, dtype: torch.dtype) -> WeightFormat | None:
    """How a weight that is made now is stored; None: in ``dtype``."""
    init = _init.get()
    if init is None or dtype == torch.float64 or not rows or not cols:
        return None
    if rows % init.recipe.multiple or cols % init.recipe.multiple:
        return None
    return WeightFormat(init.recipe, dtype, init.keeps_initial_value)


def recipe_of_new_weights() -> Recipe | None:
    """The recipe of the enclosing :func:`quantized_model_init`."""
    init = _init.get()
    return None if init is None else init.recipe


def empty_codes_of_weight(
    rows: int, cols: int, stored: WeightFormat, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """Memory for the codes of a weight, and for its scale, which is 1."""
    codes = torch.empty(rows, cols, dtype=stored.recipe.dtype("weight"), device=device)
    shape = (1,)
    if isinstance(stored.recipe, Float8BlockScaling):
        shape = rows // BLOCK, -(-cols // (4 * BLOCK)) * 4  # type: ignore[assignment]
    return codes, torch.ones(shape, device=device, dtype=torch.float32)


def encoding_of(recipe: Recipe) -> Float8BlockScaling | Float8CurrentScaling:
    """The recipe by which weights are stored: their scales come from their values."""
    if isinstance(recipe, (Float8BlockScaling, Float8CurrentScaling)):
        return recipe
    return Float8CurrentScaling(fp8_format=recipe.fp8_format)


def encode_weight(w: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Codes (N, K) and what they are to be multiplied by, from a weight in high precision."""
    dtype, count, encoding = recipe.dtype("weight"), w.shape[0], encoding_of(recipe)
    how = encoding.fp8_quant_fwd_weight
    powers, epsilon = how.power_2_scale, how.amax_epsilon
    if isinstance(encoding, Float8BlockScaling):
        made = quantize_by_squares(w, dtype, rows=True, cols=False, power_of_two=powers)
    else:
        amax = amax_of(w)
        amax = amax.clamp_min(epsilon) if epsilon else amax
        made = quantize(w, MeasuredScaling(amax, dtype, powers), rows=True, cols=False)
    codes, inverse = made.rows, made.row_scale
    assert codes is not None
    assert inverse is not None
    # A slice would hold the memory of its padding.
    return codes if codes.shape[0] == count else codes[:count].clone(), inverse


def decode_weight(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes (N, K), rounded once."""
    values = codes.to(dtype)  # exact: each dtype that is wider has all codes
    if scale.dim() == 1:
        return values.mul_(scale)
    squares = values.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    squares.mul_(scale[:, None, : squares.shape[2], None])
    return values


def weight_codes(codes: Tensor, scale: Tensor, recipe: Recipe, *, rows: bool, cols: bool) -> Codes:
    """Codes of a weight as GEMMs take them, none of which is rounded again.

    Args:
        codes: (N, K).
        scale: of a weight in FP8; that of a whole weight stands for all of its squares.
        recipe: of the call.
        rows, cols: which layouts are wanted.
    """
    row_scale = col_scale = scale
    if isinstance(recipe, Float8BlockScaling):
        down, across = (size // BLOCK for size in codes.shape)
        if scale.dim() == 1:
            scale = scale.expand(down, across)
            row_scale = in_fours(scale)
        col_scale = in_fours(scale[:, :across].t()) if cols else scale
    by_cols = transpose_codes(codes) if cols else None
    return Codes(
        codes if rows else None,
        row_scale if rows else None,
        by_cols,
        col_scale if cols else None,
        None,
    )


def keeping_codes(
    fn: Callable[[Tensor], Tensor], kept: tuple[Tensor | None, ...]
) -> Callable[[Tensor], Tensor]:
    """``fn`` as ``nn.Module._apply`` takes it, moving ``kept`` but casting none of them.

    Functions such as that of ``.to(torch.bfloat16)`` cast what is of a floating dtype: they see the
    same bits as integers.
    """
    own = {id(t) for t in kept if t is not None}

    def moved(t: Tensor) -> Tensor:
        if id(t) not in own:
            return fn(t)
        bits = torch.uint8 if t.dtype.itemsize == 1 else torch.int32
        out = fn(t.view(bits))
        if out.dtype != bits:  # that of .type() casts integers too
            return t.to(out.device)
        return out.view(t.dtype)

    return moved


class _InitialValue:
    """The initial value of a parameter, as methods of the parameter give it."""

    def __init__(self, value: Tensor | None) -> None:
        self.value = value

    def get(self) -> Tensor | None:
        """The value; None once it was cleared."""
        return self.value

    def clear(self) -> None:
        """Frees the value."""
        self.value = None


def keep_initial_value(value: Tensor | None, *weights: nn.Parameter) -> None:
    """Hands a value to ``get_high_precision_init_val`` of parameters; None takes it away.

    There is no value on the meta device.
    """
    if value is not None:
        value = None if value.is_meta else value.detach().to("cpu", copy=True)
    initial = _InitialValue(value)
    for weight in weights:
        own: Any = weight
        own.get_high_precision_init_val = initial.get
        own.clear_high_precision_init_val = initial.clear


def take_initial_value(weight: Tensor) -> Tensor | None:
    """The value that was kept, which is then cleared; None if there is none."""
    own: Any = weight
    if not hasattr(weight, "get_high_precision_init_val"):
        return None
    value: Tensor | None = own.get_high_precision_init_val()
    own.clear_high_precision_init_val()
    return value


def check_scale(scale: Tensor | None, where: str) -> Tensor:
    """``scale``, which a weight in FP8 has.

    Raises:
        ArgumentError: it has none.
    """
    if scale is not None:
        return scale
    raise ArgumentError.explained(
        "A weight in FP8 has a scale",
        where=where,
        received="a weight of codes without weight_scale",
        remedy="Construct the operation within opfuser.quantized_model_init",
    )
