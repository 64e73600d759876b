"""Forward fusions as users of te.ops write them: constructor, kernels, sliding window."""

from __future__ import annotations

from typing import Any

import torch

import opfuser as te_ops
from opfuser import FusedOperation, FusibleOperation, OperationContext


class ForwardLinearSiLU(FusedOperation):
    """Linear and SiLU, with everything on the contexts that te.ops' own fusions put there."""

    enabled = True

    def __init__(self, *, linear: Any, silu: Any) -> None:
        super().__init__((linear, silu))

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, **unused: Any
    ) -> Any:
        weight = self.basic_ops[0].weight
        dtype = weight.dtype
        h = torch.matmul(input_, weight.T)
        out = torch.nn.functional.silu(h)
        linear_op_ctx, silu_op_ctx = basic_op_ctxs
        if linear_op_ctx.requires_grad:
            linear_op_ctx.save_for_backward(input_, weight)
            linear_op_ctx.with_quantized_compute = False
            linear_op_ctx.backward_override = None
            linear_op_ctx.input_quantizer = None
            linear_op_ctx.weight_quantizer = None
            linear_op_ctx.grad_output_quantizer = None
            linear_op_ctx.grad_input_quantizer = None
            linear_op_ctx.dtype = dtype
            linear_op_ctx.input_requires_grad = True
            linear_op_ctx.weight_requires_grad = True
        if silu_op_ctx.requires_grad:
            silu_op_ctx.save_for_backward(h)
            silu_op_ctx.dtype = dtype
            silu_op_ctx.prev_op_grad_output_quantizer = None
        return out, [(), ()]

    @staticmethod
    def fuse_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """The one-shot flag and the sliding window that test suites of te.ops have."""
        if not ForwardLinearSiLU.enabled:
            return ops
        ForwardLinearSiLU.enabled = False
        out = []
        window, ops = ops[:2], ops[2:]
        while len(window) == 2:
            if isinstance(window[0], te_ops.BasicLinear) and isinstance(window[1], te_ops.SiLU):
                op = ForwardLinearSiLU(linear=window[0], silu=window[1])
                window = [op]
            else:
                out.extend(window[:-1])
                window = window[-1:]
            out.extend(window[:-2])
            window = window[-2:]
            while ops and len(window) < 2:
                window.append(ops[0])
                ops = ops[1:]
        out.extend(window)
        return out


class Windowed(FusedOperation):
    """Fuses every run of operations of exactly ``pattern``, found with a sliding window."""

    pattern: tuple[type, ...] = ()

    @classmethod
    def fuse_ops(cls, ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        out: list[FusibleOperation] = []
        while ops:
            window = ops[: len(cls.pattern)]
            if [type(op) for op in window] == list(cls.pattern):
                window = [cls(window)]
                ops = ops[len(cls.pattern) :]
            else:
                window, ops = ops[:1], ops[1:]
            out.extend(window)
        return out


class ForwardRMSNormLinear(Windowed):
    pattern = (te_ops.RMSNorm, te_ops.BasicLinear)
    flatten = True

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, **unused: Any
    ) -> Any:
        norm, linear = self.basic_ops
        inner = norm.weight.numel()
        x = input_.contiguous().view(-1, inner)
        rstd = torch.rsqrt(x.float().square().mean(-1) + norm.eps)
        h = (x.float() * rstd[:, None] * norm.weight.float()).to(x.dtype)
        y = torch.matmul(h, linear.weight.T)
        if basic_op_ctxs[0].requires_grad:
            if self.flatten:
                basic_op_ctxs[0].save_for_backward(x, rstd)
            else:
                basic_op_ctxs[0].save_for_backward(input_, rstd.view(input_.shape[:-1]))
            basic_op_ctxs[0].dtype = x.dtype
        if basic_op_ctxs[1].requires_grad:
            # A GEMM does not care about the rows either.
            kept = h if self.flatten else h.view(input_.shape)
            basic_op_ctxs[1].save_for_backward(kept, linear.weight)
            basic_op_ctxs[1].dtype = x.dtype
        return y.view(*input_.shape[:-1], -1), [(), ()]


class ForwardLayerNormSwiGLU(Windowed):
    pattern = (te_ops.LayerNorm, te_ops.SwiGLU)
    flatten = True

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, **unused: Any
    ) -> Any:
        norm, _ = self.basic_ops
        inner = norm.weight.numel()
        x = input_.contiguous().view(-1, inner)
        mean = x.float().mean(-1)
        rstd = torch.rsqrt(x.float().var(-1, unbiased=False) + norm.eps)
        h = (x.float() - mean[:, None]) * rstd[:, None] * norm.weight.float() + norm.bias.float()
        h = h.to(x.dtype).view(input_.shape)
        a, b = h.chunk(2, -1)
        if basic_op_ctxs[0].requires_grad:
            if self.flatten:
                basic_op_ctxs[0].save_for_backward(x, mean, rstd)
            else:
                rows = input_.shape[:-1]
                basic_op_ctxs[0].save_for_backward(input_, mean.view(rows), rstd.view(rows))
            basic_op_ctxs[0].dtype = x.dtype
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].save_for_backward(h)
            basic_op_ctxs[1].dtype = x.dtype
            basic_op_ctxs[1].prev_op_grad_output_quantizer = None
        return torch.nn.functional.silu(a) * b, [(), ()]


class ForwardLinearBiasGELU(Windowed):
    pattern = (te_ops.BasicLinear, te_ops.Bias, te_ops.GELU)

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, **unused: Any
    ) -> Any:
        linear, bias, _ = self.basic_ops
        h = torch.nn.functional.linear(input_, linear.weight, bias.bias)
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, linear.weight)
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].grad_input_quantizer = None
        if basic_op_ctxs[2].requires_grad:
            basic_op_ctxs[2].save_for_backward(h)
        return torch.nn.functional.gelu(h, approximate="tanh"), [(), (), ()]


class ForwardMakeLinear(Windowed):
    """A window with an extra output."""

    pattern = (te_ops.MakeExtraOutput, te_ops.BasicLinear)

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, **unused: Any
    ) -> Any:
        weight = self.basic_ops[1].weight
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].save_for_backward(input_, weight)
        return torch.matmul(input_, weight.T), [(input_,), ()]
