"""Layers of opfuser for the ``kernels`` library, which gives modules other forwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...applying.decisions import Application
from ...applying.forwards import State, state_of
from ...reading.recording import is_tracing
from ...runtime.libraries import required

LAYERS = ("GeGLUMLP", "RMSNorm", "RMSNormZeroCentered", "SwiGLUMLP")
_DEVICES = ("cpu", "cuda", "rocm")
# Traces are shared by all modules of a class.
_APPLICATION = Application()


class _Layer(nn.Module):
    """What a module's own forward computes, by a sequence of operations where it is read whole.

    The library takes the function alone, and calls it with the modules that it kernelizes.
    """

    can_torch_compile = True  # torch.compile traces the forward of the module's class
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Any:
        """The result of the module's class for the same input."""
        if torch.compiler.is_compiling() or is_tracing():
            return type(self).forward(self, hidden_states)
        return _state(self).call(self, vars(self), (hidden_states,), {})


def _state(module: nn.Module) -> State:
    state = state_of(module)
    if state is None:
        state = State(_APPLICATION)
        module.__dict__["_opfuser_applied"] = state
    return state


@dataclass(frozen=True)
class _Repository:
    """What the library loads a layer from."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        """The class whose forward takes the place of another."""
        return _Layer

    def __str__(self) -> str:
        return f"opfuser, layer `{self.layer_name}`"


def kernel_mapping() -> dict[str, dict[str, dict[Any, Any]]]:
    """Layers of opfuser as a mapping of the ``kernels`` library.

    ``with kernels.use_kernel_mapping(opfuser.hf.kernel_mapping()): kernels.kernelize(model,
    mode=...)`` has norms and gated feed-forward blocks be computed by opfuser where their classes
    are marked with one of these names. What such a class computes is read as :func:`opfuser.apply`
    reads it: an operation that is not explained leaves the call to the class, and
    :func:`opfuser.hf.report` says why. There are layers for training and for inference; under
    ``torch.compile`` the forward of the class runs. Attention is no layer of that library: see
    :func:`register_attention`.

    Returns:
        Repositories by name of the layer, device and mode.

    Raises:
        MissingPackageError: there is no ``kernels``.
    """
    mode = required("kernels:Mode", "opfuser.hf.kernel_mapping", "kernels")
    modes = [
        first | second
        for first in (mode.TRAINING, mode.INFERENCE)
        for second in (first, mode.TORCH_COMPILE)
    ]
    return {
        name: {device: dict.fromkeys(modes, _Repository(name)) for device in _DEVICES}
        for name in LAYERS
    }
