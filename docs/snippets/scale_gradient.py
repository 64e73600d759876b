# --8<-- [start:fused]
import torch
from layer_scale import LayerScale

import opfuser
from opfuser import ConstantScale, FusedOperation
from opfuser.testing import check_fusion


class LayerScaleGradient(FusedOperation):
    """Backward of LayerScale and ConstantScale: dx = (s * gamma) * dy, dgamma = s * sum(dy * x)."""

    def __init__(self, layer_scale, constant_scale):
        super().__init__((layer_scale, constant_scale))

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        s = basic_op_ctxs[1].settings.scale  # what forward multiplied by
        ctx = basic_op_ctxs[0]
        (x,) = ctx.saved_tensors  # LayerScale.Saved, whoever ran its forward
        (gamma,) = ctx.parameters
        dx = dgamma = None
        if ctx.needs.input:
            dx = grad_output * (s * gamma).to(grad_output.dtype)
        if ctx.needs.parameters[0]:
            dgamma = (grad_output * x).sum_to_size(gamma.shape).mul_(s)
        return dx, [(dgamma,), ()], [(), ()]


opfuser.register_backward_fusion(
    opfuser.Fusion(
        name="layer_scale_gradient",
        stage="backward",
        pattern=(LayerScale, ConstantScale),
        build=LayerScaleGradient,
    )
)
check_fusion("layer_scale_gradient", [LayerScale(6), ConstantScale(0.5)], torch.randn(5, 6))
# --8<-- [end:fused]
