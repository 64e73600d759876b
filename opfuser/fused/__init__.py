"""The built-in fusions, and the fused operations that they build."""

from __future__ import annotations

from ..fusion import Fusion
from . import (
    activation_linear,
    backward_activation_bias,
    backward_add_norm,
    backward_linear_add,
    backward_linear_scale,
    backward_qk_norm_rotary,
    forward_add_norm,
    forward_linear_bias_activation,
    forward_linear_bias_add,
    forward_linear_scale_add,
    forward_qk_norm_rotary,
    grouped_mlp,
    linear_cross_entropy,
    norm_linear,
    pointwise_chain,
    pointwise_norm,
    quantized_grouped_linear,
    quantized_linear,
    recompute_mlp,
)
from .activation_linear import ActivationLinear
from .backward_activation_bias import BackwardActivationBias
from .backward_add_norm import BackwardAddLayerNorm, BackwardAddRMSNorm
from .backward_linear_add import BackwardLinearAdd
from .backward_linear_scale import BackwardLinearScale
from .backward_qk_norm_rotary import BackwardQKNormRotary
from .forward_add_norm import ForwardAddLayerNorm, ForwardAddRMSNorm
from .forward_linear_bias_activation import ForwardLinearBiasActivation
from .forward_linear_bias_add import ForwardLinearBiasAdd
from .forward_linear_scale_add import ForwardLinearScaleAdd
from .forward_qk_norm_rotary import ForwardQKNormRotary
from .grouped_mlp import GroupedMLP
from .linear_cross_entropy import LinearCrossEntropy
from .norm_linear import NormLinear
from .pointwise_chain import PointwiseChain
from .pointwise_norm import PointwiseNorm
from .quantized_grouped_linear import QuantizedGroupedLinear
from .quantized_linear import QuantizedLinear
from .recompute_mlp import RecomputeMLP

__all__ = [
    "FUSIONS",
    "ActivationLinear",
    "BackwardActivationBias",
    "BackwardAddLayerNorm",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "BackwardQKNormRotary",
    "ForwardAddLayerNorm",
    "ForwardAddRMSNorm",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "ForwardQKNormRotary",
    "GroupedMLP",
    "LinearCrossEntropy",
    "NormLinear",
    "PointwiseChain",
    "PointwiseNorm",
    "QuantizedGroupedLinear",
    "QuantizedLinear",
    "RecomputeMLP",
]

# The first fusion that matches replaces the operations; joint fusions come before those of one
# pass. Where one pattern ends as another begins, the fusion that saves more bytes comes first, and
# a pattern comes before a shorter one with the same beginning:
# - The head is fused with the loss, whose logits are then never whole, not with the norm before it.
# - An activation is fused with the linear behind it (2H less to save) rather than with the bias and
#   other element-wise operations before it (2H less to move, and only until the GEMM reads it).
# - A chain of element-wise operations before a norm joins the norm's kernel (4A moved for bias,
#   dropout, sum and norm, instead of 5A in two kernels); any other is a kernel of its own. Only
#   then does the linear behind that norm join, for A less to save: the bias behind the linear may
#   begin another chain, where backward moves A less for it than as a part of the linear.
# - A sum alone joins a norm or a GEMM, as _residual_sum decides.
# - Where a recipe of quantised compute is active, what is left of linear operations follows it.
# - A residual gradient joins the norm's kernel or the GEMM before a factor joins the GEMM.
FUSIONS: tuple[Fusion, ...] = (
    linear_cross_entropy.FUSION,
    recompute_mlp.FUSION,
    recompute_mlp.FUSION_WHERE_ASKED,
    activation_linear.FUSION_WITH_SUM,
    activation_linear.FUSION,
    pointwise_norm.FUSION,
    pointwise_chain.FUSION,
    norm_linear.FUSION,
    quantized_linear.FUSION,
    grouped_mlp.FUSION,
    quantized_grouped_linear.FUSION,
    forward_qk_norm_rotary.FUSION,
    forward_linear_scale_add.FUSION,
    forward_linear_bias_add.FUSION,
    forward_add_norm.FUSION_OF_RMS_NORM,
    forward_add_norm.FUSION_OF_LAYER_NORM,
    forward_linear_bias_activation.FUSION,
    backward_qk_norm_rotary.FUSION,
    backward_add_norm.FUSION_OF_RMS_NORM,
    backward_add_norm.FUSION_OF_LAYER_NORM,
    backward_linear_add.FUSION,
    backward_linear_scale.FUSION,
    backward_activation_bias.FUSION,
)
"""The built-in fusions, in the order in which they are applied."""
