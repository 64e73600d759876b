"""What plans assume a plain ``torch.nn.Module`` returns, which they do not run, and its remedy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..basic import Dropout, Embedding, Identity, LayerNorm, RMSNorm
from ..basic.activation import GELU, ReLU, Sigmoid, SiLU, Softplus, Tanh
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..change_tracking import has_hooks, replaces_forward
from ..context import TensorFacts, autocast_dtype
from ..op import BasicOperation

__all__ = ["Replacement", "assumed_output", "is_known", "replacement"]

# Modules that autocast runs in its dtype.
_LOWERED = (
    nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention,
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
# Modules that autocast runs in fp32 on a GPU; on a CPU they keep the dtype of their input.
_RAISED = (
    nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.Softmax, nn.LogSoftmax,
    nn.Softmin, nn.Softplus,
)  # fmt: skip


def is_known(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's own, whose output follows from its type."""
    if type(module) is nn.Sequential:
        return all(map(is_known, module))
    return type(module).__module__.startswith("torch.nn.modules.")


def assumed_output(module: nn.Module, x: TensorFacts | Tensor) -> TensorFacts:
    """The output of ``module`` for an input like ``x``, as far as plans depend on it.

    It requires grad if the input or a parameter does, and is on the device of the parameters, or
    where the input is if they are on none. A floating-point dtype stays, unless autocast changes
    it; integers become the parameters' dtype, as in an embedding.
    """
    if type(module) is nn.Sequential:
        out = TensorFacts(x.dtype, x.device, x.requires_grad)
        for inner in module:
            out = assumed_output(inner, out)
        return out
    parameters = list(_floating(module))
    device = parameters[0].device if parameters else x.device
    if device.type == "meta":
        device = x.device  # its parameters are brought there when it is called
    requires_grad = x.requires_grad or any(p.requires_grad for p in parameters)
    return TensorFacts(
        _dtype(module, x, parameters), device, torch.is_grad_enabled() and requires_grad
    )


def _floating(module: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in module.parameters() if p.is_floating_point())


def _dtype(
    module: nn.Module, x: TensorFacts | Tensor, parameters: list[nn.Parameter]
) -> torch.dtype:
    if not x.dtype.is_floating_point:
        return parameters[0].dtype if parameters else x.dtype
    lower = autocast_dtype(x.device)
    if lower is None or x.dtype == torch.float64:  # which autocast leaves alone
        return x.dtype
    if isinstance(module, _RAISED):
        return torch.float32 if x.device.type == "cuda" else x.dtype
    # Matrices of an unknown module are assumed to be for GEMMs, which autocast runs in its dtype.
    multiplies = not is_known(module) and any(p.dim() > 1 for p in parameters)
    return lower if multiplies or isinstance(module, _LOWERED) else x.dtype


class Replacement(NamedTuple):
    """What can stand in place of a plain module, so that it does not separate groups.

    Attributes:
        text: as it is written in a program, such as ``opfuser.GELU("none")``.
        operations: of the types that fusions would meet; their sizes and options mean nothing.
            None for a container.
    """

    text: str
    operations: tuple[BasicOperation, ...]


def replacement(module: nn.Module) -> Replacement | None:
    """The operation that computes what a plain module does; None where there is none.

    Only for the exact types of torch's modules: a subclass may compute something else, and so may
    a module with hooks or a forward of its own.
    """
    known = _REPLACEMENTS.get(type(module))
    found = None if known is None else known(module)
    if found is None or has_hooks(module) or replaces_forward(module):
        return None
    text, kinds = found
    return Replacement(f"opfuser.{text}", tuple(map(_stand_in, kinds)))


@functools.cache
def _stand_in(kind: Callable[[], BasicOperation]) -> BasicOperation:
    return kind()


def _linear() -> BasicOperation:
    return BasicLinear(1, 1, device="meta")


def _bias() -> BasicOperation:
    return Bias(1, device="meta")


def _dropout() -> BasicOperation:
    return Dropout(0.5)


def _layer_norm() -> BasicOperation:
    return LayerNorm(1, device="meta")


def _rms_norm() -> BasicOperation:
    return RMSNorm(1, device="meta")


def _embedding() -> BasicOperation:
    return Embedding(1, 1, device="meta")


_Kinds = tuple[Callable[[], BasicOperation], ...]
# Not for modules with options that the operation does not have.
_REPLACEMENTS: dict[type[nn.Module], Callable[[Any], tuple[str, _Kinds] | None]] = {
    nn.Dropout: lambda m: ("Dropout", (_dropout,)),
    nn.Embedding: lambda m: ("Embedding", (_embedding,)) if m.max_norm is None else None,
    nn.GELU: lambda m: (f'GELU("{m.approximate}")', (GELU,)),
    nn.Identity: lambda m: ("Identity", (Identity,)),
    nn.LayerNorm: lambda m: None if m.bias is None else ("LayerNorm", (_layer_norm,)),
    nn.Linear: lambda m: ("Linear", (_linear,) if m.bias is None else (_linear, _bias)),
    nn.RMSNorm: lambda m: None if m.weight is None else ("RMSNorm", (_rms_norm,)),
    nn.ReLU: lambda m: ("ReLU", (ReLU,)),
    nn.Sequential: lambda m: ("Sequential", ()),
    nn.SiLU: lambda m: ("SiLU", (SiLU,)),
    nn.Sigmoid: lambda m: ("Sigmoid", (Sigmoid,)),
    nn.Softplus: lambda m: ("Softplus", (Softplus,)),
    nn.Tanh: lambda m: ("Tanh", (Tanh,)),
}
