"""Backward and joint fusions as users of te.ops write them."""

from __future__ import annotations

from typing import Any

import torch

import opfuser as te_ops
from opfuser import FusedOperation, FusibleOperation, OperationContext


class Windowed(FusedOperation):
    """Fuses every run of operations of exactly ``pattern``, found with a sliding window."""

    pattern: tuple[type, ...] = ()
    calls = 0

    @classmethod
    def fuse_ops(
        cls, ops: list[FusibleOperation], *, recipe: Any = None, **unused: Any
    ) -> list[FusibleOperation]:
        assert recipe is None
        out: list[FusibleOperation] = []
        window, ops = ops[: len(cls.pattern)], ops[len(cls.pattern) :]
        while len(window) == len(cls.pattern):
            if all(isinstance(op, kind) for op, kind in zip(window, cls.pattern)):
                out.append(cls(window))
                window = []
            else:
                out.append(window.pop(0))
            while ops and len(window) < len(cls.pattern):
                window.append(ops[0])
                ops = ops[1:]
        out.extend(window)
        return out


class BackwardLinearScale(Windowed):
    pattern = (te_ops.BasicLinear, te_ops.ConstantScale)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **unused: Any
    ) -> Any:
        type(self).calls += 1
        x, w = basic_op_ctxs[0].saved_tensors
        scale = self.basic_ops[1].scale
        dy = grad_output.double()
        dx = torch.matmul(dy, scale * w.double())
        dw = torch.matmul(dy.T, x.double()) * scale
        return dx.to(w.dtype), [(dw.to(w.dtype),), ()], [(), ()]


class BackwardAddRMSNorm(Windowed):
    pattern = (te_ops.MakeExtraOutput, te_ops.RMSNorm)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> Any:
        type(self).calls += 1
        x, rstd = basic_op_ctxs[1].saved_tensors
        weight = self.basic_ops[1].weight
        assert rstd.dtype == torch.float32
        assert rstd.numel() == x.numel() // weight.numel(), "one value per row"
        w = weight.double().view(-1)
        dy = grad_output.contiguous().view(x.size()).double().view(-1, w.numel())
        x2, r = x.double().view(-1, w.numel()), rstd.double().view(-1, 1)
        g = dy * w
        dx = r * g - x2 * r**3 * (g * x2).mean(-1, keepdim=True)
        dw = (dy * x2 * r).sum(0)
        add = basic_op_grad_extra_outputs[0][0]
        if add is not None:
            dx = dx + add.double().reshape(dx.shape)
        return dx.view(grad_output.size()).to(x.dtype), [(), (dw.to(weight.dtype),)], [(), ()]


class BackwardLayerNorm(Windowed):
    pattern = (te_ops.LayerNorm,)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **unused: Any
    ) -> Any:
        type(self).calls += 1
        x, mean, rstd = basic_op_ctxs[0].saved_tensors
        weight = self.basic_ops[0].weight
        assert mean.dtype == rstd.dtype == torch.float32
        w = weight.double().view(-1)
        dy = grad_output.double().reshape(-1, w.numel())
        r = rstd.double().view(-1, 1)
        xhat = (x.double().reshape(-1, w.numel()) - mean.double().view(-1, 1)) * r
        g = dy * w
        mean_of_products = (g * xhat).mean(-1, keepdim=True)
        dx = r * (g - g.mean(-1, keepdim=True) - xhat * mean_of_products)
        dw, db = (dy * xhat).sum(0), dy.sum(0)
        grads = (dw.to(weight.dtype), db.to(weight.dtype))
        return dx.view(grad_output.size()).to(x.dtype), [grads], [()]


class BackwardBiasActivation(Windowed):
    pattern = (te_ops.Bias, te_ops.SiLU)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **unused: Any
    ) -> Any:
        type(self).calls += 1
        assert basic_op_ctxs[0].saved_tensors == ()
        (h,) = basic_op_ctxs[1].saved_tensors
        s = torch.sigmoid(h.double())
        dx = grad_output.double() * s * (1 + h.double() * (1 - s))
        db = dx.reshape(-1, dx.shape[-1]).sum(0)
        return dx.to(h.dtype), [(db.to(h.dtype),), ()], [(), ()]


class BackwardReadsFlags(BackwardLinearScale):
    """Reads what te.ops' own forwards leave on the contexts, as its backward fusions do."""

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **unused: Any
    ) -> Any:
        type(self).calls += 1
        ctx = basic_op_ctxs[0]
        x, w = ctx.saved_tensors
        assert not ctx.with_quantized_compute
        assert ctx.input_quantizer is None
        assert ctx.weight_quantizer is None
        assert ctx.grad_output_quantizer is None
        assert ctx.grad_input_quantizer is None
        scale = self.basic_ops[1].scale
        dy = grad_output.to(ctx.dtype)
        dx = scale * torch.matmul(dy, w) if ctx.input_requires_grad else None
        dw = scale * torch.matmul(dy.T, x) if ctx.weight_requires_grad else None
        return dx, [(dw,), ()], [(), ()]


class JointGLU(Windowed):
    """Saves reduced state that only its own backward understands."""

    pattern = (te_ops.ConstantScale, te_ops.ReLU)

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, **unused: Any
    ) -> Any:
        positive = input_ * self.basic_ops[0].scale > 0
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(positive)
        return torch.where(positive, input_ * self.basic_ops[0].scale, 0), [(), ()]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **unused: Any
    ) -> Any:
        type(self).calls += 1
        (positive,) = basic_op_ctxs[0].saved_tensors
        return torch.where(positive, grad_output * self.basic_ops[0].scale, 0), [(), ()], [(), ()]
