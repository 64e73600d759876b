# --8<-- [start:operations]
from typing import NamedTuple

import torch
from torch import Tensor

import opfuser
from opfuser import BasicOperation, FusedOperation

EPS = 1e-5
_norm_backward = torch.ops.aten.native_layer_norm_backward


def normalized(x):
    """(x - mean) / std over the last dimension, the mean, and one over the deviation."""
    return torch.native_layer_norm(x, x.shape[-1:], None, None, EPS)


class Normalize(BasicOperation):
    """LayerNorm without weights."""

    class Saved(NamedTuple):
        input: Tensor
        mean: Tensor
        rstd: Tensor

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        y, mean, rstd = normalized(input_)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(input_, mean, rstd))
        return y

    def op_backward(self, ctx, grad_output):
        x, mean, rstd = ctx.saved_tensors
        only_dx = [True, False, False]
        size = x.shape[-1:]
        dx, _, _ = _norm_backward(grad_output, x, size, mean, rstd, None, None, only_dx)
        return dx, ()

    def reference(self, input_, *extra_inputs, **kwargs):
        return torch.nn.functional.layer_norm(input_, input_.shape[-1:], eps=EPS)


class Modulate(BasicOperation):
    """y = x * (1 + scale) + shift; scale and shift, of the shape of x, are extra inputs."""

    num_extra_inputs = 2

    class Saved(NamedTuple):
        input: Tensor | None
        scale: Tensor | None

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        ((scale, shift),) = basic_op_extra_inputs
        ctx = basic_op_ctxs[0]
        if ctx.requires_grad:
            wants = ctx.needs
            saved = input_ if wants.extra_inputs[0] else None, scale if wants.input else None
            ctx.save_for_backward(*self.Saved(*saved))
        return self.reference(input_, scale, shift), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        x, scale = basic_op_ctxs[0].saved_tensors
        needs = basic_op_ctxs[0].needs
        dx = grad_output * (1 + scale) if needs.input else None
        dscale = grad_output * x if needs.extra_inputs[0] else None
        return dx, [()], [(dscale, grad_output)]

    def reference(self, input_, *extra_inputs, **kwargs):
        scale, shift = extra_inputs
        return input_ * (1 + scale) + shift


# --8<-- [end:operations]
# --8<-- [start:fusion]
@opfuser.fusion(name="adaptive_norm", stage="joint", pattern=(Normalize, Modulate))
class AdaptiveNorm(FusedOperation):
    """y = norm(x) * (1 + scale) + shift; saves x and statistics, and not norm(x)."""

    def __init__(self, norm, modulate):
        super().__init__((norm, modulate))

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        scale, shift = basic_op_extra_inputs[1]
        y, mean, rstd = normalized(input_)
        ctx = basic_op_ctxs[1]
        if ctx.requires_grad:
            wants_dx = basic_op_ctxs[0].needs.input
            ctx.save_for_backward(input_, mean, rstd, scale if wants_dx else None)
        return self.basic_ops[1].reference(y, scale, shift), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        x, mean, rstd, scale = basic_op_ctxs[1].saved_tensors
        dx = dscale = None
        if basic_op_ctxs[1].needs.extra_inputs[0]:
            dscale = grad_output * ((x - mean) * rstd).to(x.dtype)  # norm(x) is computed again
        if basic_op_ctxs[0].needs.input:
            size, only_dx = x.shape[-1:], [True, False, False]
            dy = grad_output * (1 + scale)
            dx, _, _ = _norm_backward(dy, x, size, mean, rstd, None, None, only_dx)
        return dx, [(), ()], [(), (dscale, grad_output)]


# --8<-- [end:fusion]
