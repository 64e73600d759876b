"""Transformer Engine: conversion of its operations and modules, and checkpoints of either side.

Reading a module and mapping a checkpoint import nothing of Transformer Engine; :func:`to_te` does.
Names of options are those of its constructors, of version 2.20.
"""

from __future__ import annotations

from .checkpoints import load_te_state_dict, te_state_dict
from .conversion import from_te, to_te
from .linear_modules import (
    GroupedLinearOptions,
    LayerNormLinearOptions,
    LayerNormMLPOptions,
    LinearOptions,
)
from .options import Options
from .transformer_layer import TransformerLayerOptions

__all__ = [
    "GroupedLinearOptions",
    "LayerNormLinearOptions",
    "LayerNormMLPOptions",
    "LinearOptions",
    "Options",
    "TransformerLayerOptions",
    "from_te",
    "load_te_state_dict",
    "te_state_dict",
    "to_te",
]
