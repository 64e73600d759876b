"""A whole feed-forward block in both passes, of which only the input is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor

from ..basic.add_extra_input import AddExtraInput
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..fusion import Env, Fusion, Optional, Refusal
from ..op import FusedOperation, OperationContext
from ._activation_part import ACTIVATIONS, Activation, ActivationPart, bias_refusal
from ._linear_part import LinearPart, refuse
from ._norm_part import NormPart
from ._residual_sum import refused_by_norm

__all__ = ["FUSION", "FUSION_WHERE_ASKED", "RecomputeMLP"]


class RecomputeMLP(FusedOperation):
    r"""AddExtraInput, MakeExtraOutput, a norm, two linears and the activation between them.

    .. math:: s = z + x, \quad y = f(\mathrm{norm}(s)\, W_1^T + b_1)\, W_2^T + b_2

    Sum, tap and biases may be absent; f is a plain or gated activation. Saves s and the norm's
    statistics, one or two per row: A elements for A elements of s, where NormLinear and
    ActivationLinear also save the A f / d of the activation's input. Backward computes the norm
    and the first linear again: a sixth more GEMM work in a step, two ninths where f is gated.

    Kernel: ATen's GEMMs, and the norm and activation kernels of opfuser.
    ``torch.utils.checkpoint`` would also run the second linear again, whose output nobody reads.

    Args:
        norm: the norm.
        linear1: the first linear operation.
        activation: the activation.
        linear2: the second linear operation.
        add: the sum with the extra input, which comes first, or None.
        make_extra: what publishes the sum, or None.
        bias1: the bias after the first linear operation, or None.
        bias2: the bias after the second one, or None.

    Raises:
        NotSupportedError: a linear operation exchanges data between ranks.
        InputError: in forward, as in the operations that it replaces.
    """

    _parts: tuple[NormPart, LinearPart, ActivationPart, LinearPart]

    def __init__(
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
    ) -> None:
        where = type(self).__name__
        in_gemm = bias_refusal(bias1, activation) is not None
        parts = (
            NormPart(add, make_extra, norm),
            LinearPart(linear1, bias1 if in_gemm else None, where, keep_bias=True),
            ActivationPart(None if in_gemm else bias1, activation, where),
            LinearPart(linear2, bias2, where),
        )
        super().__init__(op for part in parts for op in part.ops)
        self._parts = parts

    def _split(self, ctxs: list[OperationContext]) -> list[list[OperationContext]]:
        left = iter(ctxs)
        return [list(islice(left, len(part.ops))) for part in self._parts]

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        norm, linear1, activation, linear2 = self._parts
        ctxs = self._split(basic_op_ctxs)
        y, extra_outputs = norm.forward(ctxs[0], input_, basic_op_extra_inputs)
        # Placed by hand, the norm may owe no gradient: then its output is what is saved.
        y = linear1.forward(ctxs[1], y, save_input=not norm.wants_grad(ctxs[0]))
        y = activation.forward(ctxs[2], y, save_input=False)
        y = linear2.forward(ctxs[3], y)
        nothing: list[tuple[()]] = [()] * (len(basic_op_ctxs) - len(ctxs[0]))
        return y, [*extra_outputs, *nothing]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]],
    ) -> tuple[
        Tensor | None,
        Sequence[Sequence[Tensor | None] | None],
        Sequence[Sequence[Tensor | None] | None],
    ]:
        norm, linear1, activation, linear2 = self._parts
        ctxs = self._split(basic_op_ctxs)
        wanted = norm.wants_grad(ctxs[0])
        n = norm.again(ctxs[0]) if wanted else linear1.saved_input(ctxs[1])
        inner = activation.backward(
            ctxs[2],
            linear2.input_grad(ctxs[3], grad_output),
            linear1.again(ctxs[1], n),
            ours=True,
            want_y=linear2.wants_input(ctxs[3]),
        )
        own = [*inner.parameters, *linear2.parameter_grads(ctxs[3], grad_output, inner.output)]
        dx = inner.input
        del inner
        assert dx is not None
        own = [*linear1.parameter_grads(ctxs[1], dx, n), *own]
        del n
        dn = linear1.input_grad(ctxs[1], dx) if wanted else None
        del dx
        grads = norm.backward(ctxs[0], dn, basic_op_grad_extra_outputs, want_y=False)
        nothing: list[tuple[()]] = [()] * (len(basic_op_ctxs) - len(ctxs[0]))
        return grads.input, [*grads.parameters, *own], [*grads.extra_inputs, *nothing]


def _refuses(add: AddExtraInput | None, *parts: Any, env: Env) -> Refusal | None:
    linears = [part for part in parts if isinstance(part, BasicLinear)]
    return refused_by_norm(add, env) or refuse(linears, env)


def _refuses_unless_asked(*parts: Any, env: Env) -> Refusal | None:
    if not any(getattr(part, "recompute_mlp", False) for part in parts):
        return Refusal("DISABLED", "no operation in it has recompute_mlp set")
    return _refuses(*parts, env=env)


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
    build=lambda add, make_extra, norm, linear1, bias1, activation, linear2, bias2: RecomputeMLP(
        add=add,
        make_extra=make_extra,
        norm=norm,
        linear1=linear1,
        bias1=bias1,
        activation=activation,
        linear2=linear2,
        bias2=bias2,
    ),
    enabled=False,
)

FUSION_WHERE_ASKED = replace(
    FUSION, name="recompute_mlp_where_asked", refuses=_refuses_unless_asked, enabled=True
)
