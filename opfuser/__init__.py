"""opfuser: sequences of tensor operations, fused differently in forward and backward."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import basic, events, gemm_providers, recipe
from .attention.cache import KVCache
from .basic.lora_linear import LoRAAdapter
from .engine.plan import FusionRecord, Plan, Step
from .engine.replay_options import replay
from .engine.routing import PrivateChannel
from .events import record_events
from .fused import FUSIONS as _FUSIONS
from .fuser import OperationFuser
from .fusion import Env, Fusion, Optional, Refusal, Repeated, Requires
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
from .registry.handles import registry as _registry
from .rope import RopeScaling
from .sequential import Residual, Sequential

if TYPE_CHECKING:  # what is loaded when it is used: operations, and names and places as in _LATER
    from . import optim
    from .applying import apply, revert
    from .basic import *  # noqa: F403 - the one list of operations is in basic/__init__.py
    from .basic.activation import *  # noqa: F403 - type checkers follow no list that is added to it
    from .basic.gated_activation import *  # noqa: F403
    from .basic.scaled_activation import *  # noqa: F403
    from .expectations import Answer, can_fuse, require_fusions
    from .integrations.conversion import from_torch
    from .integrations.torch_nn import to_torch

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

# What a sequence that runs does not need, by the module that has it.
_LATER = {
    "Answer": "expectations",
    "apply": "applying",
    "can_fuse": "expectations",
    "from_torch": "integrations.conversion",
    "require_fusions": "expectations",
    "revert": "applying",
    "to_torch": "integrations.torch_nn",
}
_LATER_MODULES = (
    "applying",
    "expectations",
    "hf",
    "integrations",
    "models",
    "optim",
    "reading",
    "report",
    "testing",
)


def __getattr__(name: str) -> Any:
    """Loads what is used for the first time."""
    if name in _LATER:
        value = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    elif name in _LATER_MODULES:
        value = import_module(f"{__name__}.{name}")
    elif name in basic.__all__:
        value = getattr(basic, name)
    else:
        return import_module(f"{__name__}.deprecated").value(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATER_MODULES})
