# --8<-- [start:code]
import torch

import opfuser as ops
from opfuser.fuser import register_forward_fusion  # was: from transformer_engine.pytorch.ops.fuser


def only_sums(op_list, **unused):
    """A fusion of one's own that calls that of a fused operation."""
    return ops.fused.ForwardLinearScaleAdd.fuse_forward_ops(op_list, **unused)


experts = ops.GroupedLinear(2, 64, 64)
experts.make_grouped_weights()
print(experts.has_bias, experts.weight.shape)

model = ops.Sequential(ops.BasicLinear(64, 64), ops.ConstantScale(0.1), ops.AddExtraInput())
model[0].reset_recipe_state(recipe=None)
x = torch.randn(8, 64)
with ops.disable("forward_linear_scale_add"), register_forward_fusion(only_sums, name="sums"):
    print(model.plan(x, x).fused("forward"))
# --8<-- [end:code]
