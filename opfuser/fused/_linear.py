"""What fusions with a linear operation share: refusals, and the sum behind its GEMM."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from .. import gemm
from ..basic.add_extra_input import AddExtraInput
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..basic.lora_linear import LoRALinear
from ..basic.merged_linear import BasicMergedLinear, MergedBias
from ..core.fusion import Refusal
from ..errors import NotSupportedError

# What patterns take for a linear operation and its bias, and how these are called.
LINEARS = (BasicLinear, BasicMergedLinear, LoRALinear)
BIASES = (Bias, MergedBias)
AnyLinear: TypeAlias = BasicLinear | BasicMergedLinear | LoRALinear
AnyBias: TypeAlias = Bias | MergedBias


def communication(linear: AnyLinear, step: str) -> Refusal:
    """The refusal of a linear operation whose ranks exchange data at ``step``."""
    sharding = linear.sharding
    parallel = "sequence-" if sharding.sequence_parallel else "tensor-"
    return Refusal(
        "COMMUNICATION",
        f"{parallel}parallel BasicLinear in {sharding.mode} mode communicates {step}",
    )


def forward_refusal(linear: AnyLinear) -> Refusal | None:
    """Why nothing can be added in the forward GEMM of ``linear``: it is reduced afterwards."""
    if linear.sharding.mode == "row":
        return communication(linear, "right after its forward GEMM")
    return None


def backward_refusal(linear: AnyLinear) -> Refusal | None:
    """Why the gradient GEMMs of ``linear`` are not all there is to its backward."""
    if linear.sharding.mode == "column":
        return communication(linear, "right after its input-gradient GEMM")
    if linear.sharding.scatters_output:
        return communication(linear, "before its gradient GEMMs")
    return None


def insist(refusal: Refusal | None, where: str) -> None:
    """Raises NotSupportedError with ``refusal``, for a fused operation constructed by hand."""
    if refusal is not None:
        raise NotSupportedError.explained(
            refusal.detail,
            where=where,
            remedy="Leave the operations separate, and they fuse where that is possible",
        )


def linear_sum(
    add: AddExtraInput,
    z: Tensor,
    x: gemm.Operand,
    w: gemm.Weight,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    in_place: bool = False,
) -> Tensor:
    """``z + s x Wᵀ + b``, in one GEMM where z has the shape and dtype of its output.

    Else factor and sum are passes of their own, and the sum has the dtype of torch's promotion.

    Args:
        in_place: whether z may be written to.

    Raises:
        InputError: z has not the shape of the output.
    """
    if z.dtype == w.dtype and z.shape == (*x.shape[:-1], w.shape[0]):
        return gemm.forward(x, w, bias, scale=scale, add=z, in_place=in_place)
    y = gemm.forward(x, w, bias)
    return add.reference(y if scale is None else y * scale, z)
