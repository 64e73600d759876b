"""A feed-forward block in both passes, which saves its input alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ..basic.add_extra_input import AddExtraInput
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..fusion import Env, Fusion, Optional, Refusal
from ._residual_sum import NORM_AND_GEMM
from .parts.activation import ACTIVATIONS, Activation, ActivationPart, bias_refusal
from .parts.linear import refuse
from .parts.norm import NormPart
from .parts.pipeline import Pipeline
from .parts.quantized_linear import linear_part

__all__ = ["FUSION", "FUSION_WHERE_ASKED", "RecomputeMLP"]


class RecomputeMLP(Pipeline):
    r"""AddExtraInput, MakeExtraOutput, a norm, two linears and the activation between them.

    .. math:: s = z + x, \quad y = f(\mathrm{norm}(s)\, W_1^T + b_1)\, W_2^T + b_2

    Sum, MakeExtraOutput and biases are optional; f is a plain or gated activation. Saves s and the
    norm's statistics, one or two per row: A elements for A elements of s, where NormLinear and
    ActivationLinear also save the A f / d of the activation's input. Backward recomputes the norm
    and the first linear: a sixth more GEMM work in both passes, two ninths if f is gated.

    Kernel: ATen's GEMMs, and the norm and activation kernels of opfuser.
    ``torch.utils.checkpoint`` would also recompute the second linear, whose output is not read.

    Args:
        norm: the norm.
        linear1: the first linear operation.
        activation: the activation.
        linear2: the second linear operation.
        add: the sum with the extra input, which comes first, or None.
        make_extra: publishes the sum, or None.
        bias1: the bias after the first linear operation, or None.
        bias2: the bias after the second one, or None.
        env: of the call, whose recipe the linear operations follow; None: there is none.

    Raises:
        NotSupportedError: a linear operation exchanges data between ranks.
        InputError: in forward, as in the operations that it replaces.
    """

    small: ClassVar[int] = 0  # who asks for it asks for memory

    def __init__(  # noqa: PLR0913 - one for each operation
        self,
        *,
        norm: RMSNorm | LayerNorm,
        linear1: BasicLinear,
        activation: Activation,
        linear2: BasicLinear,
        add: AddExtraInput | None = None,
        make_extra: MakeExtraOutput | None = None,
        bias1: Bias | None = None,
        bias2: Bias | None = None,
        env: Env | None = None,
    ) -> None:
        where = type(self).__name__
        in_gemm = bias_refusal(bias1, activation) is not None
        super().__init__(
            [
                NormPart(add, make_extra, norm),
                linear_part(linear1, bias1 if in_gemm else None, where, env=env),
                ActivationPart(None if in_gemm else bias1, activation, where),
                linear_part(linear2, bias2, where, env=env),
            ]
        )


def _refuses(add: AddExtraInput | None, *parts: Any, env: Env) -> Refusal | None:
    linears = [part for part in parts if isinstance(part, BasicLinear)]
    return NORM_AND_GEMM.refuses((add,), env) or refuse(linears, env)


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
        BasicLinear,
        Optional(Bias),
        ACTIVATIONS,
        BasicLinear,
        Optional(Bias),
    ),
    refuses=_refuses,
    build=_build,
    enabled=False,
)

FUSION_WHERE_ASKED = replace(
    FUSION, name="recompute_mlp_where_asked", refuses=_refuses_unless_asked, enabled=True
)
