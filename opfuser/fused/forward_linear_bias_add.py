"""Forward GEMM, bias and residual add in one call."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from ..basic.add_extra_input import AddExtraInput
from ..core.buffer_reuse import only_reference
from ..core.context import Contexts, ForwardArguments, ForwardResult
from ..core.fusion import Fusion, Optional
from ..op import FusedOperation
from ._linear import BIASES, LINEARS, AnyBias, AnyLinear, forward_refusal, insist, linear_sum
from ._residual_sum import left_to_norm


class ForwardLinearBiasAdd(FusedOperation):
    r"""Forward of BasicLinear, Bias and AddExtraInput: :math:`y = z + x W^T + b`.

    z is the extra input, of the shape of y. It is overwritten if nothing else refers to it. If its
    dtype differs from the GEMM's, as with a residual in fp32 under autocast, the sum is a separate
    pass, in the dtype to which torch promotes.

    Saves the same as BasicLinear. For A elements of output, 2A less traffic than a GEMM with bias
    and a separate sum if z is overwritten. Otherwise the traffic is the same without a bias,
    because the GEMM starts from a copy of z, with one rounding less. On a GPU, a bias is added with
    the product and the sum follows, with the same traffic; if a norm follows, it computes the sum
    instead.

    Kernel: ATen's ``addmm``, which accumulates onto z.

    Args:
        linear: the linear operation.
        bias: the bias, or None.
        add: the sum with the extra input.

    Raises:
        NotSupportedError: ``linear`` reduces its output over ranks.
        InputError: in forward, as in the operations that it replaces.
    """

    fuse_forward_ops: ClassVar[Fusion]

    def __init__(self, *, linear: AnyLinear, bias: AnyBias | None, add: AddExtraInput) -> None:
        insist(forward_refusal(linear), type(self).__name__)
        super().__init__((linear, add) if bias is None else (linear, bias, add))
        self._parts = linear, bias, add

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        linear, bias, add = self._parts
        ours = only_reference(given["basic_op_extra_inputs"][-1])
        (z,) = given["basic_op_extra_inputs"][-1]
        assert z is not None
        x, w = linear.operands(basic_op_ctxs[0], input_)
        b = None if bias is None else bias.operand(x, w)
        y = linear_sum(add, z, x, w, b, in_place=ours)
        return y, [()] * len(basic_op_ctxs)


FUSION = Fusion(
    name="forward_linear_bias_add",
    stage="forward",
    pattern=(LINEARS, Optional(*BIASES), AddExtraInput),
    refuses=lambda linear, *_, env, behind: forward_refusal(linear) or left_to_norm(env, behind),
    build=lambda linear, bias, add: ForwardLinearBiasAdd(linear=linear, bias=bias, add=add),
)
# A static method of te.ops, which code of users calls.
ForwardLinearBiasAdd.fuse_forward_ops = FUSION
