"""The basic operations: each owns its parameters and implements one tensor operation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import activation, gated_activation, scaled_activation
from .activation import *  # noqa: F403 - each family of activations lists its own
from .add_extra_input import AddExtraInput
from .all_reduce import AllReduce
from .basic_linear import BasicLinear
from .bias import Bias
from .constant_scale import ConstantScale
from .cross_entropy import CrossEntropy
from .dropout import Dropout
from .embedding import Embedding
from .gated_activation import *  # noqa: F403
from .grouped_linear import GroupedLinear
from .identity import Identity
from .layer_norm import LayerNorm
from .lora_linear import LoRALinear
from .make_extra_output import MakeExtraOutput
from .permute import Permute
from .pointwise import PointwiseOperation
from .qk_norm import QKNorm
from .reduce_scatter import ReduceScatter
from .rms_norm import RMSNorm
from .rotary_embedding import RotaryEmbedding
from .scaled_activation import *  # noqa: F403

if TYPE_CHECKING:  # what is loaded when it is used: names and places, as in _LATER
    from .add_embedding import AddEmbedding
    from .all_gather import AllGather
    from .combine import Combine
    from .dispatch import Dispatch
    from .dot_product_attention import DotProductAttention
    from .drop_tokens import DropTokens, RestoreTokens
    from .jitter import Jitter
    from .l2_normalization import L2Normalization
    from .load_balancing_loss import LoadBalancingLoss
    from .position_embedding import PositionEmbedding
    from .quantize import Quantize
    from .reshape import Reshape
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
    "ReduceScatter",
    "Reshape",
    "RestoreTokens",
    "RotaryEmbedding",
    "SwapExtra",
    "TopKRouter",
    "Unpermute",
]
__all__ += activation.__all__
__all__ += gated_activation.__all__
__all__ += scaled_activation.__all__

# What neither fusions nor compounds are about, by the module that has it.
_LATER = {
    "AddEmbedding": "add_embedding",
    "AllGather": "all_gather",
    "Combine": "combine",
    "Dispatch": "dispatch",
    "DotProductAttention": "dot_product_attention",
    "DropTokens": "drop_tokens",
    "Jitter": "jitter",
    "L2Normalization": "l2_normalization",
    "LoadBalancingLoss": "load_balancing_loss",
    "PositionEmbedding": "position_embedding",
    "Quantize": "quantize",
    "Reshape": "reshape",
    "RestoreTokens": "drop_tokens",
    "SwapExtra": "swap_extra",
    "TopKRouter": "top_k_router",
    "Unpermute": "unpermute",
}


def __getattr__(name: str) -> Any:
    """Loads an operation that is used for the first time."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return value
