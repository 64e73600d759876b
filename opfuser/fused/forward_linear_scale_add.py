"""Forward GEMM, constant factor and residual add in one call."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from ..basic.add_extra_input import AddExtraInput
from ..basic.constant_scale import ConstantScale
from ..core.buffer_reuse import only_reference
from ..core.context import Contexts, ForwardArguments, ForwardResult
from ..core.fusion import Fusion
from ..op import FusedOperation
from ._linear import LINEARS, AnyLinear, forward_refusal, insist, linear_sum


class ForwardLinearScaleAdd(FusedOperation):
    r"""Forward of BasicLinear, ConstantScale and AddExtraInput: :math:`y = z + s\, x W^T`.

    The sum with a low-rank branch (Hu et al., LoRA, arXiv:2106.09685). z is the extra input, of the
    shape of y; it is overwritten if nothing else refers to it. If its dtype differs from the
    GEMM's, the three steps run separately, and the sum has the dtype to which torch promotes.

    Saves the same as BasicLinear. For A elements of output, 2A less traffic than the separate
    operations, 4A less if z is overwritten, and two roundings less.

    Kernel: ATen's ``addmm``, with s as its ``alpha``.

    Args:
        linear: the linear operation.
        scale: the factor.
        add: the sum with the extra input.

    Raises:
        NotSupportedError: ``linear`` reduces its output over ranks.
        InputError: in forward, as in the operations that it replaces.
    """

    fuse_forward_ops: ClassVar[Fusion]

    def __init__(self, *, linear: AnyLinear, scale: ConstantScale, add: AddExtraInput) -> None:
        insist(forward_refusal(linear), type(self).__name__)
        super().__init__((linear, scale, add))
        self._parts = linear, scale, add

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        linear, scale, add = self._parts
        ours = only_reference(given["basic_op_extra_inputs"][2])
        (z,) = given["basic_op_extra_inputs"][2]
        assert z is not None
        x, w = linear.operands(basic_op_ctxs[0], input_)
        (s,) = scale.frozen_settings(basic_op_ctxs[1])
        y = linear_sum(add, z, x, w, scale=s, in_place=ours)
        return y, [(), (), ()]


FUSION = Fusion(
    name="forward_linear_scale_add",
    stage="forward",
    pattern=(LINEARS, ConstantScale, AddExtraInput),
    # Also where a norm follows: a factor is part of the gradient GEMMs too, 2A less in backward.
    refuses=lambda linear, *_, env: forward_refusal(linear),
    build=lambda linear, scale, add: ForwardLinearScaleAdd(linear=linear, scale=scale, add=add),
)
# A static method of te.ops, which code of users calls.
ForwardLinearScaleAdd.fuse_forward_ops = FUSION
