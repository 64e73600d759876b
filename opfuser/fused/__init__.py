"""The built-in fusions, and the fused operations that they put in place."""

from __future__ import annotations

from ..fusion import Fusion
from . import (
    backward_activation_bias,
    backward_add_layer_norm,
    backward_add_rms_norm,
    backward_linear_add,
    backward_linear_scale,
    forward_add_layer_norm,
    forward_add_rms_norm,
    forward_linear_bias_activation,
    forward_linear_bias_add,
    forward_linear_scale_add,
)
from .backward_activation_bias import BackwardActivationBias
from .backward_add_layer_norm import BackwardAddLayerNorm
from .backward_add_rms_norm import BackwardAddRMSNorm
from .backward_linear_add import BackwardLinearAdd
from .backward_linear_scale import BackwardLinearScale
from .forward_add_layer_norm import ForwardAddLayerNorm
from .forward_add_rms_norm import ForwardAddRMSNorm
from .forward_linear_bias_activation import ForwardLinearBiasActivation
from .forward_linear_bias_add import ForwardLinearBiasAdd
from .forward_linear_scale_add import ForwardLinearScaleAdd

__all__ = [
    "FUSIONS",
    "BackwardActivationBias",
    "BackwardAddLayerNorm",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardAddLayerNorm",
    "ForwardAddRMSNorm",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
]

# The first to match takes the operations. So a pattern stands before one that begins alike and is
# shorter, and where the end of one is the beginning of another, what saves more comes first: the
# sum goes into the GEMM (with a bias 4A of traffic instead of 6A) rather than the norm (without a
# kernel for both, nothing), and a residual gradient into the GEMM rather than a factor.
FUSIONS: tuple[Fusion, ...] = (
    forward_linear_scale_add.FUSION,
    forward_linear_bias_add.FUSION,
    forward_linear_bias_activation.FUSION,
    forward_add_rms_norm.FUSION,
    forward_add_layer_norm.FUSION,
    backward_add_rms_norm.FUSION,
    backward_add_layer_norm.FUSION,
    backward_linear_add.FUSION,
    backward_linear_scale.FUSION,
    backward_activation_bias.FUSION,
)
