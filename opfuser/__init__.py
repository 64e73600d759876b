"""opfuser: sequences of tensor operations, fused differently in forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import basic
from .core.fusion import Env, Fusion, Optional, Refusal, Repeated, Requires
from .fused import FUSIONS as _FUSIONS
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
from .registry.handles import registry as _registry
from .runtime import operators as _operators  # noqa: F401 - of programs that are loaded
from .runtime.later import by_name, names

if TYPE_CHECKING:  # what is loaded when it is used: operations, modules, and what _LATER names
    from . import events, gemm_providers, optim, recipe
    from .applying import apply, revert
    from .attention.cache import KVCache
    from .attention.rope import RopeScaling
    from .basic import *  # noqa: F403 - the one list of operations is in basic/__init__.py
    from .basic.lora_linear import LoRAAdapter
    from .engine.plan import FusionRecord, Plan, Step
    from .engine.replayed.options import replay
    from .engine.routing import PrivateChannel
    from .events import record_events
    from .explain.expectations import Answer, can_fuse, require_fusions
    from .fuser import OperationFuser
    from .integrations.conversion import from_torch
    from .integrations.torch_nn import to_torch
    from .linear import Linear
    from .merged_linear import MergedLinear
    from .op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
    from .quantization.recipe_state import init_recipe_state
    from .quantization.region import autocast, fp8_autocast, keep_quantized_weights
    from .quantization.watch import QuantizationRecord, watch_quantization
    from .quantization.weights import fp8_model_init, quantized_model_init
    from .sequential import Residual, Sequential

__version__ = "0.1.0"

for _rule in _FUSIONS:
    _registry.add(_rule, _rule.stage, origin="opfuser")

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
    "apply",
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

# The module of each name besides the operations.
_LATER = by_name(
    {
        "applying": "apply revert",
        "attention.cache": "KVCache",
        "attention.rope": "RopeScaling",
        "basic.lora_linear": "LoRAAdapter",
        "linear": "Linear",
        "merged_linear": "MergedLinear",
        "engine.plan": "FusionRecord Plan Step",
        "engine.replayed.options": "replay",
        "engine.routing": "PrivateChannel",
        "events": "record_events",
        "explain.expectations": "Answer can_fuse require_fusions",
        "fuser": "OperationFuser",
        "integrations.conversion": "from_torch",
        "integrations.torch_nn": "to_torch",
        "op": "BasicOperation FusedOperation FusibleOperation OperationContext",
        "quantization.recipe_state": "init_recipe_state",
        "quantization.region": "autocast fp8_autocast keep_quantized_weights",
        "quantization.watch": "QuantizationRecord watch_quantization",
        "quantization.weights": "fp8_model_init quantized_model_init",
        "sequential": "Residual Sequential",
    }
)

_OPERATIONS = {name: f"basic.{module}" for name, module in basic._LATER.items()}

__getattr__, __dir__ = names(globals(), _LATER | _OPERATIONS)
