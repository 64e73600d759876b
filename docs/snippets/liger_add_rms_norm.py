# --8<-- [start:fused]
from importlib.util import find_spec

import torch

import opfuser
from opfuser import AddExtraInput, FusedOperation, MakeExtraOutput, Refusal, Requires, RMSNorm

if find_spec("liger_kernel"):  # else the plan says that it is missing
    from liger_kernel.ops import fused_add_rms_norm_forward


class LigerAddRMSNorm(FusedOperation):
    """Forward of s = x + z and y = norm(s), RMSNorm, by the kernel of Liger-Kernel."""

    def fuser_forward(self, basic_op_ctxs, x, *, basic_op_extra_inputs, **unused):
        (add, _, norm), ctx = self.basic_ops, basic_op_ctxs[2]
        (z,) = basic_op_extra_inputs[0]
        if (x.shape, x.dtype) != (z.shape, z.dtype) or x.shape[-1:] != norm.normalized_shape:
            s = add.reference(x, z)
            y = norm.op_forward(
                ctx, s, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
            )
            return y, [(), (s,), ()]
        tensors = x.contiguous(), z.contiguous(), norm.weight.contiguous()
        offset = float(norm.zero_centered_gamma)
        y, s, rstd, *_ = fused_add_rms_norm_forward(*tensors, norm.eps, offset, "gemma")
        if ctx.requires_grad:
            ctx.save_for_backward(*RMSNorm.Saved(s, rstd))
        return y, [(), (s,), ()]


# --8<-- [end:fused]


# --8<-- [start:fusion]
def refuses(add, make_extra, norm, *, env):
    if env.autocast_dtype is not None:
        return Refusal("AUTOCAST", "the kernel takes one dtype for its input and its output")
    if env.dtype == torch.float64:
        return Refusal("DTYPE", "the kernel computes in fp32")
    if len(norm.normalized_shape) != 1 or norm.normalized_shape[0] > 65536:
        return Refusal("SHAPE", "the kernel normalizes over one dimension of up to 65536")
    return None


FUSION = opfuser.Fusion(
    name="liger_add_rms_norm",
    stage="forward",
    pattern=(AddExtraInput, MakeExtraOutput, RMSNorm),
    refuses=refuses,
    requires=Requires(device="cuda", package="liger_kernel"),
    build=lambda *ops: LigerAddRMSNorm(ops),
)
handle = opfuser.register_forward_fusion(FUSION, prepend=True)
# --8<-- [end:fusion]
