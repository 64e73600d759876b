"""The basic operations: each owns its parameters and implements one tensor operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.later import by_name, names

if TYPE_CHECKING:  # what is loaded when it is used: names and places, as in _LATER
    from .activation import GELU, QGELU, ReLU, Sigmoid, SiLU, Softplus, SReLU, Tanh
    from .add_embedding import AddEmbedding
    from .add_extra_input import AddExtraInput
    from .all_gather import AllGather
    from .all_reduce import AllReduce
    from .basic_linear import BasicLinear
    from .bias import Bias
    from .combine import Combine, StartCombine
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
    "StartCombine",
    "SwapExtra",
    "SwiGLU",
    "Tanh",
    "TopKRouter",
    "Unpermute",
]

# The module of each operation.
_LATER = by_name(
    {
        "activation": "GELU QGELU ReLU SReLU SiLU Sigmoid Softplus Tanh",
        "add_embedding": "AddEmbedding",
        "add_extra_input": "AddExtraInput",
        "all_gather": "AllGather",
        "all_reduce": "AllReduce",
        "basic_linear": "BasicLinear",
        "bias": "Bias",
        "combine": "Combine StartCombine",
        "constant_scale": "ConstantScale",
        "cross_entropy": "CrossEntropy",
        "dispatch": "Dispatch",
        "dot_product_attention": "DotProductAttention",
        "drop_tokens": "DropTokens RestoreTokens",
        "dropout": "Dropout",
        "embedding": "Embedding",
        "gated_activation": "ClampedSwiGLU GEGLU GLU QGEGLU ReGLU SReGLU SiTUGLU SwiGLU",
        "grouped_linear": "GroupedLinear",
        "identity": "Identity",
        "jitter": "Jitter",
        "l2_normalization": "L2Normalization",
        "layer_norm": "LayerNorm",
        "load_balancing_loss": "LoadBalancingLoss",
        "lora_linear": "LoRALinear",
        "make_extra_output": "MakeExtraOutput",
        "permute": "Permute",
        "pointwise": "PointwiseOperation",
        "position_embedding": "PositionEmbedding",
        "qk_norm": "QKNorm",
        "quantize": "Quantize",
        "reduce_scatter": "ReduceScatter",
        "reshape": "Reshape",
        "rms_norm": "RMSNorm",
        "rotary_embedding": "RotaryEmbedding",
        "scaled_activation": "ScaledClampedQGeGLU ScaledSReLU ScaledSiTUGLU ScaledSwiGLU "
        "ScaledTanhSReLU",
        "swap_extra": "SwapExtra",
        "top_k_router": "TopKRouter",
        "unpermute": "Unpermute",
    }
)

__getattr__, __dir__ = names(globals(), _LATER)
