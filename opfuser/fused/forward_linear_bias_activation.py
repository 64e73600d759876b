"""Forward GEMM and bias in one call."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from .. import gemm
from ..core.context import Contexts, ForwardArguments, ForwardResult
from ..core.fusion import Fusion
from ..errors import NotSupportedError
from ..op import FusedOperation
from ._linear import BIASES, LINEARS, AnyBias, AnyLinear, forward_refusal, insist


class ForwardLinearBiasActivation(FusedOperation):
    r"""Forward of BasicLinear and Bias: :math:`y = x W^T + b`, rounded once.

    Shapes as in ``Linear``, dtypes as in ``BasicLinear``. Saves what BasicLinear saves.
    For A elements of output 2A less traffic than the separate operations: the bias is not a pass
    of its own, and no output without bias is stored.

    Kernel: ATen's ``addmm``. An activation is not absorbed: its backward reads the sum before the
    activation, so that has to be stored in any case; ATen's ``_addmm_activation`` does not return
    it, and cuBLASLt's GELU epilogue is slower than GEMM and GELU apart. Left alone, the activation
    stays free for other fusions.

    Args:
        linear: the linear operation.
        bias: the bias, or None.
        activation: None.

    Raises:
        NotSupportedError: an activation is given, or ``linear`` reduces its output over ranks.
        InputError: in forward, as in the operations that it replaces.
    """

    fuse_forward_ops: ClassVar[Fusion]

    def __init__(self, *, linear: AnyLinear, bias: AnyBias | None, activation: None = None) -> None:
        where = type(self).__name__
        if activation is not None:
            raise NotSupportedError.explained(
                "activation must be None: no GEMM returns its output before and after one",
                where=where,
                received=repr(activation),
                remedy="Place the activation after the fused operation",
            )
        insist(forward_refusal(linear), where)
        super().__init__((linear,) if bias is None else (linear, bias))
        self._parts = linear, bias

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        linear, bias = self._parts
        x, w = linear.operands(basic_op_ctxs[0], input_)
        b = None if bias is None else bias.operand(x, w)
        return gemm.forward(x, w, b), [()] * len(basic_op_ctxs)


FUSION = Fusion(
    name="forward_linear_bias_activation",
    stage="forward",
    pattern=(LINEARS, BIASES),
    refuses=lambda linear, _, env: forward_refusal(linear),
    build=lambda linear, bias: ForwardLinearBiasActivation(linear=linear, bias=bias),
)
# A static method of te.ops, which code of users calls.
ForwardLinearBiasActivation.fuse_forward_ops = FUSION
