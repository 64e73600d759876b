"""The basic operations: each owns its parameters and implements one tensor operation."""

from __future__ import annotations

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
from .grouped_linear import GroupedLinear
from .identity import Identity
from .make_extra_output import MakeExtraOutput
from .quantize import Quantize
from .reduce_scatter import ReduceScatter
from .reshape import Reshape
from .rotary_embedding import RotaryEmbedding

__all__ = [
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
    "MakeExtraOutput",
    "Quantize",
    "ReduceScatter",
    "Reshape",
    "RotaryEmbedding",
]
