"""Norm and linear operation in both passes; the norm's output is recomputed, not saved."""

from __future__ import annotations

from ..basic.add_extra_input import AddExtraInput
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..core.fusion import Env, Fusion, Optional, Refusal
from ._linear import BIASES, LINEARS, AnyBias, AnyLinear, insist
from ._residual_sum import left_to_gemm
from .parts.linear import refuse
from .parts.norm import NormPart
from .parts.part import Part
from .parts.pipeline import Pipeline
from .parts.quantized_linear import linear_part
from .pointwise_norm import PointwiseNorm

Norm = RMSNorm | LayerNorm | PointwiseNorm


class NormLinear(Pipeline):
    r"""AddExtraInput, MakeExtraOutput, RMSNorm or LayerNorm, BasicLinear and Bias.

    .. math:: s = z + x, \quad y = \mathrm{norm}(s)\, W^T + b

    Sum, MakeExtraOutput and bias are optional. A PointwiseNorm, with any chain of element-wise
    operations in place of the sum, may replace sum, MakeExtraOutput and norm. Saves s, the norm's
    statistics (one or two per row) and the tensors of a chain, but not the norm's output: A
    elements less for A elements of s.

    Backward first computes :math:`dn = dy\, W`. The kernel that computes the gradients of norm and
    residual from dn and s also recomputes :math:`n = \mathrm{norm}(s)`, with A elements of traffic,
    as many as reading a saved n would take. :math:`dW = dy^T n` comes last.

    Kernel: ATen's GEMMs, and the norm kernels of opfuser; no ATen norm backward returns the output.

    Args:
        norm: the norm, or a PointwiseNorm.
        linear: the linear operation.
        add: the sum with the extra input, which comes first, or None.
        make_extra: publishes the sum, or None.
        bias: the bias after the linear operation, or None.
        env: of the call, whose recipe the linear operation follows; None means no recipe.

    Raises:
        NotSupportedError: ``linear`` exchanges data between ranks, or there is a sum or a
            MakeExtraOutput before a PointwiseNorm.
        InputError: in forward, as in the operations that it replaces.
    """

    def __init__(
        self,
        *,
        norm: Norm,
        linear: AnyLinear,
        add: AddExtraInput | None = None,
        make_extra: MakeExtraOutput | None = None,
        bias: AnyBias | None = None,
        env: Env | None = None,
    ) -> None:
        where = type(self).__name__
        first: Part
        if isinstance(norm, PointwiseNorm):
            insist(_run_refusal(add, make_extra), where)
            (first,) = norm.parts
        else:
            first = NormPart(add, make_extra, norm)
        super().__init__([first, linear_part(linear, bias, where, env=env)])


def _run_refusal(add: AddExtraInput | None, make_extra: MakeExtraOutput | None) -> Refusal | None:
    """Why a PointwiseNorm cannot be fused with the operations before it."""
    if add is not None or make_extra is not None:
        return Refusal("LAYOUT", "the run before the norm is not the first of the operations")
    return None


def _refuses(
    add: AddExtraInput | None,
    make_extra: MakeExtraOutput | None,
    norm: Norm,
    linear: AnyLinear,
    bias: AnyBias | None,
    *,
    env: Env,
) -> Refusal | None:
    if isinstance(norm, PointwiseNorm):
        if not norm.planned:
            return Refusal("LAYOUT", "PointwiseNorm was placed by hand, and runs on its own")
        no = _run_refusal(add, make_extra)
        if no is not None:
            return no
    return left_to_gemm(add, env) or refuse([linear], env)


FUSION = Fusion(
    name="norm_linear",
    stage="joint",
    pattern=(
        Optional(AddExtraInput),
        Optional(MakeExtraOutput),
        (RMSNorm, LayerNorm, PointwiseNorm),
        LINEARS,
        Optional(*BIASES),
    ),
    refuses=_refuses,
    build=lambda add, make_extra, norm, linear, bias, *, env=None: NormLinear(
        add=add, make_extra=make_extra, norm=norm, linear=linear, bias=bias, env=env
    ),
)
