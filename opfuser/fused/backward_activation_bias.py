"""Gradients of an activation and of the bias before it, in one kernel."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..basic.activation import ACTIVATIONS, _Activation
from ..basic.bias import Bias
from ..core.context import BackwardResult, Contexts, Extras
from ..core.fusion import Fusion
from ..kernels.activation import activation_backward
from ..op import FusedOperation


class BackwardActivationBias(FusedOperation):
    r"""Backward of Bias and an activation: :math:`dx = dy\, f'(x + b)`, :math:`db = \sum dx`.

    The sum is over all dimensions but the last. Reads what the activation saved, its input.
    Summed while it is computed, dx of A elements is not read again: 3A of traffic instead of 4A.

    Kernel: opfuser's ``activation_backward``, which sums in fp32 in the same launch; ATen has the
    backward of each activation and ``sum``, but nothing that does both. On a CPU they are ATen's,
    called block by block where the tensors outgrow the cache: that also avoids the full-size
    intermediates of an activation that takes several passes, and the fp32 copy of dx for the sum.

    Args:
        bias: the bias, which comes first in forward.
        activation: the element-wise activation.
    """

    fuse_backward_ops: ClassVar[Fusion]

    def __init__(self, *, bias: Bias, activation: _Activation) -> None:
        super().__init__((bias, activation))
        self._parts = bias, activation

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        _, activation = self._parts
        (function,) = activation.frozen_settings(basic_op_ctxs[1])
        needs = basic_op_ctxs[0].needs
        needs_db = bool(needs.parameters) and needs.parameters[0]
        (x,) = basic_op_ctxs[1].saved_tensors
        if x.shape != grad_output.shape:  # saved as rows by a forward fusion
            x = x.view_as(grad_output)
        grads = activation_backward(grad_output, x, function, None, needs.input, needs_db, False)
        return grads.dx, [(grads.db,) if needs.parameters else (), ()], [(), ()]


FUSION = Fusion(
    name="backward_activation_bias",
    stage="backward",
    pattern=(Bias, ACTIVATIONS),
    build=lambda bias, activation: BackwardActivationBias(bias=bias, activation=activation),
)
# A static method of te.ops, which code of users calls.
BackwardActivationBias.fuse_backward_ops = FUSION
