# --8<-- [start:fused]
import torch
from layer_scale import LayerScale

import opfuser
from opfuser import AddExtraInput, FusedOperation, Refusal


class LayerScaleAdd(FusedOperation):
    """Forward of LayerScale and AddExtraInput: y = z + gamma * x, in one pass over memory."""

    def __init__(self, scale, add):
        super().__init__((scale, add))

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        (scale, add), (ctx, _) = self.basic_ops, basic_op_ctxs
        (z,) = basic_op_extra_inputs[1]
        if ctx.requires_grad:  # what LayerScale.op_forward saves
            wants_gamma = ctx.needs.parameters[0]
            ctx.save_for_backward(*LayerScale.Saved(input_ if wants_gamma else None))
        if z.shape != input_.shape or z.dtype != input_.dtype:
            return add.reference(scale.reference(input_), z), [(), ()]
        return torch.addcmul(z, input_, scale.gamma.to(z.dtype)), [(), ()]


# --8<-- [end:fused]


# --8<-- [start:fusion]
def refuses(scale, add, *, env):
    if scale.gamma.dtype != env.compute_dtype:
        return Refusal("DTYPE", f"gamma is {scale.gamma.dtype}, the run is {env.compute_dtype}")
    return None


handle = opfuser.register_forward_fusion(
    opfuser.Fusion(
        name="layer_scale_add",
        stage="forward",
        pattern=(LayerScale, AddExtraInput),
        refuses=refuses,
        build=LayerScaleAdd,
    )
)
# --8<-- [end:fusion]
