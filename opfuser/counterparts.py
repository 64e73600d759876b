"""What operations are called elsewhere: the one table of activations, norms and other layers.

By name here, in ``torch.nn``, in configurations of Hugging Face's transformers, and in Transformer
Engine. Whoever reads, converts or configures modules looks operations up in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from .basic import CrossEntropy, Dropout, Embedding, Identity, LayerNorm, RMSNorm
from .basic.activation import GELU, QGELU, ReLU, Sigmoid, SiLU, Softplus, SReLU, Tanh
from .basic.gated_activation import (
    GATED_ACTIVATIONS,
    GEGLU,
    GLU,
    QGEGLU,
    ClampedSwiGLU,
    ReGLU,
    SiTUGLU,
    SReGLU,
    SwiGLU,
)
from .linear import Linear
from .op import BasicOperation, FusibleOperation


class Activation(NamedTuple):
    """An activation and its other names.

    Attributes:
        operation: its class.
        arguments: of the class, where it has several functions.
        gate: which activation's function gates, in a product that is nothing else.
        torch: the module of the same function.
        hf: its names in ``ACT2FN`` of transformers; a gated one is named by what gates there.
        te: its name as an argument of modules of Transformer Engine.
    """

    operation: type[BasicOperation]
    arguments: tuple[Any, ...] = ()
    gate: str | None = None
    torch: type[nn.Module] | None = None
    hf: tuple[str, ...] = ()
    te: str | None = None

    @property
    def gated(self) -> bool:
        """Whether the input is twice as wide as the output, gate first."""
        return self.operation in GATED_ACTIVATIONS

    def make(self, *constants: float) -> BasicOperation:
        """An operation, with the constants of its function."""
        return self.operation(*self.arguments, *constants)


# The name of one that torch has is that of torch's function.
ACTIVATIONS: Mapping[str, Activation] = {
    "swiglu": Activation(SwiGLU, gate="silu", te="swiglu"),
    "geglu": Activation(GEGLU, gate="gelu_tanh", te="geglu"),
    "gelu": Activation(GELU, ("none",), torch=nn.GELU, hf=("gelu",)),
    "gelu_tanh": Activation(GELU, ("tanh",), hf=("gelu_pytorch_tanh", "gelu_new"), te="gelu"),
    "relu": Activation(ReLU, torch=nn.ReLU, hf=("relu",), te="relu"),
    "silu": Activation(SiLU, torch=nn.SiLU, hf=("silu", "swish"), te="silu"),
    "clamped_swiglu": Activation(ClampedSwiGLU, te="clamped_swiglu"),
    "glu": Activation(GLU, gate="sigmoid", te="glu"),
    "qgeglu": Activation(QGEGLU, gate="quick_gelu", te="qgeglu"),
    "quick_gelu": Activation(QGELU, hf=("quick_gelu",), te="qgelu"),
    "reglu": Activation(ReGLU, gate="relu", te="reglu"),
    "sigmoid": Activation(Sigmoid, torch=nn.Sigmoid, hf=("sigmoid",)),
    "situglu": Activation(SiTUGLU),
    "softplus": Activation(Softplus, torch=nn.Softplus),
    "squared_relu": Activation(SReLU, hf=("relu2",), te="srelu"),
    "sreglu": Activation(SReGLU, gate="squared_relu", te="sreglu"),
    "tanh": Activation(Tanh, torch=nn.Tanh, hf=("tanh",)),
}

GATED: Mapping[str, str] = {
    row.gate: name for name, row in ACTIVATIONS.items() if row.gate is not None
}
"""The name of the activation in which the function of another one gates."""

NORMS: Mapping[str, type[LayerNorm] | type[RMSNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
"""By their names in configurations of models; te's are those of the classes."""


class Layer(NamedTuple):
    """What computes the same as a module of torch.nn, with the same parameters.

    Attributes:
        operation: its class.
        example: arguments that make one, whose values mean nothing; None if the module cannot
            stand in a sequence.
    """

    operation: type[FusibleOperation]
    example: tuple[float, ...] | None = ()


LAYERS: Mapping[type[nn.Module], Layer] = {
    nn.CrossEntropyLoss: Layer(CrossEntropy, None),
    nn.Dropout: Layer(Dropout, (0.5,)),
    nn.Embedding: Layer(Embedding, (1, 1)),
    nn.Identity: Layer(Identity),
    nn.LayerNorm: Layer(LayerNorm, (1,)),
    nn.Linear: Layer(Linear, (1, 1)),
    nn.RMSNorm: Layer(RMSNorm, (1,)),
    **{row.torch: Layer(row.operation) for row in ACTIVATIONS.values() if row.torch is not None},
}
