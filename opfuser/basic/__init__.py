"""The basic operations: each owns its parameters and implements one tensor operation."""

from .add_extra_input import AddExtraInput
from .constant_scale import ConstantScale
from .identity import Identity
from .make_extra_output import MakeExtraOutput
from .quantize import Quantize
from .reshape import Reshape

__all__ = [
    "AddExtraInput",
    "ConstantScale",
    "Identity",
    "MakeExtraOutput",
    "Quantize",
    "Reshape",
]
