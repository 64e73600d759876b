"""The built-in fusions, and the fused operations that they put in place."""

from __future__ import annotations

from ..fusion import Fusion
from . import (
    backward_linear_add,
    backward_linear_scale,
    forward_linear_bias_activation,
    forward_linear_bias_add,
    forward_linear_scale_add,
)
from .backward_linear_add import BackwardLinearAdd
from .backward_linear_scale import BackwardLinearScale
from .forward_linear_bias_activation import ForwardLinearBiasActivation
from .forward_linear_bias_add import ForwardLinearBiasAdd
from .forward_linear_scale_add import ForwardLinearScaleAdd

__all__ = [
    "FUSIONS",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
]

# Within a stage the first to match takes the operations, so the order is the precedence: a longer
# pattern stands before one that begins with the same operations, and what saves more before what
# saves less where the end of one pattern is the beginning of another.
FUSIONS: tuple[Fusion, ...] = (
    forward_linear_scale_add.FUSION,
    forward_linear_bias_add.FUSION,
    forward_linear_bias_activation.FUSION,
    backward_linear_add.FUSION,
    backward_linear_scale.FUSION,
)
