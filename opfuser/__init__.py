"""opfuser: sequences of tensor operations, fused differently in forward and backward."""

from .basic import *  # noqa: F403
from .fuser import OperationFuser
from .fusion import (
    Fusion,
    Optional,
    Refusal,
    Requires,
    disable,
    enable,
    fusion,
    fusions,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .linear import Linear
from .op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from .sequential import Residual, Sequential

__version__ = "0.1.0"
