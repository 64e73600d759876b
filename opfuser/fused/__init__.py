"""The built-in fusions, and the fused operations that they build."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from ..core.fusion import ANYWHERE, Env, Fusion, Match, Refusal, Requires, Scan, Stage
from ..core.op_base import FusibleOperation
from ..runtime.later import load, names

if TYPE_CHECKING:  # what is loaded when it is used: names and places, as in _LATER
    from .activation_linear import ActivationLinear
    from .backward_activation_bias import BackwardActivationBias
    from .backward_add_norm import BackwardAddLayerNorm, BackwardAddRMSNorm
    from .backward_linear_add import BackwardLinearAdd
    from .backward_linear_scale import BackwardLinearScale
    from .backward_qk_norm_rotary import BackwardQKNormRotary
    from .forward_add_norm import ForwardAddLayerNorm, ForwardAddRMSNorm
    from .forward_linear_bias_activation import ForwardLinearBiasActivation
    from .forward_linear_bias_add import ForwardLinearBiasAdd
    from .forward_linear_scale_add import ForwardLinearScaleAdd
    from .forward_qk_norm_rotary import ForwardQKNormRotary
    from .grouped_mlp import GroupedMLP
    from .linear_cross_entropy import LinearCrossEntropy
    from .norm_linear import NormLinear
    from .pointwise_chain import PointwiseChain
    from .pointwise_norm import PointwiseNorm
    from .quantized_grouped_linear import QuantizedGroupedLinear
    from .quantized_linear import QuantizedLinear
    from .recompute_mlp import RecomputeMLP

__all__ = [
    "FUSIONS",
    "ActivationLinear",
    "BackwardActivationBias",
    "BackwardAddLayerNorm",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "BackwardQKNormRotary",
    "ForwardAddLayerNorm",
    "ForwardAddRMSNorm",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "ForwardQKNormRotary",
    "GroupedMLP",
    "LinearCrossEntropy",
    "NormLinear",
    "PointwiseChain",
    "PointwiseNorm",
    "QuantizedGroupedLinear",
    "QuantizedLinear",
    "RecomputeMLP",
]

# The module of each fused operation.
_LATER = {
    "ActivationLinear": "activation_linear",
    "BackwardActivationBias": "backward_activation_bias",
    "BackwardAddLayerNorm": "backward_add_norm",
    "BackwardAddRMSNorm": "backward_add_norm",
    "BackwardLinearAdd": "backward_linear_add",
    "BackwardLinearScale": "backward_linear_scale",
    "BackwardQKNormRotary": "backward_qk_norm_rotary",
    "ForwardAddLayerNorm": "forward_add_norm",
    "ForwardAddRMSNorm": "forward_add_norm",
    "ForwardLinearBiasActivation": "forward_linear_bias_activation",
    "ForwardLinearBiasAdd": "forward_linear_bias_add",
    "ForwardLinearScaleAdd": "forward_linear_scale_add",
    "ForwardQKNormRotary": "forward_qk_norm_rotary",
    "GroupedMLP": "grouped_mlp",
    "LinearCrossEntropy": "linear_cross_entropy",
    "NormLinear": "norm_linear",
    "PointwiseChain": "pointwise_chain",
    "PointwiseNorm": "pointwise_norm",
    "QuantizedGroupedLinear": "quantized_grouped_linear",
    "QuantizedLinear": "quantized_linear",
    "RecomputeMLP": "recompute_mlp",
}

__getattr__, __dir__ = names(globals(), _LATER)


class BuiltIn(Fusion):
    """A fusion whose module is loaded when a plan has an operation that may begin its pattern.

    Args:
        name: unique name, as are stage, ``requires`` and ``enabled`` that of the fusion.
        stage: as there.
        begins: the modules of those operations, separated by spaces; none for any operation.
        place: its module, if that has another name, and what it is called there.
        requires: as there.
        enabled: as there.
    """

    begins: frozenset[str]
    place: str

    def __init__(
        self,
        name: str,
        stage: Stage,
        begins: str,
        place: str = "",
        *,
        requires: Requires = ANYWHERE,
        enabled: bool = True,
    ) -> None:
        vars(self).update(name=name, stage=stage, requires=requires, enabled=enabled)
        vars(self).update(begins=frozenset(begins.split()), place=place or f"{name}:FUSION")

    @cached_property
    def loaded(self) -> Fusion:
        """The fusion itself."""
        return cast("Fusion", load(f"{__name__}.{self.place}"))

    def scan(
        self,
        ops: Sequence[FusibleOperation],
        env: Env,
        veto: Callable[[Match], Refusal | None] | None = None,
    ) -> Scan:
        modules = (type(op).__module__.rpartition(".")[2] for op in ops)
        if self.begins and self.begins.isdisjoint(modules):
            return Scan(list(ops), [], [], [])
        return self.loaded.scan(ops, env, veto)


for _field in ("pattern", "build", "refuses", "elements", "looks_behind", "builds_for_env"):
    setattr(BuiltIn, _field, property(attrgetter(f"loaded.{_field}")))

_ADD, _MAKE, _NORMS = "add_extra_input", "make_extra_output", "layer_norm rms_norm"
_LINEARS = "basic_linear merged_linear lora_linear"
_ACTIVATIONS = "bias activation gated_activation"
_TRITON, _RECIPE = Requires(package="triton"), Requires(recipe=True)

# The first fusion that matches replaces the operations; joint fusions come before those of one
# pass. Where one pattern ends as another begins, the fusion that saves more bytes comes first, and
# a pattern comes before a shorter one with the same beginning:
# - The head is fused with the loss, whose logits are then never whole, not with the norm before it.
# - An activation is fused with the linear behind it (2H less to save) rather than with the bias and
#   other element-wise operations before it (2H less to move, and only until the GEMM reads it).
# - A chain of element-wise operations before a norm joins the norm's kernel (4A moved for bias,
#   dropout, sum and norm, instead of 5A in two kernels); any other is a kernel of its own. Only
#   then does the linear behind that norm join, for A less to save: the bias behind the linear may
#   begin another chain, where backward moves A less for it than as a part of the linear.
# - A sum alone joins a norm or a GEMM, as _residual_sum decides.
# - Where a recipe of quantised compute is active, what is left of linear operations follows it.
# - A residual gradient joins the norm's kernel or the GEMM before a factor joins the GEMM.
FUSIONS: tuple[Fusion, ...] = (
    BuiltIn("linear_cross_entropy", "joint", "basic_linear"),
    BuiltIn("recompute_mlp", "joint", f"{_ADD} {_MAKE} {_NORMS}", enabled=False),
    BuiltIn(
        "recompute_mlp_where_asked",
        "joint",
        f"{_ADD} {_MAKE} {_NORMS}",
        "recompute_mlp:FUSION_WHERE_ASKED",
    ),
    BuiltIn("activation_linear_add", "joint", _ACTIVATIONS, "activation_linear:FUSION_WITH_SUM"),
    BuiltIn("activation_linear", "joint", _ACTIVATIONS),
    BuiltIn("pointwise_norm", "joint", "", requires=_TRITON),
    BuiltIn("pointwise_chain", "joint", "", requires=_TRITON),
    BuiltIn("norm_linear", "joint", f"{_ADD} {_MAKE} {_NORMS} pointwise_norm"),
    BuiltIn("quantized_linear", "joint", _LINEARS, requires=_RECIPE),
    BuiltIn("grouped_mlp", "joint", "permute grouped_linear"),
    BuiltIn("quantized_grouped_linear", "joint", "grouped_linear", requires=_RECIPE),
    BuiltIn("forward_qk_norm_rotary", "forward", "qk_norm"),
    BuiltIn("forward_linear_scale_add", "forward", _LINEARS),
    BuiltIn("forward_linear_bias_add", "forward", _LINEARS),
    BuiltIn("forward_add_rms_norm", "forward", _ADD, "forward_add_norm:FUSION_OF_RMS_NORM"),
    BuiltIn("forward_add_layer_norm", "forward", _ADD, "forward_add_norm:FUSION_OF_LAYER_NORM"),
    BuiltIn("forward_linear_bias_activation", "forward", _LINEARS),
    BuiltIn("backward_qk_norm_rotary", "backward", "qk_norm"),
    BuiltIn("backward_add_rms_norm", "backward", _MAKE, "backward_add_norm:FUSION_OF_RMS_NORM"),
    BuiltIn("backward_add_layer_norm", "backward", _MAKE, "backward_add_norm:FUSION_OF_LAYER_NORM"),
    BuiltIn("backward_linear_add", "backward", _MAKE),
    BuiltIn("backward_linear_scale", "backward", _LINEARS),
    BuiltIn("backward_activation_bias", "backward", "bias"),
)
"""The built-in fusions, in the order in which they are applied."""
