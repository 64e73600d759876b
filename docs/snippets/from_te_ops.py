# --8<-- [start:code]
import torch

import opfuser as te_ops  # was: import transformer_engine.pytorch.ops as te_ops


class ForwardScaleAdd(te_ops.FusedOperation):
    def __init__(self, *, scale, add):
        super().__init__((scale, add))

    def fuser_forward(
        self,
        basic_op_ctxs,
        input_,
        *,
        basic_op_extra_inputs,
        prev_op_grad_output_quantizer,
        next_op_input_quantizer,
        basic_op_kwargs,
    ):
        (extra,) = basic_op_extra_inputs[1]
        output = torch.add(extra, input_, alpha=self.basic_ops[0].scale)
        return output, [() for _ in range(2)]

    @staticmethod
    def fuse_forward_ops(ops, **unused):
        out = []
        while ops:
            window, ops = ops[:2], ops[2:]
            types = [type(op) for op in window]
            if types == [te_ops.ConstantScale, te_ops.AddExtraInput]:
                out.append(ForwardScaleAdd(scale=window[0], add=window[1]))
            else:
                out.append(window[0])
                ops = window[1:] + ops
        return out


te_ops.register_forward_fusion(ForwardScaleAdd.fuse_forward_ops)

model = te_ops.Sequential(
    te_ops.Linear(64, 64),
    te_ops.ConstantScale(0.1),
    te_ops.AddExtraInput(),
)
x = torch.randn(8, 64)
y = model(x, x)
print(model.plan(x, x).fused("forward"))
# --8<-- [end:code]
