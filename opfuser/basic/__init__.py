"""The basic operations: each owns its parameters and implements one tensor operation."""

from __future__ import annotations

from . import activation, gated_activation, scaled_activation
from .activation import *  # noqa: F403 - each family of activations lists its own
from .add_embedding import AddEmbedding
from .add_extra_input import AddExtraInput
from .all_gather import AllGather
from .all_reduce import AllReduce
from .basic_linear import BasicLinear
from .bias import Bias
from .constant_scale import ConstantScale
from .cross_entropy import CrossEntropy
from .dot_product_attention import DotProductAttention
from .dropout import Dropout
from .embedding import Embedding
from .gated_activation import *  # noqa: F403
from .grouped_linear import GroupedLinear
from .identity import Identity
from .l2_normalization import L2Normalization
from .layer_norm import LayerNorm
from .load_balancing_loss import LoadBalancingLoss
from .lora_linear import LoRALinear
from .make_extra_output import MakeExtraOutput
from .permute import Permute
from .pointwise import PointwiseOperation
from .position_embedding import PositionEmbedding
from .qk_norm import QKNorm
from .quantize import Quantize
from .reduce_scatter import ReduceScatter
from .reshape import Reshape
from .rms_norm import RMSNorm
from .rotary_embedding import RotaryEmbedding
from .scaled_activation import *  # noqa: F403
from .swap_extra import SwapExtra
from .top_k_router import TopKRouter
from .unpermute import Unpermute

__all__ = [
    "AddEmbedding",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ConstantScale",
    "CrossEntropy",
    "DotProductAttention",
    "Dropout",
    "Embedding",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "LoRALinear",
    "LoadBalancingLoss",
    "MakeExtraOutput",
    "Permute",
    "PointwiseOperation",
    "PositionEmbedding",
    "QKNorm",
    "Quantize",
    "RMSNorm",
    "ReduceScatter",
    "Reshape",
    "RotaryEmbedding",
    "SwapExtra",
    "TopKRouter",
    "Unpermute",
]
__all__ += activation.__all__
__all__ += gated_activation.__all__
__all__ += scaled_activation.__all__
