"""Operations and fusions as users of te.ops write them; only the import is another one."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

import opfuser as te_ops
from opfuser import BasicOperation, FusedOperation, FusibleOperation, OperationContext


class LearnableScale(BasicOperation):
    """As the users' guide of te.ops writes one: quantizers positional, flags on the context."""

    def __init__(self, size: int, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        scale = torch.empty(size, device=device, dtype=dtype)
        self.scale: torch.nn.Parameter
        self.register_parameter("scale", torch.nn.Parameter(scale))
        self.first_calls = 0
        self.calls: list[bool] = []
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.scale)

    def pre_first_fuser_forward(self) -> None:
        super().pre_first_fuser_forward()
        self.first_calls += 1

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        super().pre_fuser_forward(requires_grad=requires_grad)
        self.calls.append(requires_grad)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Optional[Any],  # noqa: UP045 - as found in the field
        next_op_input_quantizer: Optional[Any],  # noqa: UP045
    ) -> torch.Tensor:
        assert prev_op_grad_output_quantizer is None
        assert next_op_input_quantizer is None
        x = input_.contiguous()
        if ctx.requires_grad:
            ctx.dtype = x.dtype
            ctx.input_requires_grad = True
            ctx.scale_requires_grad = self.scale.requires_grad
            ctx.save_for_backward(self.scale, x if ctx.scale_requires_grad else None)
        return x * self.scale

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[Optional[torch.Tensor]]]:  # noqa: UP045
        scale, x = ctx.saved_tensors
        dy = grad_output.to(ctx.dtype)
        grad_scale = None
        if ctx.scale_requires_grad:
            grad_scale = (dy * x).reshape(-1, scale.numel()).sum(0)
        return dy * scale if ctx.input_requires_grad else None, (grad_scale,)


class GatedTap(BasicOperation):
    """One extra input, one extra output; ``op_*`` refuse, as te.ops' operations of that kind do."""

    num_extra_inputs: int = 1
    num_extra_outputs: int = 1

    def op_forward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{self.__class__.__name__} overrides fuser_forward")

    def op_backward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{self.__class__.__name__} overrides fuser_backward")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> Any:
        assert len(basic_op_ctxs) == len(basic_op_kwargs) == len(basic_op_extra_inputs) == 1
        gate = basic_op_extra_inputs[0][0]
        ctx = basic_op_ctxs[0]
        power = basic_op_kwargs[0].get("power", 1)
        if ctx.requires_grad:
            ctx.power = power
            ctx.save_for_backward(input_, gate)
        return input_ * gate**power, [[input_ + gate]]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> Any:
        ctx = basic_op_ctxs[0]
        x, gate = ctx.saved_tensors
        extra = basic_op_grad_extra_outputs[0][0]
        dx = grad_output * gate**ctx.power
        dgate = grad_output * x * ctx.power * gate ** (ctx.power - 1)
        if extra is not None:
            dx, dgate = dx + extra, dgate + extra
        return dx, [[]], [(dgate,)]


class Windowed(FusedOperation):
    """Fuses every run of operations of exactly ``pattern``, found with a sliding window."""

    pattern: tuple[type, ...] = ()
    flatten = True  # norms written for te.ops save their input with all rows in one dimension
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


# Forward only: they fill the contexts of what they replace. The layouts are public: BasicLinear
# (input, weight), Bias nothing, activations (input,), RMSNorm (input, rstd), LayerNorm (input,
# mean, rstd).


class ForwardRMSNormLinear(Windowed):
    pattern = (te_ops.RMSNorm, te_ops.BasicLinear)

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        type(self).calls += 1
        norm, linear = self.basic_ops
        x = input_.contiguous().view(-1, norm.weight.numel())
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


class ForwardLinearBiasSiLU(Windowed):
    """With everything on the contexts that te.ops' own fusions put there."""

    pattern = (te_ops.BasicLinear, te_ops.Bias, te_ops.SiLU)
    enabled = True

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        type(self).calls += 1
        linear, bias, _ = self.basic_ops
        h = torch.nn.functional.linear(input_, linear.weight, bias.bias)
        linear_op_ctx, bias_op_ctx, silu_op_ctx = basic_op_ctxs
        if linear_op_ctx.requires_grad:
            linear_op_ctx.save_for_backward(input_, linear.weight)
            linear_op_ctx.with_quantized_compute = False
            linear_op_ctx.backward_override = None
            linear_op_ctx.input_quantizer = None
            linear_op_ctx.weight_quantizer = None
            linear_op_ctx.grad_output_quantizer = None
            linear_op_ctx.grad_input_quantizer = None
            linear_op_ctx.dtype = linear.weight.dtype
            linear_op_ctx.input_requires_grad = True
            linear_op_ctx.weight_requires_grad = True
        if bias_op_ctx.requires_grad:
            bias_op_ctx.grad_input_quantizer = None
        if silu_op_ctx.requires_grad:
            silu_op_ctx.save_for_backward(h)
            silu_op_ctx.dtype = linear.weight.dtype
            silu_op_ctx.prev_op_grad_output_quantizer = None
        return torch.nn.functional.silu(h), [(), (), ()]

    @classmethod
    def fuse_once(cls, ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """The one-shot flag that test suites of te.ops have."""
        if not cls.enabled:
            return ops
        cls.enabled = False
        return cls.fuse_ops(ops)


class ForwardMakeLinear(Windowed):
    """A window with an extra output."""

    pattern = (te_ops.MakeExtraOutput, te_ops.BasicLinear)

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        type(self).calls += 1
        weight = self.basic_ops[1].weight
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].save_for_backward(input_, weight)
        return torch.matmul(input_, weight.T), [(input_,), ()]


# Backward only: they read what the operations' own forwards left.


class BackwardLinearScale(Windowed):
    """Reads the attributes too that te.ops' forwards leave on the context."""

    pattern = (te_ops.BasicLinear, te_ops.ConstantScale)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
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
        dx = dw = None
        if ctx.input_requires_grad:
            dx = scale * torch.matmul(dy, w)
        if ctx.weight_requires_grad:
            dw = scale * torch.matmul(dy.flatten(0, -2).T, x.flatten(0, -2))
        return dx, [(dw,), ()], [(), ()]


class BackwardAddRMSNorm(Windowed):
    pattern = (te_ops.MakeExtraOutput, te_ops.RMSNorm)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
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

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
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


class JointScaleReLU(Windowed):
    """Both passes: saves reduced state that only its own backward understands."""

    pattern = (te_ops.ConstantScale, te_ops.ReLU)

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        positive = input_ * self.basic_ops[0].scale > 0
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(positive)
        return torch.where(positive, input_ * self.basic_ops[0].scale, 0), [(), ()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        type(self).calls += 1
        (positive,) = basic_op_ctxs[0].saved_tensors
        return torch.where(positive, grad_output * self.basic_ops[0].scale, 0), [(), ()], [(), ()]
