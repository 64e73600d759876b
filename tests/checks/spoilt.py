"""Right operations and a right fusion, whose steps tests replace one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opfuser import BasicLinear, Bias, ConstantScale
from opfuser.core.fusion import Fusion, Stage
from opfuser.gemm import dgrad, wgrad
from opfuser.op import BasicOperation, FusedOperation, OperationContext


class Scaled(BasicOperation):
    """``y = w x²``."""

    class Saved(NamedTuple):
        x: Tensor
        w: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, 2.0, -1.0]))

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        self.save(ctx, input_, self.w)
        return self.compute(ctx, input_)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        x, w = self.saved(ctx)
        dx = 2 * grad_output * x * w if ctx.needs.input else None
        dw = (grad_output * x * x).reshape(-1, 3).sum(0) if ctx.needs.parameters[0] else None
        dx, dw = self.grads(dx, dw, x, grad_output)
        return dx, (dw,)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self.w * input_.square()

    # The steps, and what those that are spoilt read.

    def compute(self, ctx: Any, x: Tensor) -> Tensor:
        return self.right(x)

    def save(self, ctx: Any, x: Tensor, w: Tensor) -> None:
        if ctx.requires_grad:
            ctx.save_for_backward(x, w)

    def saved(self, ctx: Any) -> Any:
        return ctx.saved_tensors

    def grads(self, dx: Any, dw: Any, x: Any, dy: Tensor) -> Any:
        return dx, dw

    def right(self, x: Tensor) -> Tensor:
        return x * x * self.w

    def weight(self) -> Tensor:
        return self.w

    def trains(self) -> bool:
        return self.training


class Gain(BasicOperation):
    """``y = gain x``, with a factor in a buffer, and a flag that turns the sign."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.tensor(1.5))
        self.negative = False

    def factor(self, like: Tensor) -> Tensor:
        return (-self.gain if self.negative else self.gain).to(like.dtype)

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        ctx.factor = self.factor(input_)
        return input_ * ctx.factor

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        return grad_output * ctx.factor, ()


class LinearScaleGain(FusedOperation):
    """``y = gain s x Wᵀ``: right in forward, in backward, and as a joint fusion."""

    def __init__(self, linear: BasicLinear, scale: ConstantScale, gain: Gain) -> None:
        super().__init__((linear, scale, gain))
        self.capture(linear, scale, gain)

    def fuser_forward(self, ctxs: Any, x: Tensor, **kwargs: Any) -> Any:
        w = self.weight()
        x = x.to(w.dtype)
        self.save(ctxs[0], x, w)
        ctxs[2].factor = self.gain(x)
        return self.compute(ctxs[0], x), [(), (), ()]

    def fuser_backward(self, ctxs: Any, dy: Tensor, **kwargs: Any) -> Any:
        x, w = self.saved(ctxs[0])
        needs = ctxs[0].needs
        g = dy * (self.scale(ctxs[1]) * ctxs[2].factor)
        dx = dgrad(g, w) if needs.input else None
        dw = wgrad(g, x) if needs.parameters[0] else None
        dx, dw = self.grads(dx, dw, x, dy)
        return dx, [(dw,), (), ()], [(), (), ()]

    # The steps, and what those that are spoilt read.

    def capture(self, linear: BasicLinear, scale: ConstantScale, gain: Gain) -> None:
        """What a fault keeps from construction."""

    def weight(self) -> Tensor:
        return self.basic_ops[0].weight

    def scale(self, ctx: Any = None) -> float:
        scale: ConstantScale = self.basic_ops[1]
        return scale.scale if ctx is None else scale.frozen_settings(ctx).scale

    def gain(self, x: Tensor) -> Tensor:
        return self.basic_ops[2].factor(x)

    def right(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight()) * (self.scale() * self.gain(x))

    compute, saved, grads = Scaled.compute, Scaled.saved, Scaled.grads

    def save(self, ctx: Any, x: Tensor, w: Tensor) -> None:
        if ctx.requires_grad:
            ctx.save_for_backward(*needed(ctx, x, w))

    def trains(self) -> bool:
        return self.basic_ops[0].training


def needed(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What the gradients of a linear operation read, as BasicLinear saves it."""
    return x if ctx.needs.parameters[0] else None, w if ctx.needs.input else None


def spoilt(kind: type[Any], **methods: Any) -> Any:
    """The class with some of its methods replaced."""
    return type(kind.__name__, (kind,), methods)


def rule(
    stage: Stage = "forward",
    build: Callable[..., FusedOperation] = LinearScaleGain,
    name: str = "mine",
    **kwargs: Any,
) -> Fusion:
    return Fusion(name, stage, (BasicLinear, ConstantScale, Gain), build, **kwargs)


def operations(*first: nn.Module) -> list[nn.Module]:
    return [*first, BasicLinear(4, 3), ConstantScale(0.5), Gain()]


def with_bias() -> list[nn.Module]:
    """So that the input of what is fused is not that of the caller."""
    return operations(Bias(4))
