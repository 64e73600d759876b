"""A feed-forward block in both passes, which saves its input alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ..basic.add_extra_input import AddExtraInput
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.merged_linear import MergedBias
from ..basic.rms_norm import RMSNorm
from ..core.fusion import Env, Fusion, Optional, Refusal
from ._linear import BIASES, LINEARS, AnyBias, AnyLinear
from ._residual_sum import left_to_gemm
from .parts.activation import ACTIVATIONS, Activation, ActivationPart, bias_refusal
from .parts.linear import refuse
from .parts.norm import NormPart
from .parts.pipeline import Pipeline
from .parts.quantized_linear import linear_part


class RecomputeMLP(Pipeline):
    r"""AddExtraInput, MakeExtraOutput, a norm, and two linear operations around an activation.

    .. math:: s = z + x, \quad y = f(\mathrm{norm}(s)\, W_1^T + b_1)\, W_2^T + b_2

    Sum, MakeExtraOutput and biases are optional; f is a plain or gated activation. Saves s and the
    norm's statistics, one or two per row: A elements for A elements of s, where NormLinear and
    ActivationLinear also save the A f / d of the activation's input. Backward recomputes the norm
    and the first linear operation: a sixth more GEMM work in both passes together, two ninths if f
    is gated.

    Kernel: ATen's GEMMs, and the norm and activation kernels of opfuser. ``torch.utils.checkpoint``
    would also recompute the second linear operation, whose output is not needed.

    Args:
        norm: the norm.
        linear1: the first linear operation.
        activation: the activation.
        linear2: the second linear operation.
        add: the sum with the extra input, which comes first, or None.
        make_extra: publishes the sum, or None.
        bias1: the bias after the first linear operation, or None.
        bias2: the bias after the second one, or None.
        env: of the call, whose recipe the linear operations follow; None means no recipe.

    Raises:
        NotSupportedError: a linear operation exchanges data between ranks.
        InputError: in forward, as in the operations that it replaces.
    """

    small: ClassVar[int] = 0  # who asks for it asks for memory

    def __init__(  # noqa: PLR0913 - one for each operation
        self,
        *,
        norm: RMSNorm | LayerNorm,
        linear1: AnyLinear,
        activation: Activation,
        linear2: AnyLinear,
        add: AddExtraInput | None = None,
        make_extra: MakeExtraOutput | None = None,
        bias1: AnyBias | None = None,
        bias2: AnyBias | None = None,
        env: Env | None = None,
    ) -> None:
        where = type(self).__name__
        in_activation = None if isinstance(bias1, MergedBias) else bias1
        if bias_refusal(in_activation, activation) is not None:
            in_activation = None
        in_gemm = bias1 if in_activation is None else None
        super().__init__(
            [
                NormPart(add, make_extra, norm),
                linear_part(linear1, in_gemm, where, env=env),
                ActivationPart(in_activation, activation, where),
                linear_part(linear2, bias2, where, env=env),
            ]
        )


def _refuses(add: AddExtraInput | None, *parts: Any, env: Env) -> Refusal | None:
    linears = [part for part in parts if isinstance(part, LINEARS)]
    return left_to_gemm(add, env) or refuse(linears, env)


def _refuses_unless_asked(*parts: Any, env: Env) -> Refusal | None:
    if not any(getattr(part, "recompute_mlp", False) for part in parts):
        return Refusal("DISABLED", "no operation in it has recompute_mlp set")
    return _refuses(*parts, env=env)


_NAMES = "add make_extra norm linear1 bias1 activation linear2 bias2".split()


def _build(*ops: Any, env: Env | None = None) -> RecomputeMLP:
    return RecomputeMLP(**dict(zip(_NAMES, ops)), env=env)


FUSION = Fusion(
    name="recompute_mlp",
    stage="joint",
    pattern=(
        Optional(AddExtraInput),
        Optional(MakeExtraOutput),
        (RMSNorm, LayerNorm),
        LINEARS,
        Optional(*BIASES),
        ACTIVATIONS,
        LINEARS,
        Optional(*BIASES),
    ),
    refuses=_refuses,
    build=_build,
    enabled=False,
)

FUSION_WHERE_ASKED = replace(
    FUSION, name="recompute_mlp_where_asked", refuses=_refuses_unless_asked, enabled=True
)
