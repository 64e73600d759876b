# --8<-- [start:wrong]
import textwrap

import torch

from opfuser import BasicLinear, Bias, FusedOperation, Fusion
from opfuser.testing import check_fusion


class LinearBias(FusedOperation):
    """Forgets the bias in the last column."""

    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        linear, bias = self.basic_ops
        ctx = basic_op_ctxs[0]
        if ctx.requires_grad:
            needs = ctx.needs
            ctx.save_for_backward(
                input_ if needs.parameters[0] else None, linear.weight if needs.input else None
            )
        y = input_ @ linear.weight.t()
        y[..., :-1] += bias.bias[:-1]
        return y, [(), ()]


wrong = Fusion("linear_bias", "forward", (BasicLinear, Bias), lambda *ops: LinearBias(ops))
ops = [BasicLinear(4, 3), Bias(3)]
for op in ops:
    torch.nn.init.constant_(next(op.parameters()), 0.25)
try:
    check_fusion(wrong, ops, torch.ones(5, 4))
except AssertionError as error:
    print(textwrap.fill(str(error), 80))
# --8<-- [end:wrong]
