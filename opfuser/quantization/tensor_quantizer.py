"""What ``get_quantizer`` of an operation returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels.quantize import Codes
from ..recipe import DelayedScaling, Recipe
from .operation_state import state_of
from .quantizers import OperandQuantizer
from .region import amax_group, region
from .state import QuantizationState


class TensorQuantizer(NamedTuple):
    """How an operation quantizes one of its tensors: a view of its state, called to quantize.

    Attributes:
        op: the operation.
        recipe: of the region.
        group: ranks that agree on the largest values in the region, or None.
        role: ``"input"``, ``"weight"`` or ``"grad_output"``.
    """

    op: nn.Module
    recipe: Recipe
    group: dist.ProcessGroup | None
    role: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return self.recipe.dtype(self.role)

    @property
    def scale(self) -> Tensor | None:
        """(1,), what values are multiplied by; None where the recipe takes it from the values.

        The memory of the state: it follows what the operation sees.
        """
        state = self._state()
        return None if state is None else state.scale_of(self.role)

    @property
    def amax(self) -> Tensor | None:
        """(1,), the largest value since scales were updated; None likewise."""
        state = self._state()
        return None if state is None else state.amax_seen(self.role)

    def __call__(self, x: Tensor, *, rows: bool = True, cols: bool = True) -> Codes:
        """Codes of x, (..., C), as the operation would quantize it; raises the amax as it does.

        Args:
            x: in fp32, bf16 or fp16.
            rows, cols: which layouts are wanted.
        """
        matrix = x.reshape(-1, x.shape[-1])
        quantizer = OperandQuantizer(self.op, self.recipe)
        with region(self.recipe, self.group):  # the caller may have left it
            return quantizer.quantize(self.role, matrix, rows=rows, cols=cols)

    def _state(self) -> QuantizationState | None:
        if not isinstance(self.recipe, DelayedScaling):
            return None
        with region(self.recipe, self.group):
            return state_of(self.op, self.recipe, amax_group())
