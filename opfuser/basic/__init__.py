"""The basic operations: each owns its parameters and implements one tensor operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.later import names

if TYPE_CHECKING:  # what is loaded when it is used: names and places, as in _LATER
    from .activation import GELU, QGELU, ReLU, Sigmoid, SiLU, Softplus, SReLU, Tanh
    from .add_embedding import AddEmbedding
    from .add_extra_input import AddExtraInput
    from .all_gather import AllGather
    from .all_reduce import AllReduce
    from .basic_linear import BasicLinear
    from .bias import Bias
    from .combine import Combine
    from .constant_scale import ConstantScale
    from .cross_entropy import CrossEntropy
    from .dispatch import Dispatch
    from .dot_product_attention import DotProductAttention
    from .drop_tokens import DropTokens, RestoreTokens
    from .dropout import Dropout
    from .embedding import Embedding
    from .gated_activation import GEGLU, GLU, QGEGLU, ClampedSwiGLU, ReGLU, SiTUGLU, SReGLU, SwiGLU
    from .grouped_linear import GroupedLinear
    from .identity import Identity
    from .jitter import Jitter
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
    from .scaled_activation import (
        ScaledClampedQGeGLU,
        ScaledSiTUGLU,
        ScaledSReLU,
        ScaledSwiGLU,
        ScaledTanhSReLU,
    )
    from .swap_extra import SwapExtra
    from .top_k_router import TopKRouter
    from .unpermute import Unpermute

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddEmbedding",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "Combine",
    "ConstantScale",
    "CrossEntropy",
    "Dispatch",
    "DotProductAttention",
    "DropTokens",
    "Dropout",
    "Embedding",
    "GroupedLinear",
    "Identity",
    "Jitter",
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
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "RestoreTokens",
    "RotaryEmbedding",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
    "SiLU",
    "SiTUGLU",
    "Sigmoid",
    "Softplus",
    "SwapExtra",
    "SwiGLU",
    "Tanh",
    "TopKRouter",
    "Unpermute",
]

# The module of each operation.
_LATER = {
    "AddEmbedding": "add_embedding",
    "AddExtraInput": "add_extra_input",
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "BasicLinear": "basic_linear",
    "Bias": "bias",
    "ClampedSwiGLU": "gated_activation",
    "Combine": "combine",
    "ConstantScale": "constant_scale",
    "CrossEntropy": "cross_entropy",
    "Dispatch": "dispatch",
    "DotProductAttention": "dot_product_attention",
    "DropTokens": "drop_tokens",
    "Dropout": "dropout",
    "Embedding": "embedding",
    "GEGLU": "gated_activation",
    "GELU": "activation",
    "GLU": "gated_activation",
    "GroupedLinear": "grouped_linear",
    "Identity": "identity",
    "Jitter": "jitter",
    "L2Normalization": "l2_normalization",
    "LayerNorm": "layer_norm",
    "LoRALinear": "lora_linear",
    "LoadBalancingLoss": "load_balancing_loss",
    "MakeExtraOutput": "make_extra_output",
    "Permute": "permute",
    "PointwiseOperation": "pointwise",
    "PositionEmbedding": "position_embedding",
    "QGEGLU": "gated_activation",
    "QGELU": "activation",
    "QKNorm": "qk_norm",
    "Quantize": "quantize",
    "RMSNorm": "rms_norm",
    "ReGLU": "gated_activation",
    "ReLU": "activation",
    "ReduceScatter": "reduce_scatter",
    "Reshape": "reshape",
    "RestoreTokens": "drop_tokens",
    "RotaryEmbedding": "rotary_embedding",
    "SReGLU": "gated_activation",
    "SReLU": "activation",
    "ScaledClampedQGeGLU": "scaled_activation",
    "ScaledSReLU": "scaled_activation",
    "ScaledSiTUGLU": "scaled_activation",
    "ScaledSwiGLU": "scaled_activation",
    "ScaledTanhSReLU": "scaled_activation",
    "SiLU": "activation",
    "SiTUGLU": "gated_activation",
    "Sigmoid": "activation",
    "Softplus": "activation",
    "SwapExtra": "swap_extra",
    "SwiGLU": "gated_activation",
    "Tanh": "activation",
    "TopKRouter": "top_k_router",
    "Unpermute": "unpermute",
}

__getattr__, __dir__ = names(globals(), _LATER)
