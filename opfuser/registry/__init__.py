"""The registered fusions, which of them are on, and how programs change that."""

from __future__ import annotations

from .handles import FusionHandle, registry
from .listing import FusionInfo, effective, fusions, plugins
from .registration import (
    fusion,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .switches import disable, enable, fusion_config

__all__ = [
    "FusionHandle",
    "FusionInfo",
    "disable",
    "effective",
    "enable",
    "fusion",
    "fusion_config",
    "fusions",
    "plugins",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "registry",
]
