"""How a recipe quantises the operands of a linear operation's GEMMs."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import QuantizedWeightError, explain
from ..kernels.microscaling import quantize_mxfp8, quantize_nvfp4
from ..kernels.pointwise import draw_seed
from ..kernels.quantize import (
    Codes,
    amax_of,
    quantize_by_blocks,
    quantize_by_squares,
    quantize_by_tensor,
    scale_for,
)
from ..recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from ..recording import is_recording
from .state import Stateful, state_of

__all__ = ["OperandQuantizer", "has_hardware", "keep_quantized_weights", "weights_are_kept"]


class OperandQuantizer(NamedTuple):
    """Quantises the operands of one operation, as a recipe says.

    Attributes:
        op: whose scales are kept.
        recipe: the recipe.
        group: ranks that agree on the largest values, or None.
    """

    op: nn.Module
    recipe: Recipe
    group: dist.ProcessGroup | None

    def input(self, x: Tensor, *, rows: bool, cols: bool) -> Codes:
        """(rows, K)."""
        return self._quantize("input", x, rows=rows, cols=cols)

    def grad_output(self, dy: Tensor, *, rows: bool, cols: bool, column_sum: bool) -> Codes:
        """(rows, N), with the sums of its columns if asked for."""
        return self._quantize("grad_output", dy, rows=rows, cols=cols, column_sum=column_sum)

    def weight(self, w: Tensor, source: Tensor | None, *, rows: bool, cols: bool) -> Codes:
        """(N, K); both layouts, once, within :func:`keep_quantized_weights`.

        Args:
            w: the weight in the dtype that the operation computes in.
            source: the parameter that it comes from; None if it is computed anew at every call.
            rows, cols: which layouts are wanted.
        """
        kept = _kept.get()
        # A recording outlives the block, and would read what it kept.
        if kept is None or source is None or is_recording():
            return self._quantize("weight", w, rows=rows, cols=cols)
        key = id(self.op), self.recipe
        found = kept.get(key)
        if found is None or found.source() is not source:
            codes = self._quantize("weight", w, rows=True, cols=True)
            found = kept[key] = _Kept(weakref.ref(source), source._version, codes)
        if found.version != source._version:
            raise QuantizedWeightError(
                explain(
                    "A weight does not change within keep_quantized_weights",
                    where=f"{type(self.op).__name__}({self.op.extra_repr()})",
                    received="a weight that was written to since it was quantised",
                    remedy="Leave the block before the optimiser's step",
                )
            )
        return found.codes

    def _quantize(
        self, role: str, x: Tensor, *, rows: bool, cols: bool, column_sum: bool = False
    ) -> Codes:
        recipe = self.recipe
        wants: Any = {"rows": rows, "cols": cols}
        dtype = recipe.dtype(role)
        if isinstance(recipe, Float8BlockScaling):
            powers = _params(recipe, role).power_2_scale
            if role == "weight":
                return quantize_by_squares(x, dtype, **wants, power_of_two=powers)
            return quantize_by_blocks(x, dtype, **wants, power_of_two=powers, column_sum=column_sum)
        if isinstance(recipe, Float8CurrentScaling):
            params = _params(recipe, role)
            amax = amax_of(x)
            if params.amax_epsilon:
                amax = amax.clamp_min(params.amax_epsilon)
            scale = scale_for(amax, dtype, power_of_two=params.power_2_scale)
            return quantize_by_tensor(x, scale, dtype, **wants, column_sum=column_sum)
        if isinstance(recipe, MXFP8BlockScaling):
            return quantize_mxfp8(x, dtype, **wants, column_sum=column_sum)
        if isinstance(recipe, NVFP4BlockScaling):
            how = recipe.params(role)
            seed = draw_seed(x) if how.stochastic_rounding else None
            wants |= {"squares": how.fp4_2d_quantization, "seed": seed, "column_sum": column_sum}
            return quantize_nvfp4(x, amax_of(x), **wants, transform=how.random_hadamard_transform)
        assert isinstance(recipe, Stateful)
        state = state_of(self.op, recipe, self.group)
        scale, amax = state.scale_of(role, x, recipe), state.amax_seen(role)
        return quantize_by_tensor(x, scale, dtype, **wants, amax=amax, column_sum=column_sum)


def _params(recipe: Float8BlockScaling | Float8CurrentScaling, role: str) -> QParams:
    if role == "input":
        return recipe.fp8_quant_fwd_inp
    return recipe.fp8_quant_fwd_weight if role == "weight" else recipe.fp8_quant_bwd_grad


class _Kept(NamedTuple):
    source: weakref.ref[Tensor]
    version: int
    codes: Codes


_kept: ContextVar[dict[object, _Kept] | None] = ContextVar("opfuser_weights", default=None)


def weights_are_kept() -> bool:
    """Whether the caller is within :func:`keep_quantized_weights`."""
    return _kept.get() is not None


@contextmanager
def keep_quantized_weights() -> Iterator[None]:
    """Within it every weight is quantised once, for all micro-batches.

    Costs two bytes per weight until the block ends.

    Raises:
        QuantizedWeightError: at a call, if a weight was written to since it was quantised. Writes
            through ``.data`` cannot be noticed.
    """
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


_warned: set[str] = set()


def has_hardware(device: torch.device, recipe: Recipe) -> bool:
    """Whether ``device`` multiplies what the recipe rounds to.

    Elsewhere the same codes and scales are multiplied in fp32. The first such device of a format is
    told in a warning.
    """
    needed, name = recipe.capability, recipe.operands
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= needed:
        return True
    told = f"{name} on {device.type}"
    if told not in _warned:
        _warned.add(told)
        capability = ".".join(map(str, needed))
        warnings.warn(
            explain(
                f"{name} is emulated: operands are rounded to {name} and multiplied in fp32",
                received=f"tensors on {device}",
                remedy=f"GPUs of compute capability {capability} and later multiply {name}",
            ),
            stacklevel=2,
        )
    return False
