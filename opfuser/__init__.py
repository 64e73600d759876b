"""opfuser: sequences of tensor operations, fused differently in forward and backward."""

from __future__ import annotations

from . import async_tensor_parallel, basic, events, gemm_providers, optim, recipe
from .applying import apply, revert
from .attention.cache import KVCache
from .basic import *  # noqa: F403 - the one list of operations is in basic/__init__.py
from .basic.activation import *  # noqa: F403 - type checkers follow no list that is added to it
from .basic.gated_activation import *  # noqa: F403
from .basic.lora_linear import LoRAAdapter
from .basic.scaled_activation import *  # noqa: F403
from .engine.plan import FusionRecord, Plan, Step
from .engine.replay_options import replay
from .engine.routing import PrivateChannel
from .events import record_events
from .expectations import Answer, can_fuse, require_fusions
from .fuser import OperationFuser
from .fusion import Env, Fusion, Optional, Refusal, Repeated, Requires
from .integrations.conversion import from_torch
from .integrations.torch_nn import to_torch
from .linear import Linear
from .merged_linear import MergedLinear
from .op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from .quantization.quantizers import keep_quantized_weights
from .quantization.recipe_state import init_recipe_state
from .quantization.region import autocast, fp8_autocast
from .quantization.watch import QuantizationRecord, watch_quantization
from .quantization.weights import fp8_model_init, quantized_model_init
from .registry import (
    FusionHandle,
    disable,
    enable,
    fusion,
    fusion_config,
    fusions,
    plugins,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .report import picture as _picture  # noqa: F401 - how notebooks show plans
from .rope import RopeScaling
from .sequential import Residual, Sequential
from .wgrad_overlap import WgradOverlap, overlap_wgrad

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "BasicOperation",
    "Env",
    "FusedOperation",
    "FusibleOperation",
    "Fusion",
    "FusionHandle",
    "FusionRecord",
    "KVCache",
    "Linear",
    "LoRAAdapter",
    "MergedLinear",
    "OperationContext",
    "OperationFuser",
    "Optional",
    "Plan",
    "PrivateChannel",
    "QuantizationRecord",
    "Refusal",
    "Repeated",
    "Requires",
    "Residual",
    "RopeScaling",
    "Sequential",
    "Step",
    "WgradOverlap",
    "apply",
    "async_tensor_parallel",
    "autocast",
    "can_fuse",
    "disable",
    "enable",
    "events",
    "fp8_autocast",
    "fp8_model_init",
    "from_torch",
    "fusion",
    "fusion_config",
    "fusions",
    "gemm_providers",
    "init_recipe_state",
    "keep_quantized_weights",
    "optim",
    "overlap_wgrad",
    "plugins",
    "quantized_model_init",
    "recipe",
    "record_events",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "replay",
    "require_fusions",
    "revert",
    "to_torch",
    "watch_quantization",
]
__all__ += basic.__all__
