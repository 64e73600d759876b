"""What plans assume a plain ``torch.nn.Module`` returns, which they do not run, and its remedy."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.change_tracking import has_hooks, replaces_forward
from ..core.context import TensorFacts, autocast_dtype
from ..core.op_base import BasicOperation, FusedOperation
from ..runtime.later import load

if TYPE_CHECKING:
    from ..counterparts import Layer

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
    layer: Layer | None = load("opfuser.counterparts:LAYERS").get(type(module))
    if type(module) is not nn.Sequential and (layer is None or layer.example is None):
        return None
    if has_hooks(module) or replaces_forward(module) or _lacks_option(module):
        return None
    if layer is None:
        return Replacement("opfuser.Sequential", ())
    text = f'("{module.approximate}")' if isinstance(module, nn.GELU) else ""
    operations = _stand_ins(layer, getattr(module, "bias", None) is not None)
    return Replacement(f"opfuser.{layer.operation.__name__}{text}", operations)


def _lacks_option(module: nn.Module) -> bool:
    """Whether the module has an option that its operation does not have."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return None in module._parameters.values()
    return isinstance(module, nn.Embedding) and module.max_norm is not None


@functools.cache
def _stand_ins(layer: Layer, bias: bool) -> tuple[BasicOperation, ...]:
    known = signature(layer.operation).parameters
    how = {n: v for n, v in (("device", "meta"), ("bias", bias)) if n in known}
    made: Any = layer.operation(*layer.example or (), **how)
    return tuple(made.basic_ops) if isinstance(made, FusedOperation) else (made,)
